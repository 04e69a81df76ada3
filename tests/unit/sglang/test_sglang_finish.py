"""Answers that are finished without a worker: nothing is left to generate, or somebody aborted between two attempts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang_kit import DIALECTS, DONE, SSE_HEAD, Engine, opened, oracle, prompt_rows, read_stream, sse

from dyn_relay.formats.base import End
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.traits import UNKNOWN

ASKED: dict[str, Any] = {
    "rid": "mine",
    "input_ids": [1, 2, 3],
    "sampling_params": {"max_new_tokens": 4},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "stream": True,
}


def cut(asked: dict[str, Any], engines: list[tuple[Engine, int]]) -> tuple[SglangExchange, bytes]:
    """Attempts that each die after so many events, in the middle of time."""
    exchange, out, now = opened(asked), b"", 100.0
    for number, (engine, events) in enumerate(engines):
        sent = json.loads(exchange.dispatch(UNKNOWN, f"try-{number}" if number else exchange.rid, now).body)
        exchange.head(200, SSE_HEAD)
        for event in engine.events(sent)[:events]:
            now += 0.5
            out += exchange.feed([event], now)
    return exchange, out


def parsed(out: bytes) -> list[dict[str, Any]]:
    assert out.endswith(DONE[0])
    return [json.loads(part[6:]) for part in out.split(b"\n\n")[:-2]]


@pytest.mark.parametrize("kills", [[4], [2, 2], [1, 2, 1]])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_budget_spent(dialect: str, kills: list[int]) -> None:
    """E1, E9: all tokens delivered, the finish lost: no call with a budget of 0, but the finish that stock sends."""
    engines = [(Engine(dialect, version=f"v{at // 2}", late_finish=True, extra=True), n) for at, n in enumerate(kills)]
    exchange, out = cut(ASKED, engines)
    assert exchange.delivered == 4
    out += exchange.complete(110.0) or b""
    assert exchange.end is End.FINISHED
    events = parsed(out)
    got = read_stream(events, dialect)
    wanted = oracle(ASKED)
    assert got["ids"] == wanted.ids
    assert got["rows"]["output_token_logprobs"] == wanted.logprobs
    assert got["rows"]["output_top_logprobs"] == wanted.tops
    assert got["rows"]["entropies"] == [one / 1000 for one in wanted.ids]
    meta = events[-1]["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["prompt_tokens"] == 3
    assert meta["input_token_logprobs"] == prompt_rows(ASKED)
    assert meta["e2e_latency"] == 10.0
    assert meta["weight_versions"][-1]["end"] == 4
    assert [one["version"] for one in meta["weight_versions"]] == (["v0", "v1"] if len(kills) > 2 else ["v0"])
    real = json.loads(Engine(dialect, extra=True).events({**ASKED, "rid": "x"})[-2][1])
    assert list(meta) == list(real["meta_info"])
    assert list(events[-1]) == list(real)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_budget_spent_unary(dialect: str) -> None:
    asked = {**ASKED, "stream": False}
    exchange, out = cut(asked, [(Engine(dialect, late_finish=True), 1), (Engine(dialect, late_finish=True), 3)])
    assert (out, exchange.complete(110.0)) == (b"", b"")
    body = json.loads(exchange.answer(111.0).body)
    wanted = oracle(asked)
    assert body["output_ids"] == wanted.ids
    assert body["meta_info"]["output_token_logprobs"] == wanted.logprobs
    assert body["meta_info"]["finish_reason"] == wanted.finish
    assert list(body["meta_info"])[-2:] == ["e2e_latency", "response_sent_to_client_ts"]
    assert body["meta_info"]["response_sent_to_client_ts"] == 1_700_000_000.5 + 111.0 - 100.5


@pytest.mark.parametrize("status", [200, 503])
def test_an_error_after_the_last_token_is_forgotten(status: int) -> None:
    """Whatever the last worker said: nothing was left to generate."""
    exchange, _ = cut({**ASKED, "stream": False}, [(Engine(late_finish=True), 4)])
    if status == 200:
        reason = {"type": "abort", "message": "m", "status_code": 500}
        exchange.feed([sse({"output_ids": [], "meta_info": {"finish_reason": reason, "completion_tokens": 4}})], 105.0)
    else:
        exchange.head(503, [])
        exchange.body(b"busy", 105.0)
    assert exchange.end in (End.FAILED, End.BUSY)
    assert exchange.complete(110.0) == b""
    assert exchange.last_words() == b""
    assert exchange.answer(111.0).status == 200
    assert json.loads(exchange.answer(111.0).body)["output_ids"] == oracle(ASKED).ids


@pytest.mark.parametrize("code", [400, 500, 503])
@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_an_error_after_the_finish(stream: bool, terminated: bool, code: int) -> None:
    """D4: the answer was whole; no afterthought of the engine's makes an error of it."""
    exchange, out = cut({**ASKED, "stream": stream}, [(Engine(), 4)])
    whole = out
    for event in [sse({"error": {"message": "m", "code": code}}), *([DONE] if terminated else [])]:
        out += exchange.feed([event], 105.0)
    if not terminated:
        out += exchange.complete(106.0) or b""
    assert exchange.end is End.FINISHED
    assert exchange.last_words() == b""
    if stream:
        assert out == whole + DONE[0]
    else:
        assert exchange.answer(107.0).status == 200
        assert json.loads(exchange.answer(107.0).body)["output_ids"] == oracle(ASKED).ids


def stopping(at: int, **params: Any) -> dict[str, Any]:
    """A request that its own `stop_token_ids` end at token number `at`."""
    ids = oracle({**ASKED, "sampling_params": {"max_new_tokens": 9}}).ids
    return {**ASKED, "sampling_params": {"max_new_tokens": 9, "stop_token_ids": [5, ids[at - 1]], **params}}


def test_stop_token_delivered() -> None:
    exchange, out = cut(stopping(3), [(Engine(late_finish=True), 3)])
    events = parsed(out + (exchange.complete(110.0) or b""))
    assert events[-1]["meta_info"]["finish_reason"] == oracle(stopping(3)).finish
    assert exchange.delivered == 3


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_new_tokens": 3}, {"stop_token_ids": None}])
def test_stop_token_that_does_not_count(params: dict[str, Any]) -> None:
    exchange, _ = cut(stopping(3, **params), [(Engine(late_finish=True), 3)])
    assert exchange.complete(110.0) is None


def test_min_new_tokens_is_met() -> None:
    exchange, _ = cut(stopping(3, min_new_tokens=2), [(Engine(late_finish=True), 3)])
    assert exchange.complete(110.0) is not None


def test_stop_comes_before_length() -> None:
    asked = stopping(3, max_new_tokens=3)
    exchange, out = cut(asked, [(Engine(late_finish=True), 3)])
    events = parsed(out + (exchange.complete(110.0) or b""))
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_only_the_terminator_is_lost(stream: bool) -> None:
    """D4: after the finish an answer is whole; the worker may die."""
    asked = {**ASKED, "stream": stream}
    exchange, out = cut(asked, [(Engine(), 4)])
    assert exchange.end is None
    assert exchange.complete(110.0) == (DONE[0] if stream else b"")
    assert exchange.end is End.FINISHED
    if stream:
        assert out + DONE[0] == b"".join(raw for raw, _ in Engine().events({**asked, "rid": "mine"}))
    else:
        assert json.loads(exchange.answer(111.0).body)["output_ids"] == oracle(asked).ids


@pytest.mark.parametrize(("dying", "latency"), [([], 0.25), ([(Engine(), 0)], 2.5), ([(Engine(), 2)], 2.5)])
def test_latency_is_the_engines_unless_there_were_others(dying: list[tuple[Engine, int]], latency: float) -> None:
    asked = {**ASKED, "stream": False}
    engines = [*dying, (Engine(), 9)]
    exchange, _ = cut(asked, engines)
    assert exchange.end is End.FINISHED
    assert json.loads(exchange.answer(102.5).body)["meta_info"]["e2e_latency"] == latency


def test_something_is_left() -> None:
    exchange, _ = cut(ASKED, [(Engine(), 2)])
    assert exchange.complete(110.0) is None
    assert exchange.end is None


def test_nothing_delivered_of_nothing_asked() -> None:
    """A client's own budget of 0 asks for the prompt's logprobs: the request goes out again as it is."""
    asked = {**ASKED, "sampling_params": {"max_new_tokens": 0}}
    exchange, _ = cut(asked, [(Engine(), 0)])
    assert exchange.complete(110.0) is None
    assert json.loads(exchange.dispatch(UNKNOWN, "x", 1.0).body)["sampling_params"] == {"max_new_tokens": 0}


@pytest.mark.parametrize("field", ["routed_experts", "indexer_topk"])
def test_what_only_the_engine_has(field: str) -> None:
    switch = f"return_{field}"
    exchange, _ = cut({**ASKED, switch: True}, [(Engine(late_finish=True), 4)])
    assert exchange.complete(110.0) is None  # its rows are asked for: see test_sglang_rows.py
    assert exchange.abort(110.0) is None
    exchange, _ = cut({**ASKED, switch: False}, [(Engine(late_finish=True), 4)])
    assert exchange.complete(110.0)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
def test_abort_between_attempts(dialect: str, stream: bool) -> None:
    """C2: no worker has the request: the answer ends as the engine would have ended it."""
    asked = {**ASKED, "stream": stream}
    exchange, out = cut(asked, [(Engine(dialect), 2)])
    out += exchange.abort(110.0) or b""
    assert exchange.end is End.ABORTED
    if stream:
        events = parsed(out)
        assert read_stream(events, dialect)["ids"] == oracle(asked).ids[:2]
        meta = events[-1]["meta_info"]
    else:
        body = json.loads(exchange.answer(111.0).body)
        assert body["output_ids"] == oracle(asked).ids[:2]
        meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


@pytest.mark.parametrize("stream", [True, False])
def test_abort_before_anything(stream: bool) -> None:
    exchange, _ = cut({**ASKED, "stream": stream}, [(Engine(), 0)])
    out = exchange.abort(110.0)
    event = parsed(out or b"")[0] if stream else json.loads(exchange.answer(111.0).body)
    assert event["output_ids"] == []
    assert event["meta_info"]["id"] == "mine"
    assert event["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}


def test_abort_after_the_finish_is_too_late() -> None:
    exchange, _ = cut(ASKED, [(Engine(), 4)])
    assert exchange.abort(110.0) == DONE[0]
    assert exchange.end is End.FINISHED
