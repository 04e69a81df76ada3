"""Weight updates while an answer is made: which tokens a cut answer keeps, and whose they are said to be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang_kit import DIALECTS, SSE_HEAD, Engine, opened, oracle, sse

from dyn_relay.formats.base import CannotComplete, End, Event
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.sglang.spans import Span, merge, stated
from dyn_relay.formats.sglang.wire import raw
from dyn_relay.formats.traits import UNKNOWN
from dyn_relay.formats.weights import WeightPolicy

ASKED: dict[str, Any] = {
    "rid": "mine",
    "input_ids": [1, 2, 3],
    "sampling_params": {"max_new_tokens": 12},
    "return_logprob": True,
    "top_logprobs_num": 2,
    "stream": False,
}


def attempt(exchange: SglangExchange, engine: Engine, events: int | None, name: str = "mine") -> dict[str, Any]:
    """Send the next attempt to an engine that dies after so many events. Returns what it was asked."""
    sent: dict[str, Any] = json.loads(exchange.dispatch(UNKNOWN, name, 1.0).body)
    exchange.head(200, SSE_HEAD)
    for event in engine.events(sent)[:events]:
        exchange.feed([event], 2.0)
    return sent


def meta_of(exchange: SglangExchange) -> dict[str, Any]:
    assert exchange.end is End.FINISHED, exchange.detail
    body = json.loads(exchange.answer(3.0).body)
    wanted = oracle(ASKED)
    assert body["output_ids"] == wanted.ids
    meta: dict[str, Any] = body["meta_info"]
    assert meta["output_token_logprobs"] == wanted.logprobs
    assert meta["output_top_logprobs"] == wanted.tops
    assert meta["entropies"] == [one / 1000 for one in wanted.ids]
    assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == 12
    return meta


def spans(meta: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]


@pytest.mark.parametrize("second", DIALECTS)
@pytest.mark.parametrize("first", DIALECTS)
@pytest.mark.parametrize("cut", [3, 4])
def test_a_boundary_inside_an_event_is_made_again(cut: int, first: str, second: str) -> None:
    """H2, H3: events of 1, 4, 4, ... tokens; the weights change at token 7, seen in the third event."""
    exchange = opened(ASKED)
    attempt(exchange, Engine(first, (1, 4, 4, 2), version="7", turn=6, extra=True), cut)
    assert exchange.delivered == exchange.attempt_tokens == (9 if cut == 3 else 11)
    assert exchange.crossed_versions()
    assert exchange.complete(2.5) is None
    assert exchange.delivered == exchange.attempt_tokens == 5
    assert not exchange.crossed_versions()
    sent = attempt(exchange, Engine(second, (1, 3), version="8", extra=True), None, "again")
    assert sent["input_ids"] == [1, 2, 3, *oracle(ASKED).ids[:5]]
    assert sent["sampling_params"]["max_new_tokens"] == 7
    assert spans(meta_of(exchange)) == [("7", 0, 5), ("8", 5, 12)]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_first_unknown_boundary_counts(dialect: str) -> None:
    """Two changes in one attempt, and then one in the next."""
    exchange = opened(ASKED)
    engine = Engine(dialect, (1, 2, 3, 3), version="7", turn=1, extra=True)
    sent = json.loads(exchange.dispatch(UNKNOWN, "mine", 1.0).body)
    exchange.head(200, SSE_HEAD)
    for number, (whole, data) in enumerate(engine.events(sent)[:4]):
        later = data.replace(b"7'", b"9") if number == 3 else data
        exchange.feed([(whole, later)], 2.0)
    assert exchange.delivered == 9
    attempt(exchange, Engine(dialect, (2, 2, 2), version="8", turn=3, extra=True), 3, "again")
    assert exchange.complete(2.5) is None
    assert exchange.delivered == 5
    assert exchange.attempt_tokens == 4
    attempt(exchange, Engine(dialect, version="9", extra=True), None, "and again")
    assert spans(meta_of(exchange)) == [("7", 0, 1), ("8", 1, 5), ("9", 5, 12)]


def test_a_boundary_between_events_is_known() -> None:
    exchange = opened(ASKED)
    attempt(exchange, Engine("incremental", (1, 4, 1, 4), version="7", turn=4, extra=True), 4)
    assert exchange.complete(2.5) is None
    assert exchange.delivered == 10
    attempt(exchange, Engine(version="8", extra=True), None, "again")
    assert spans(meta_of(exchange)) == [("7", 0, 5), ("7'", 5, 10), ("8", 10, 12)]


def test_a_living_engine_knows() -> None:
    """It says itself, with its finish: nothing is made again."""
    exchange = opened(ASKED)
    attempt(exchange, Engine("incremental", (1, 4, 4, 3), version="7", turn=6, extra=True), 4)
    assert exchange.complete(2.5) == b""
    assert exchange.delivered == 12
    assert spans(meta_of(exchange)) == [("7", 0, 7), ("7'", 7, 12)]


def test_a_spent_budget_is_not_spent_if_tokens_go_back() -> None:
    exchange = opened(ASKED)
    attempt(exchange, Engine("mixed", (1, 4, 4, 3), version="7", turn=6, late_finish=True, extra=True), 4)
    assert exchange.delivered == 12
    assert exchange.complete(2.5) is None
    assert attempt(exchange, Engine(version="8", extra=True), None, "x")["sampling_params"]["max_new_tokens"] == 7
    assert spans(meta_of(exchange)) == [("7", 0, 5), ("8", 5, 12)]


def test_streams_keep_what_the_client_has() -> None:
    """The client has the tokens; the spans are exact to the event."""
    exchange = opened({**ASKED, "stream": True})
    attempt(exchange, Engine("cumulative", (1, 4, 4, 2), version="7", turn=6), 3)
    assert exchange.complete(2.5) is None
    assert exchange.delivered == 9
    sent = json.loads(exchange.dispatch(UNKNOWN, "again", 3.0).body)
    out = exchange.feed(Engine(version="8").events(sent), 4.0)
    last = json.loads(out.split(b"\n\n")[-3][6:])["meta_info"]
    assert spans(last) == [("7", 0, 5), ("7'", 5, 9), ("8", 9, 12)]


def test_what_is_not_continued_keeps_its_count() -> None:
    exchange = opened({"text": "x", "stream": True})
    exchange.dispatch(UNKNOWN, "x", 1.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed(Engine().events({"rid": "x", "input_ids": [1], "sampling_params": {"max_new_tokens": 3}})[:2], 1.0)
    with pytest.raises(CannotComplete):
        exchange.dispatch(UNKNOWN, "y", 2.0)
    assert exchange.delivered == 2


def event(index: int | None, total: int, version: str | None, finish: bool = False) -> Event:
    meta = {"id": "mine", "finish_reason": {"type": "stop"} if finish else None, "completion_tokens": total}
    told = {"weight_version": version} if version else {}
    return sse({"output_ids": [9] * total, "meta_info": meta | told, **({} if index is None else {"index": index})})


@pytest.mark.parametrize(
    ("events", "crossed"),
    [
        ([event(0, 1, "7"), event(1, 1, "8")], False),
        ([event(0, 1, "7"), event(1, 1, "8"), event(0, 2, "8")], True),
        ([event(0, 1, "7"), event(1, 1, None)], None),
        ([], None),
    ],
)
def test_samples_cross_each_for_itself(events: list[Event], crossed: bool | None) -> None:
    """H4: two samples of two versions are two answers; neither has crossed."""
    exchange = opened({**ASKED, "stream": True, "sampling_params": {"n": 2}})
    exchange.dispatch(UNKNOWN, "mine", 1.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed(events, 2.0)
    assert exchange.crossed_versions() is crossed


def test_who_made_no_token_does_not_name_the_weights() -> None:
    """An untold version stays untold, though the worker that told the finish has one."""
    exchange = opened({**ASKED, "stream": True, "return_logprob": False})
    exchange.dispatch(UNKNOWN, "mine", 1.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed([event(None, 2, None)], 2.0)
    assert exchange.complete(2.5) is None
    exchange.dispatch(UNKNOWN, "again", 3.0)
    exchange.head(200, SSE_HEAD)
    [_, data] = event(None, 0, "8", finish=True)
    out = exchange.feed([sse(data.replace(b'"mine"', b'"again"'))], 4.0)
    meta = json.loads(out.split(b"\n\n")[0][6:])["meta_info"]
    assert meta["completion_tokens"] == 2
    assert "weight_version" not in meta


def test_the_first_of_several_versions_is_the_one_that_follows() -> None:
    """H3: one event brings the whole continuation, with an update inside: that is the engine's own affair."""
    exchange = opened({**ASKED, "stream": True}, weights=WeightPolicy("same"))
    attempt(exchange, Engine(version="7", extra=True), 2)
    attempt(exchange, Engine(chunks=(10,), version="7", turn=-4, extra=True), None, "again")
    assert (exchange.end, exchange.delivered) == (End.FINISHED, 12)
    assert exchange.crossed_versions()


def tiles(*edges: tuple[str, int, int]) -> list[Span]:
    return [Span(*edge) for edge in edges]


@pytest.mark.parametrize(
    ("said", "tokens", "tiled"),
    [
        (tiles(("7", 0, 2), ("8", 2, 4)), 4, True),
        (tiles(("7", 0, 2), ("8", 2, 4)), 3, False),
        (tiles(("7", 0, 2), ("8", 2, 4)), 5, False),
        (tiles(("7", 0, 2), ("8", 3, 4)), 4, False),
        (tiles(("7", 0, 2), ("8", 1, 4)), 4, False),
        (tiles(("7", 0, 3), ("8", 3, 2), ("7", 2, 4)), 4, False),
        ([], 0, False),
    ],
)
def test_stated_spans_cover_each_token_once(said: list[Span], tokens: int, tiled: bool) -> None:
    value = raw([{"version": one.version, "start": one.start, "end": one.end} for one in said])
    assert stated(value, tokens) == (said if tiled else None)


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        (tiles(("7", 0, 2), ("7", 2, 4)), tiles(("7", 0, 4))),
        (tiles(("7", 0, 2), ("7", 3, 4)), tiles(("7", 0, 2), ("7", 3, 4))),
        (tiles(("7", 0, 2), ("8", 2, 2)), tiles(("7", 0, 2))),
        (tiles(("7", 0, 0), ("8", 0, 2)), tiles(("8", 0, 2))),
        (tiles(("7", 0, 0)), tiles(("7", 0, 0))),
    ],
)
def test_merged_spans(given: list[Span], merged: list[Span]) -> None:
    assert merge(given) == merged
