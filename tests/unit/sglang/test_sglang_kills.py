"""A worker dies anywhere, in any dialect: the client has what the uninterrupted run would have given it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_kit import DIALECTS, Engine, Outcome, Plan, oracle, play, prompt_rows, read_stream

N = 6
ASKED: dict[str, Any] = {
    "rid": "mine",
    "input_ids": [11, 12, 13, 14],
    "sampling_params": {"temperature": 0, "max_new_tokens": N, "frequency_penalty": 0.0, "min_new_tokens": 2},
    "return_logprob": True,
    "logprob_start_len": 1,
    "top_logprobs_num": 2,
    "return_prompt_token_ids": True,
    "stream": True,
}


def check(asked: dict[str, Any], outcome: Outcome, dialects: list[str]) -> None:
    wanted = oracle(asked)
    if asked.get("stream"):
        events, failures = outcome.events, []
        for dialect in dialects:
            try:
                got = read_stream(events, dialect)
                break
            except AssertionError as exc:
                failures.append(f"{dialect}: {exc}")
        else:
            raise AssertionError(failures)
        everything = [event["meta_info"] for event in events]
    else:
        answer = outcome.unary
        got = read_stream([answer], "cumulative")
        everything = [answer["meta_info"]]
    assert got["ids"] == wanted.ids
    if asked.get("return_logprob"):
        assert got["rows"]["output_token_logprobs"] == wanted.logprobs
        if asked.get("top_logprobs_num"):
            assert got["rows"]["output_top_logprobs"] == wanted.tops
    for meta in everything:
        assert meta["id"] == outcome.exchange.rid
        assert meta["prompt_tokens"] == len(asked["input_ids"])
        if asked.get("return_logprob"):
            assert meta["input_token_logprobs"] == prompt_rows(asked)
            assert meta["output_token_logprobs_length"] == meta["completion_tokens"]
    last = got["last"]
    if asked.get("return_prompt_token_ids"):
        assert last["prompt_token_ids"] == asked["input_ids"]
    assert last["meta_info"]["finish_reason"] == wanted.finish
    assert outcome.exchange.delivered == len(wanted.ids)


@pytest.mark.parametrize("unary", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("second", DIALECTS)
@pytest.mark.parametrize("first", DIALECTS)
def test_every_position(first: str, second: str, late: bool, unary: bool) -> None:
    """D3, D4, F3, F6, E1, M2: the first worker dies after each of its events, [DONE] included."""
    asked = {**ASKED, "stream": not unary}
    for cut in range(N + 2 + late):
        engines = Engine(first, late_finish=late, cached=3), Engine(second, late_finish=late, cached=7)
        outcome = play(asked, [Plan(engines[0], cut), Plan(engines[1])])
        # With one event or none the dialect has not shown itself, and the next worker's is as good.
        check(asked, outcome, [first] if cut > 1 else [second, "cumulative"])
        meta = outcome.unary["meta_info"] if unary else outcome.events[-1]["meta_info"]
        assert meta["cached_tokens"] == (3 if cut else 7)
        assert len(outcome.bodies) == (1 if cut >= N else 2)


@pytest.mark.parametrize("unary", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_two_and_three_kills(dialect: str, unary: bool) -> None:
    asked = {**ASKED, "stream": not unary}
    for cuts in [(1, 1), (2, 3), (0, 2), (1, 1, 1), (2, 0, 2), (3, 1, 1)]:
        plans = [Plan(Engine(dialect, version=f"v{at}"), cut) for at, cut in enumerate(cuts)]
        outcome = play(asked, [*plans, Plan(Engine(dialect, version="last"))])
        check(asked, outcome, [dialect, "cumulative"] if cuts[0] < 2 else [dialect])


chunks = st.lists(st.integers(1, 4), max_size=6).map(tuple)


@st.composite
def plans(draw: st.DrawFn) -> list[Plan]:
    engine = st.builds(
        Engine,
        dialect=st.sampled_from(DIALECTS),
        chunks=chunks,
        version=st.sampled_from(["1", "2"]),
        cached=st.integers(0, 9),
        late_finish=st.booleans(),
        turn=st.none() | st.integers(0, 4),
        nan=st.booleans(),
    )
    dying = st.builds(Plan, engine=engine, cut=st.integers(0, 6), together=st.booleans(), says=st.booleans())
    living = st.builds(Plan, engine=engine, together=st.booleans(), says=st.booleans())
    return [*draw(st.lists(dying, max_size=3)), draw(living)]


@settings(max_examples=512)
@given(
    plans=plans(),
    n=st.integers(1, 12),
    least=st.integers(0, 12),
    unary=st.booleans(),
    logprobs=st.booleans(),
    own_rid=st.booleans(),
    renamed=st.booleans(),
    stop_at=st.none() | st.integers(0, 11),
)
def test_anything_goes(
    plans: list[Plan],
    n: int,
    least: int,
    unary: bool,
    logprobs: bool,
    own_rid: bool,
    renamed: bool,
    stop_at: int | None,
) -> None:
    """Law 1 on pure functions: dialects x coalescing x kills x budgets x stops x weight updates."""
    asked: dict[str, Any] = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": n, "min_new_tokens": min(least, n)},
        "stream": not unary,
    }
    if own_rid:
        asked["rid"] = "mine"
    if logprobs:
        asked |= {"return_logprob": True, "logprob_start_len": 0}
    if stop_at is not None:
        ids = oracle(asked).ids
        asked["sampling_params"]["stop_token_ids"] = [ids[min(stop_at, n - 1)]]
    outcome = play(asked, plans, renamed)
    first = plans[0].engine.dialect
    settled = (plans[0].cut is None or outcome.shown > 1) and not unary
    check(asked, outcome, [first] if settled else [*DIALECTS])
    check_spans(plans, outcome, unary)


def labels(plans: list[Plan], outcome: Outcome) -> list[str]:
    """Which weights made each token of the answer: those of the last attempt that was asked for it."""
    found: list[str] = []
    for plan, body in zip(plans, outcome.bodies, strict=False):
        base = len(body["input_ids"]) - len(outcome.bodies[0]["input_ids"])
        found[base:] = [plan.engine.label(at) for at in range(outcome.exchange.delivered - base)]
    return found


def check_spans(plans: list[Plan], outcome: Outcome, unary: bool) -> None:
    """H2: the spans tile [0, n), neighbours differ, the scalar is the last one's; a unary answer's are exact."""
    meta = outcome.unary["meta_info"] if unary else outcome.events[-1]["meta_info"]
    spans, at = meta["weight_versions"], 0
    for span in spans:
        assert span["start"] == at < span["end"]
        at = span["end"]
    assert at == outcome.exchange.delivered
    assert all(one["version"] != two["version"] for one, two in itertools.pairwise(spans))
    assert meta["weight_version"] == spans[-1]["version"]
    assert outcome.exchange.crossed_versions() == (len(spans) > 1)
    if unary:
        shown = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        assert shown == labels(plans, outcome)


@pytest.mark.parametrize("unary", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_prompt_logprobs_that_come_once(dialect: str, unary: bool) -> None:
    """F6: they are the first attempt's, once in a stream, and where they belong in a unary answer."""
    engine = Engine(dialect, prompt_once=True)
    for cut in (2, 4, None):
        outcome = play({**ASKED, "stream": not unary}, [Plan(engine, cut), Plan(engine)])
        metas = [outcome.unary["meta_info"]] if unary else [event["meta_info"] for event in outcome.events]
        assert [meta.get("input_token_logprobs") for meta in metas] == [prompt_rows(ASKED)] + [None] * (len(metas) - 1)
        names = list(metas[0])
        assert names.index("input_token_logprobs") == names.index("output_token_logprobs") - 1


@pytest.mark.parametrize("unary", [False, True])
@pytest.mark.parametrize("second", DIALECTS)
@pytest.mark.parametrize("first", DIALECTS)
def test_unknown_rows(first: str, second: str, unary: bool) -> None:
    """F5: a model's own per-token list (`customized_info`) is joined like the known ones; another list is not."""
    asked = {"rid": "mine", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 9}, "stream": not unary}
    for cut in range(2, 8):
        outcome = play(asked, [Plan(Engine(first, extra=True), cut), Plan(Engine(second, (2, 1), extra=True))])
        events = [outcome.unary] if unary else outcome.events
        got = read_stream(events, "cumulative" if unary else first)
        assert got["rows"]["entropies"] == [one / 1000 for one in oracle(asked).ids]
        assert all(event["meta_info"]["a constant list"] == ["x", "y", "z"] for event in events)
