"""What a body says of where it belongs, and what an attempt at a data-parallel rank sends."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from sglang_kit import SSE_HEAD, dumps, opened, request, sse

from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.traits import UNKNOWN, Traits

NEW, OLD = Traits(version="0.5.23", sampling_defaults={}), Traits(version="0.5.9", sampling_defaults={})
PLAIN: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 9}, "stream": True, "rid": "mine"}


def cut(exchange: Any, name: str = "mine") -> None:
    """Two tokens, 7 and 8, and no end."""
    event = {"output_ids": [7, 8], "meta_info": {"id": name, "finish_reason": None, "completion_tokens": 2}}
    exchange.head(200, SSE_HEAD)
    exchange.feed([sse(event)], 1.0)
    assert exchange.complete(2.0) is None


# -- the prefix


@pytest.mark.parametrize(
    ("body", "prefix"),
    [
        ({"input_ids": [1, 2, 3]}, [1, 2, 3]),
        ({"input_ids": [1, 2], "text": "ids win"}, [1, 2]),
        ({"text": "hello é"}, "hello é"),
        ({"text": "x" * 10_000}, "x" * 10_000),
        ({"text": "hello", "input_ids": None}, "hello"),
        ({"input_ids": [[4, 5], [6]]}, [4, 5]),
        ({"text": ["first", "second"]}, "first"),
        ({"text": [], "input_ids": []}, []),
        ({"text": []}, None),
        ({"input_ids": [2**32]}, None),
        ({"input_ids": "odd"}, None),
        ({"input_embeds": [[0.5]]}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_prefix(body: dict[str, Any], prefix: object) -> None:
    """Prompt ids, or a text; of a batch its first prompt's; None if there is nothing to go by."""
    found = SglangFormat().open(request(dumps(body)), "given").prefix()
    assert (list(found) if isinstance(found, array) else found) == prefix


def test_a_continuations_prefix_has_what_was_delivered() -> None:
    exchange = opened(dumps(PLAIN), NEW)
    exchange.dispatch(NEW, "mine", 0.0)
    cut(exchange)
    assert list(exchange.prefix() or ()) == [1, 2, 7, 8]


# -- the session


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({"rid": "job"}, "job"),
        ({"rid": "conv_t1"}, "conv"),
        ({"rid": "conv_t2_r1"}, "conv"),
        ({"rid": "conv_r3"}, "conv"),
        ({"rid": "conv_t"}, "conv_t"),
        ({"rid": "_t1"}, "_t1"),
        ({"rid": "a", "session_id": "s"}, "s"),
        ({"conversation_id": "c", "session_id": "s"}, "s"),
        ({"conversation_id": "c", "routing_key": "k"}, "k"),
        ({"session_params": {"id": "opened", "rid": "x"}, "rid": "a"}, "opened"),
        ({"session_id": 5, "rid": "a"}, "a"),
        ({}, ""),
    ],
    ids=str,
)
def test_the_session(body: dict[str, Any], session: str) -> None:
    """A3: a rid that is used again; turns and retries of one, as SMG reads them."""
    assert SglangFormat().open(request(dumps({"input_ids": [1], **body})), "made up").session == session


def test_what_separates_caches() -> None:
    def space(**fields: Any) -> bytes:
        return SglangFormat().open(request(dumps({"input_ids": [1], **fields})), "x").cache_space

    different = [
        {},
        {"lora_path": "a"},
        {"lora_path": "b"},
        {"extra_key": "a"},
        {"cache_salt": "a"},
        {"lora_path": "a", "extra_key": "a"},
    ]
    assert len({space(**fields) for fields in different}) == len(different)
    assert space(extra_key=None, rid="r", priority=3) == space()


# -- the rank


@pytest.mark.parametrize(
    ("fields", "pinned"),
    [
        ({}, None),
        ({"routed_dp_rank": 3}, 3),
        ({"data_parallel_rank": 2}, 2),
        ({"routed_dp_rank": 0, "data_parallel_rank": 2}, 0),
        ({"routed_dp_rank": None, "data_parallel_rank": 2}, 2),
        ({"routed_dp_rank": None}, None),
        ({"routed_dp_rank": "1"}, -1),
        ({"routed_dp_rank": True}, -1),
        ({"routed_dp_rank": -5}, -1),
        ({"routed_dp_rank": [0, 1]}, -1),
        ({"routed_dp_rank": 1.0}, -1),
    ],
    ids=str,
)
def test_what_the_client_asks_for(fields: dict[str, Any], pinned: int | None) -> None:
    assert SglangFormat().open(request(dumps({**PLAIN, **fields})), "x").pinned == pinned


@pytest.mark.parametrize(
    ("traits", "name"),
    [
        (NEW, b"routed_dp_rank"),
        (Traits(version="0.5.19"), b"routed_dp_rank"),
        (Traits(version="0.6.0rc1"), b"routed_dp_rank"),
        (OLD, b"data_parallel_rank"),
        (Traits(version="0.5.18.post2"), b"data_parallel_rank"),
        (UNKNOWN, b"data_parallel_rank"),
    ],
    ids=str,
)
def test_the_field_that_the_release_knows(traits: Traits, name: bytes) -> None:
    """Every release from 2025 on takes the old name, the newest with a warning."""
    body = b'{ "rid":"mine","input_ids":[1, 2],"x":1.50,"stream":true,"big":9007199254740993 }'
    sent = opened(body, traits).dispatch(traits, "mine", 0.0, 0).body
    assert sent == b'{"' + name + b'":0,' + body[1:]


def test_rid_and_rank_go_in_front_together() -> None:
    body = b'{"input_ids":[1, 2],"stream":true}'
    sent = opened(body, NEW).dispatch(NEW, "made", 0.0, 2).body
    assert sent == b'{"routed_dp_rank":2,"rid":"made",' + body[1:]


@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
@pytest.mark.parametrize("field", ["routed_dp_rank", "data_parallel_rank"])
def test_a_rank_that_the_client_asks_for_is_its_own_to_say(field: str, stream: bool) -> None:
    """The first attempt, at that rank: not a byte is changed. Later ones name the rank that they are sent to, once."""
    body = {**PLAIN, field: 1, "stream": stream}
    exchange = opened(dumps(body), NEW)
    first = exchange.dispatch(NEW, "mine", 0.0, 1).body
    assert json.loads(first)[field] == 1
    assert not stream or first == dumps(body)
    cut(exchange)
    second = json.loads(exchange.dispatch(NEW, "again", 3.0, 0).body)
    assert second["routed_dp_rank"] == 0
    assert "data_parallel_rank" not in second
    assert second["input_ids"] == [1, 2, 7, 8]


@pytest.mark.parametrize("rank", [0, None])
def test_one_that_is_not_to_be_had_is_not_said(rank: int | None) -> None:
    """O2: the first attempt goes to another rank than was asked for; without a rank, the client's own words go."""
    body = {**PLAIN, "routed_dp_rank": None, "data_parallel_rank": 3}
    sent = json.loads(opened(dumps(body), NEW).dispatch(NEW, "mine", 0.0, rank).body)
    said = {name: sent[name] for name in ("routed_dp_rank", "data_parallel_rank") if name in sent}
    assert said == ({"routed_dp_rank": 0} if rank == 0 else {"routed_dp_rank": None, "data_parallel_rank": 3})


def test_what_is_not_migratable_has_its_rank_too() -> None:
    """At each attempt anew: a batch, a grammar; a body that is no JSON goes as it is."""
    for body in (
        b'{"input_ids":[[1],[2]],"sampling_params":{"n": 2}}',
        b'{"input_ids":[1],"sampling_params":{"regex": "a+"}}',
        b'{"text":["a","b"],"stream":true}',
    ):
        exchange = opened(body, NEW)
        assert not exchange.verdict.migratable
        assert exchange.dispatch(NEW, "x", 0.0, 3).body == b'{"routed_dp_rank":3,' + body[1:]
        assert exchange.dispatch(OLD, "y", 1.0, 1).body == b'{"data_parallel_rank":1,' + body[1:]
    for body in (b"[1]", b"{", b"", b"\xff{}"):
        assert opened(body, NEW).dispatch(NEW, "x", 0.0, 3).body == body


def test_one_that_is_not_migratable_and_asks_for_a_rank() -> None:
    body = b'{"input_ids":[[1],[2]],"data_parallel_rank":1}'
    exchange = opened(body, NEW)
    assert exchange.dispatch(NEW, "x", 0.0, 1).body == body
    assert json.loads(exchange.dispatch(NEW, "y", 1.0, 0).body) == {"input_ids": [[1], [2]], "routed_dp_rank": 0}


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        (b"4", 4),
        (b"1", 1),
        (b"0", None),
        (b"-1", None),
        (b"true", None),
        (b'"4"', None),
        (b"1e9", None),
        (b"1000000000", None),
    ],
)
def test_how_many_ranks_a_worker_says_to_have(said: bytes, ranks: int | None) -> None:
    assert SglangFormat().traits({"/server_info": b'{"dp_size":%b}' % said}).dp_size == ranks
