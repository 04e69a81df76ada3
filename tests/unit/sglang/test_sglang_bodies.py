"""What each attempt sends: the client's own bytes wherever nothing has to change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_kit import SSE_HEAD, TOLD, Engine, dumps, opened

from dyn_relay.formats.sglang.continuation import release, remaining
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.traits import UNKNOWN, Traits

NEW = Traits(version="0.5.23", sampling_defaults={})


def after(exchange: SglangExchange, tokens: int, traits: Traits = TOLD) -> bytes:
    """The next attempt's body once the current one has delivered `tokens` and died."""
    sent = exchange.dispatch(traits, "first", 0.0)
    exchange.head(200, SSE_HEAD)
    body = {**json.loads(sent.body), "sampling_params": {"max_new_tokens": 1000}}
    for event in Engine().events(body)[:tokens]:
        exchange.feed([event], 1.0)
    assert exchange.delivered == tokens
    assert exchange.complete(2.0) is None
    return exchange.dispatch(traits, "second", 3.0).body


@pytest.mark.parametrize(
    "body",
    [
        b'{"rid":"r", "input_ids":[1,2],"stream":true}',
        b' {\n "stream" : true, "input_ids" : [ 1 , 2 ] , "rid" : "r", "x": 1e3, "sampling_params": null }',
        b'{"rid":"q","rid":"r","input_ids":[1],"input_ids":[2],"stream":true,"sampling_params":{"max_new_tokens":16}}',
    ],
)
def test_first_stream_is_the_clients_bytes(body: bytes) -> None:
    """E13, J7."""
    exchange = opened(body)
    assert exchange.dispatch(NEW, "r", 0.0).body == body
    assert exchange.rid == "r"


@pytest.mark.parametrize("rid", [b'"rid":"r",', b'"rid":null,', b""])
def test_the_name_that_the_relay_chooses(rid: bytes) -> None:
    """C3: a client's rid that begins like another live one is not the name that the worker knows."""
    exchange = opened(b'{%s"input_ids":[1, 2],"stream":true,"f":1.10}' % rid)
    sent = exchange.dispatch(NEW, "other", 0.0).body
    assert json.loads(sent)["rid"] == "other"
    assert b'"input_ids":[1, 2],"stream":true,"f":1.10' in sent
    assert exchange.rid == ("r" if b'"r"' in rid else "given")


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_not_migratable_keeps_its_name(stream: bool) -> None:
    body = dumps({"rid": "r", "input_ids": [1], "sampling_params": {"regex": "x"}, "stream": stream})
    exchange = opened(body)
    assert exchange.dispatch(NEW, "other", 0.0).body == body
    if stream:
        exchange.head(200, SSE_HEAD)
        whole = Engine().events({"rid": "r", "input_ids": [1]})[0]
        assert exchange.feed([whole], 1.0) == whole[0]


def test_rid_is_put_in_front() -> None:
    body = b'  {"input_ids":[1, 2],"stream":true,"big":18446744073709551615}'
    exchange = opened(body)
    assert (
        exchange.dispatch(UNKNOWN, "given", 0.0).body
        == b'  {"rid":"given","input_ids":[1, 2],"stream":true,"big":18446744073709551615}'
    )
    assert (
        json.loads(opened(b'{"input_ids":[1],"stream":true,"rid":null}').dispatch(UNKNOWN, "g", 0.0).body)["rid"] == "g"
    )


def test_unary_becomes_a_stream() -> None:
    """D3; the values that are not ours keep their spelling."""
    body = (
        b'{"input_ids":[1],"stream":false,"sampling_params":{"temperature":1.0e-1,"max_new_tokens":600},'
        b'"room":9223372036854775807}'
    )
    sent = opened(body, NEW).dispatch(NEW, "given", 0.0).body
    assert sent == (
        b'{"input_ids":[1],"stream":true,"sampling_params":{"temperature":1.0e-1,"max_new_tokens":600,"stream_interval":40},'
        b'"room":9223372036854775807,"rid":"given"}'
    )


@pytest.mark.parametrize(
    ("traits", "params", "interval"),
    [
        (NEW, {"max_new_tokens": 1}, 32),
        (NEW, {"max_new_tokens": 480}, 32),
        (NEW, {"max_new_tokens": 481}, 33),
        (NEW, {"max_new_tokens": 495}, 33),
        (NEW, None, 32),
        (Traits(version="0.5.23.post1", incremental=True), {"max_new_tokens": 4000}, 32),
        (Traits(version="0.5.24rc1", incremental=False), {"max_new_tokens": 1500}, 100),
        (Traits(version="0.5.22"), {"max_new_tokens": 150}, None),
        (Traits(version="0.5"), {"max_new_tokens": 150}, None),
        (Traits(version="dev"), {"max_new_tokens": 150}, None),
        (UNKNOWN, {"max_new_tokens": 150}, None),
        (NEW, {"max_new_tokens": 150, "stream_interval": 3}, 3),
    ],
)
def test_stream_interval(traits: Traits, params: dict[str, Any] | None, interval: int | None) -> None:
    """An engine that does not know the key would answer 400; one that does sends the answer in few events."""
    exchange = opened({"input_ids": [1], "sampling_params": params}, traits)
    sent = json.loads(exchange.dispatch(traits, "x", 0.0).body)
    assert (sent["sampling_params"] or {}).get("stream_interval") == interval
    assert exchange.stall_allowance() == pytest.approx((interval or 0) * 0.1)


def test_streams_keep_their_cadence() -> None:
    exchange = opened({"rid": "r", "input_ids": [1], "stream": True}, NEW)
    assert b"stream_interval" not in exchange.dispatch(NEW, "r", 0.0).body
    assert exchange.stall_allowance() == 0


def test_resent_bytes_of_a_cumulative_worker() -> None:
    """A unary answer costs at most about 8 times its bytes upstream."""
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 600}}
    interval = json.loads(opened(body, NEW).dispatch(NEW, "x", 0.0).body)["sampling_params"]["stream_interval"]
    sent = [600, *range(1, 600, interval)]
    assert sum(sent) <= 8.5 * 600


def test_continuation_keeps_everything_else() -> None:
    """E1, E13, I5: only what must change does."""
    body = (
        b'{"rid":"r","input_ids": [1, 2 ,3],"stream":true,"text":"x","big":18446744073709551615,"f":1.10e-7,'
        b'"kv_hints":{"a":1},"routed_dp_rank":3,"data_parallel_rank":1,"logprob_start_len":0,"return_logprob":true,'
        b'"sampling_params":{"max_new_tokens":10,"min_new_tokens":4,"temperature":0.70,"odd":[ 1.0 ]}}'
    )
    exchange = opened(body)
    ids = json.loads(after(exchange, 3))["input_ids"][3:]
    assert exchange.delivered == len(ids) == 3
    exchange = opened(body)
    assert after(exchange, 3) == (
        b'{"rid":"second","input_ids":[1, 2 ,3,' + ",".join(map(str, ids)).encode() + b'],"stream":true,'
        b'"big":18446744073709551615,"f":1.10e-7,"logprob_start_len":-1,"return_logprob":true,'
        b'"sampling_params":{"max_new_tokens":7,"min_new_tokens":1,"temperature":0.70,"odd":[ 1.0 ]}}'
    )


def test_nothing_delivered_is_the_request_again() -> None:
    """The prompt's logprobs were not delivered either; O2: what was meant for one worker is not sent to another."""
    body = b'{"rid":"r","input_ids":[1, 2],"text":"x","routed_dp_rank":3,"logprob_start_len":0,"stream":true}'
    assert (
        after(opened(body), 0) == b'{"rid":"second","input_ids":[1, 2],"text":"x","logprob_start_len":0,"stream":true}'
    )


@pytest.mark.parametrize(
    ("params", "defaults", "left"),
    [
        (None, {}, {"max_new_tokens": 125}),
        ({}, {}, {"max_new_tokens": 125}),
        ({"temperature": 0}, {"max_new_tokens": 50}, {"temperature": 0, "max_new_tokens": 47}),
        ({}, {"min_new_tokens": 5}, {"max_new_tokens": 125, "min_new_tokens": 2}),
        ({"min_new_tokens": 0}, {}, {"max_new_tokens": 125, "min_new_tokens": 0}),
        ({"min_new_tokens": 2, "max_new_tokens": 9}, {}, {"max_new_tokens": 6, "min_new_tokens": 0}),
    ],
)
def test_budget_is_resolved(params: object, defaults: dict[str, object], left: dict[str, object]) -> None:
    """E2, C9: an absent budget is the worker's default, else 128; it is sent, reduced."""
    traits = Traits(sampling_defaults=defaults)
    exchange = opened({"rid": "r", "input_ids": [1], "stream": True, "sampling_params": params}, traits)
    assert json.loads(after(exchange, 3, traits))["sampling_params"] == left


LIMITED = Traits(max_input=2042, sampling_defaults={})
LONG = {"rid": "r", "input_ids": [7] * 2000, "stream": True}


@pytest.mark.parametrize(
    ("params", "limit", "left"),
    [
        ({}, 2042, {"max_new_tokens": 45}),
        (None, 2042, {"max_new_tokens": 45}),
        ({}, None, {"max_new_tokens": 125}),
        ({}, 2122, {"max_new_tokens": 125}),
        ({}, 2121, {"max_new_tokens": 124}),
        ({}, 1990, {"max_new_tokens": 0}),
        ({"max_new_tokens": 48}, 2042, {"max_new_tokens": 45}),
        ({"max_new_tokens": 100}, 2042, {"max_new_tokens": 97}),
    ],
)
def test_a_budget_that_nobody_gave_fits_the_context(params: Any, limit: int | None, left: dict[str, Any]) -> None:
    """E2: the context has 6 tokens more than `max_req_input_len`; only a budget that is given is refused above it."""
    exchange = opened({**LONG, "sampling_params": params})
    assert json.loads(after(exchange, 3, Traits(max_input=limit, sampling_defaults={})))["sampling_params"] == left


def test_a_workers_own_budget_fits_the_context() -> None:
    traits = Traits(max_input=2042, sampling_defaults={"max_new_tokens": 500, "min_new_tokens": 400})
    sent = json.loads(after(opened(LONG, traits), 3, traits))
    assert sent["sampling_params"] == {"max_new_tokens": 45, "min_new_tokens": 45}


def test_the_length_at_the_context_limit() -> None:
    """The engine itself shortens the budget, by the whole of its prompt: the sum is the uninterrupted run's."""
    exchange = opened({**LONG, "stream": False}, LIMITED)
    after(exchange, 3, LIMITED)
    exchange.head(200, SSE_HEAD)
    finish = {"type": "length", "length": 2048 - 2 - 2003}
    for event in Engine().events({"rid": "second", "input_ids": [7] * 2003, "sampling_params": {"max_new_tokens": 43}}):
        exchange.feed([(event[0], event[1].replace(dumps({"type": "length", "length": 43}), dumps(finish)))], 4.0)
    meta = json.loads(exchange.answer(5.0).body)["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 46}
    assert meta["completion_tokens"] == 46


@pytest.mark.parametrize(
    ("params", "prompt", "other", "same"),
    [
        ({}, 2000, 2042, True),
        ({}, 2000, 2043, False),
        ({}, 2000, 4000, False),
        ({}, 2000, 2041, False),
        ({}, 2000, None, True),
        ({}, 1918, 4000, True),
        ({}, 1919, 4000, False),
        ({}, 1918, 2041, False),
        ({"max_new_tokens": 48}, 2000, 4000, False),
        ({"max_new_tokens": 46}, 2000, 4000, True),
    ],
)
def test_answers_that_end_at_the_context_limit(params: Any, prompt: int, other: int | None, same: bool) -> None:
    """Law 1: they end elsewhere on a worker with another limit; 46 tokens fit after a prompt of 2000."""
    body = {**LONG, "input_ids": [7] * prompt, "sampling_params": params}
    exchange = opened(body, LIMITED)
    assert not exchange.unfit(Traits(max_input=4000))  # nothing was delivered: there is no answer yet
    after(exchange, 3, LIMITED)
    assert (not exchange.unfit(Traits(max_input=other, sampling_defaults={}))) == same


@pytest.mark.parametrize(("asked", "sent"), [(None, None), (-1, -1), (0, -1), (2, -1)])
def test_logprob_start(asked: int | None, sent: int | None) -> None:
    body = {"rid": "r", "input_ids": [1, 2, 3], "stream": True, "logprob_start_len": asked}
    assert json.loads(after(opened(body), 1))["logprob_start_len"] == sent


@settings(max_examples=512)
@given(most=st.integers(0, 2**63 - 1), least=st.integers(0, 2**63 - 1), delivered=st.integers(0, 2**63 - 1))
def test_saturation(most: int, least: int, delivered: int) -> None:
    """C9: against an oracle that counts tokens rather than subtracts."""
    left, floor = remaining(most, least, delivered)
    assert left == len(range(delivered, most)) if most < 2**62 else left == max(0, most - delivered)
    assert 0 <= floor <= left
    if least <= most:
        assert floor == (0 if delivered >= least else least - delivered)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.5.23", (0, 5, 23)), ("0.5.23.post1", (0, 5, 23)), ("0.6rc1", (0, 6)), ("x", ()), ("", ()), (None, ())],
)
def test_release(version: str | None, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


def test_samples_of_one_prompt_are_one_suspect() -> None:
    """Their seeds and names differ, and no seed has ever killed an engine."""
    asked = {"input_ids": [5, 6], "sampling_params": {"temperature": 1, "sampling_seed": 1}, "rid": "a"}
    other = {"input_ids": [5, 6], "sampling_params": {"temperature": 1, "sampling_seed": 2}, "rid": "b"}
    assert opened(asked).fingerprint() == opened(other).fingerprint()
    for change in ({"input_ids": [5, 7]}, {"top_logprobs_num": 9}, {"sampling_params": {"temperature": 1, "top_k": 3}}):
        assert opened({**other, **change}).fingerprint() != opened(asked).fingerprint()
