"""G6: what is no rows, in a worker's mouth, after a cut; and where rows are joined."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import Raw
from sglang_kit import DIALECTS, DONE, SSE_HEAD, Engine, dumps, opened, oracle, sse

from dyn_relay.formats.base import CannotComplete, End, Event
from dyn_relay.formats.sglang.codec import STRIDE, Codec
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.sglang.replay import Replay
from dyn_relay.formats.traits import Traits

ASKED: dict[str, Any] = {
    "rid": "mine",
    "input_ids": [1, 2, 3],
    "sampling_params": {"max_new_tokens": 6},
    "return_routed_experts": True,
    "stream": True,
}
TRAITS = Traits(sampling_defaults={}, routed_experts=True)
WIDTH = 5


def rows(count: int, mark: int = 0, start: int = 0) -> str:
    """Rows of five int32, each of them its position and a mark."""
    numbers = [position + mark for position in range(start, start + count) for _ in range(WIDTH)]
    return base64.b64encode(b"".join(number.to_bytes(4, "little") for number in numbers)).decode()


def events(sent: dict[str, Any], engine: Engine, tell: dict[int, Any]) -> list[Event]:
    """An engine's, the i-th with these experts in its `meta_info`; -1 is the finish."""
    found = engine.events(sent)
    for at, value in tell.items():
        number = len(found) - 2 if at == -1 else at
        event = json.loads(found[number][1])
        event["meta_info"]["routed_experts"] = value
        found[number] = sse(event)
    return found


def attempt(
    exchange: SglangExchange, name: str, tell: dict[int, Any], cut: int | None = None, engine: Engine | None = None
) -> bytes:
    sent = json.loads(exchange.dispatch(TRAITS, name, 1.0).body)
    exchange.head(200, SSE_HEAD)
    return b"".join(exchange.feed([event], 2.0) for event in events(sent, engine or Engine(), tell)[:cut])


def cut_after(count: int, tell: dict[int, Any] | None = None, **more: Any) -> SglangExchange:
    exchange = opened({**ASKED, **more}, TRAITS)
    attempt(exchange, "mine", tell or {}, count)
    return exchange


ALL = 3 + 6 - 1
GARBAGE: dict[str, Any] = {
    "no string": [1, 2],
    "packed": {"data": "AAAA", "shape": [8, 1, 5], "dtype": "uint8"},
    "a number": 7,
    "no base64": "!!!!" * 40,
    "not padded": rows(ALL)[:-1],
    "a row too few": rows(ALL - 1) + "AAAA",
    "padding inside": rows(1) + rows(ALL - 1),
    "uint8": base64.b64encode(bytes(ALL * 3)).decode(),
    "nothing": "",
    "blank inside": " " + rows(ALL)[1:],
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", GARBAGE)
def test_a_continuations_finish_without_rows_is_none(how: str, stream: bool) -> None:
    """Nothing of it is shown, and the answer is not ended with it: another worker may do better."""
    exchange = cut_after(2, stream=stream)
    out = attempt(exchange, "again", {-1: GARBAGE[how]})
    assert exchange.end is End.GARBAGE
    assert "routed_experts" in exchange.detail
    assert exchange.delivered == 5
    assert b"[DONE]" not in out
    assert exchange.complete(3.0) is None
    out = attempt(exchange, "third", {-1: rows(ALL, mark=64)})
    assert exchange.end is End.FINISHED
    meta = json.loads(out.split(b"\n\n")[-3][6:] if stream else exchange.answer(4.0).body)["meta_info"]
    assert meta["routed_experts"] == rows(ALL, mark=64)
    assert exchange.recomputed() == {"routed_experts": [(0, 3 + 5 - 1)]}


def test_a_finish_that_lacks_them_is_none() -> None:
    exchange = cut_after(2)
    attempt(exchange, "again", {})
    assert (exchange.end, exchange.detail) == (End.GARBAGE, "a finish without routed_experts")


def test_a_first_attempts_finish_is_the_clients() -> None:
    """Whatever it has there: it passes as it came."""
    exchange = opened(ASKED, TRAITS)
    out = attempt(exchange, "mine", {-1: GARBAGE["packed"]})
    assert exchange.end is End.FINISHED
    assert b'"routed_experts":{"data":"AAAA"' in out


@pytest.mark.parametrize("how", ["no string", "packed", "no base64", "padding inside", "not padded", "uint8"])
def test_rows_that_were_told_early_and_are_none(how: str) -> None:
    """They are the client's already, and cannot be joined with others: the failure names the field."""
    exchange = cut_after(3, {2: GARBAGE[how]})
    with pytest.raises(CannotComplete, match="routed_experts"):
        exchange.complete(3.0)


def test_early_rows_of_another_width() -> None:
    exchange = cut_after(3, {2: rows(5)})
    assert exchange.complete(3.0) is None
    wider = base64.b64encode(bytes(ALL * 4 * 7)).decode()
    attempt(exchange, "again", {-1: wider})
    assert exchange.end is End.GARBAGE


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("told", [{0: rows(3)}, {1: rows(4), 3: rows(6)}, {0: rows(3), 1: rows(4), 2: rows(5)}])
def test_the_newest_rows_count(dialect: str, told: dict[int, str]) -> None:
    """Not every event must tell rows: those that were told stay, the rest was computed again."""
    exchange = cut_after(4, told)
    kept = max(told) + 3
    assert exchange.complete(3.0) is None
    out = attempt(exchange, "again", {-1: rows(ALL, mark=64)}, engine=Engine(dialect))
    last = json.loads(out.split(b"\n\n")[-3][6:])["meta_info"]
    mixed = base64.b64decode(rows(kept)) + base64.b64decode(rows(ALL - kept, 64, kept))
    assert base64.b64decode(last["routed_experts"]) == mixed
    again = {"routed_experts": [(kept, 3 + 4 - 1)]} if kept < 6 else {}
    assert exchange.recomputed() == again


def test_tokens_that_go_back_take_their_rows_with_them() -> None:
    """A unary answer whose weights changed inside an event: what is made again has other rows."""
    exchange = opened({**ASKED, "stream": False, "sampling_params": {"max_new_tokens": 12}}, TRAITS)
    engine = Engine("incremental", (1, 4, 4, 2), version="7", turn=6)
    attempt(exchange, "mine", {2: rows(3 + 9 - 1)}, 3, engine)
    assert exchange.complete(3.0) is None
    assert exchange.delivered == 5
    attempt(exchange, "again", {-1: rows(14, mark=64)})
    meta = json.loads(exchange.answer(4.0).body)["meta_info"]
    mixed = base64.b64decode(rows(7)) + base64.b64decode(rows(7, 64, 7))
    assert base64.b64decode(meta["routed_experts"]) == mixed
    assert exchange.recomputed() == {}


@pytest.mark.parametrize("stream", [True, False])
def test_a_lost_finish_asks_for_rows_alone(stream: bool) -> None:
    exchange = opened(
        {**ASKED, "stream": stream, "sampling_params": {"max_new_tokens": 6, "min_new_tokens": 2}}, TRAITS
    )
    attempt(exchange, "mine", {}, 6, Engine(late_finish=True))
    assert exchange.complete(3.0) is None
    for wrong in ({}, {"routed_experts": rows(3)}):
        sent = json.loads(exchange.dispatch(TRAITS, "again", 3.0).body)
        assert sent["sampling_params"] == {"max_new_tokens": 0, "min_new_tokens": 0}
        assert sent["input_ids"] == [1, 2, 3, *oracle(ASKED).ids]
        exchange.head(200, SSE_HEAD)
        assert exchange.feed([answer(sent, wrong)], 4.0) == b""
        assert exchange.end is End.GARBAGE
        assert exchange.complete(4.0) is None
    sent = json.loads(exchange.dispatch(TRAITS, "third", 3.0, 2).body)
    assert sent["data_parallel_rank"] == 2
    exchange.head(200, SSE_HEAD)
    out = exchange.feed([answer(sent, {"routed_experts": rows(ALL)}), (b"data: [DONE]\n\n", b"[DONE]")], 4.0)
    assert exchange.end is End.FINISHED
    last = json.loads(out.split(b"\n\n")[0][6:] if stream else exchange.answer(5.0).body)
    meta = last["meta_info"]
    assert last["output_ids"] == oracle(ASKED).ids
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 3, 6)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["routed_experts"] == rows(ALL)
    assert out.endswith(b"data: [DONE]\n\n") == stream
    assert exchange.recomputed() == {"routed_experts": [(0, ALL)]}
    assert exchange.delivered == 6


def answer(sent: dict[str, Any], more: dict[str, Any], **changes: Any) -> Event:
    """To a request for no token."""
    meta = {"id": sent["rid"], "finish_reason": {"type": "length", "length": 0}, "completion_tokens": 0}
    meta |= {"prompt_tokens": len(sent["input_ids"]), "weight_version": "default", **more}
    return sse(dumps({"output_ids": [], "meta_info": meta | changes}))


@pytest.mark.parametrize(
    "changes", [{"completion_tokens": 1}, {"finish_reason": None}, {"id": "another"}], ids=["token", "no end", "rid"]
)
def test_more_than_rows_is_not_taken(changes: dict[str, Any]) -> None:
    exchange = opened(ASKED, TRAITS)
    attempt(exchange, "mine", {}, 6, Engine(late_finish=True))
    assert exchange.complete(3.0) is None
    sent = json.loads(exchange.dispatch(TRAITS, "again", 3.0).body)
    exchange.head(200, SSE_HEAD)
    assert exchange.feed([answer(sent, {"routed_experts": rows(ALL)}, **changes)], 4.0) == b""
    assert exchange.end is End.GARBAGE


def test_an_engine_that_refuses_to_tell_rows_fails() -> None:
    exchange = opened(ASKED, TRAITS)
    attempt(exchange, "mine", {}, 6, Engine(late_finish=True))
    assert exchange.complete(3.0) is None
    exchange.dispatch(TRAITS, "again", 3.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed([sse({"error": {"message": "no", "code": 500}})], 4.0)
    assert (exchange.end, exchange.detail) == (End.FAILED, "no")
    assert exchange.complete(4.0) is None


def test_no_rows_before_the_start() -> None:
    """A start at the prompt's end: of a sequence of one token more there are none, and none is "", as stock has it."""
    replay = Replay("routed_experts", 3, Codec())
    replay.check(Raw(b'""'), 4)
    for value in (b'"AAAA"', b'"AAAAAAAAAAA="'):
        with pytest.raises(ValueError, match="are not 0 rows"):
            replay.check(Raw(value), 4)


def test_padding_where_two_pieces_meet() -> None:
    """Each piece is good base64, the whole is not."""
    value = rows(60_000)
    assert len(value) > STRIDE
    spoiled = value[: STRIDE - 4] + "AA==" + value[STRIDE:]
    with pytest.raises(ValueError, match="padding in its midst"):
        Replay("routed_experts", 0, Codec()).check(Raw(dumps(spoiled)), 60_001)


def test_who_may_go_on_with_rows() -> None:
    """G4: whoever has not said that he can is out, once there are tokens."""
    kinds = {value: Traits(sampling_defaults={}, routed_experts=value) for value in (True, False, None)}
    exchange = cut_after(0)
    assert [exchange.unfit(traits) for traits in kinds.values()] == ["", "", ""]
    exchange = cut_after(2)
    assert [exchange.unfit(traits) for traits in kinds.values()] == ["", "routed_experts", "routed_experts"]
    exchange = cut_after(2, return_routed_experts=False)
    assert [exchange.unfit(traits) for traits in kinds.values()] == ["", "", ""]


@pytest.mark.parametrize("count", [1, 7, 60_000])
def test_large_rows_are_read_in_pieces(count: int) -> None:
    replay = Replay("routed_experts", 0, Codec())
    value = Raw(dumps(rows(count)))
    replay.check(value, count + 1)
    replay.note(value, count)
    replay.settle(1, 0, count)
    assert replay.shown(Raw(dumps(rows(count, 64))), 1, count, count) == value


def test_two_stretches_that_were_computed_again() -> None:
    """The second worker went through what the first had made, and told rows; the third through what came after them."""
    replay = Replay("routed_experts", 0, Codec())
    replay.settle(3, 0, 2)
    replay.note(Raw(dumps(rows(5, 64))), 3)
    replay.settle(3, 2, 4)
    replay.shown(Raw(dumps(rows(8, 128))), 3, 4, 6)
    assert replay.recomputed == [(0, 4), (5, 6)]


def test_rows_of_an_earlier_attempt_are_not_told_again() -> None:
    """Three cuts; only the first worker told rows."""
    replay = Replay("routed_experts", 0, Codec())
    replay.note(Raw(dumps(rows(4))), 2)
    for before, tokens in ((0, 2), (2, 4), (4, 6)):
        replay.settle(3, before, tokens)
    replay.shown(Raw(dumps(rows(10, 64))), 3, 6, 8)
    assert replay.recomputed == [(4, 8)]


def test_an_abort_owes_no_rows() -> None:
    """Of a continuation that somebody aborts: stock tells none."""
    exchange = cut_after(2)
    sent = json.loads(exchange.dispatch(TRAITS, "again", 1.0).body)
    exchange.head(200, SSE_HEAD)
    event = json.loads(Engine().events(sent)[0][1])
    event["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    exchange.feed([sse(event), DONE], 2.0)
    assert (exchange.end, exchange.delivered) == (End.ABORTED, 3)


@pytest.mark.parametrize("tells", [True, False])
def test_rows_alone_say_that_they_were_computed_again(tells: bool) -> None:
    """If that was asked for (`--tell-recomputed-rows`)."""
    exchange = opened({**ASKED, "return_indexer_topk": True}, TRAITS, tells_recomputed=tells)
    attempt(exchange, "mine", {}, 6, Engine(late_finish=True))
    assert exchange.complete(3.0) is None
    sent = json.loads(exchange.dispatch(TRAITS, "again", 3.0).body)
    exchange.head(200, SSE_HEAD)
    told = {"routed_experts": rows(ALL), "indexer_topk": rows(ALL)}
    out = exchange.feed([answer(sent, told)], 4.0)
    meta = json.loads(out.split(b"\n\n")[0][6:])["meta_info"]
    again = {"routed_experts": [[0, ALL]], "indexer_topk": [[0, ALL]]}
    assert meta.get("dyn_relay_recomputed_rows") == (again if tells else None)


def test_one_field_that_is_owed_is_enough() -> None:
    """The worker has said that it does not tell the other: a lost finish waits for the rows of this one."""
    one = replace(TRAITS, indexer_topk=False)
    exchange = opened({**ASKED, "return_indexer_topk": True}, one)
    attempt(exchange, "mine", {}, 6, Engine(late_finish=True))
    assert exchange.complete(3.0) is None
    assert exchange.end is None
