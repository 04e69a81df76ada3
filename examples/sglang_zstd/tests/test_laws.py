"""The laws of the native format, inherited: workers that compress are killed anywhere, in every dialect."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from observed import OPTIONS, ORACLE, asking, cases, hard, judged, prove, unpacked

from dyn_relay.formats import catalog
from dyn_testkit import faults, laws
from dyn_testkit.laws import Case, Observed
from dyn_testkit.laws import cases as some
from dyn_testkit.laws.levels import ExchangeLevel, other

GOALS = [
    "nothing happens",
    "three kills in one request",
    "killed before any byte",
    "cut inside JSON",
    "killed between last token and finish",
    "killed between finish and [DONE]",
    "continued twice",
    "dialect changed across a cut",
    "stream",
    "unary",
    "one byte a read",
]


@pytest.fixture(scope="module")
def level() -> ExchangeLevel:
    return ExchangeLevel(catalog.make("sglang-zstd"), OPTIONS)


def test_equivalence(level: ExchangeLevel) -> None:
    """Every row is the uninterrupted run's, by an oracle that has never compressed anything."""

    def check(case: Case) -> Observed:
        seen = level.observe(case)
        laws.equivalence(unpacked(seen), ORACLE)
        return seen

    prove(check, cases(), GOALS, hard(), examples=512)


PAIRS = [
    *("nothing happens", "another pair", "continued", "rows from a position on", "stream", "unary", "one byte a read"),
    *("prefill ended during the transfer", "prefill ended after the transfer", "decode ended after the transfer"),
]


def test_a_pair_answers_as_one_worker() -> None:
    """Laws 1 and 5: the prompt's rows are prefill's, the rest decode's, whoever of the two ends, wherever."""
    level = ExchangeLevel(catalog.make("sglang-zstd"), OPTIONS, prefills=OPTIONS)

    def check(case: Case) -> Observed:
        seen = level.observe(case)
        laws.join(unpacked(seen), ORACLE)
        return seen

    prove(check, some.pairs(st.builds(asking, some.bodies(), st.integers(0, 4))), PAIRS, examples=512)


@pytest.mark.parametrize("spoilt", ["prefill", "decode"])
def test_a_pair_leaves_out_what_is_no_frame(spoilt: str) -> None:
    """Law 5: never stale, and never half of it."""
    bad = replace(OPTIONS, packing=lambda rows: rows)
    whom = (OPTIONS, bad) if spoilt == "prefill" else (bad, OPTIONS)
    level = ExchangeLevel(catalog.make("sglang-zstd"), whom[0], prefills=whom[1])
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    for stream in (True, False):
        seen = level.observe(Case(asking(json.dumps({**body, "stream": stream}).encode())))
        laws.join(seen, ORACLE, ["routed_experts"])


def test_snapshot_and_once(level: ExchangeLevel) -> None:
    def check(case: Case) -> Observed:
        seen = level.observe(case)
        laws.snapshot(seen)
        laws.no_false_success(seen, ORACLE)
        laws.tokens.exactly_once(seen)
        return seen

    prove(check, cases(), [*GOALS, "cached tokens", "logprobs of the prompt"], hard())


def test_admission(level: ExchangeLevel) -> None:
    def check(drawn: tuple[tuple[bytes, str], Case]) -> Observed:
        (body, reason), case = drawn
        seen = level.observe(replace(case, body=body))
        laws.admission(seen, reason)
        return seen

    prove(check, st.tuples(judged(), cases()), ["one kill", "stream", "unary"])


def test_passthrough(level: ExchangeLevel) -> None:
    """With no fault a stream is the worker's, byte for byte."""

    def check(drawn: tuple[tuple[bytes, str], Case]) -> Observed:
        (body, reason), case = drawn
        seen = level.observe(replace(case, body=body, faults=()))
        ours = not seen.case.streaming or "rid" not in seen.request
        laws.passthrough(seen, rewritten=ours and not reason)
        return seen

    prove(check, st.tuples(judged(), cases()), ["nothing happens", "stream", "unary", "one byte a read"])


def test_fold(level: ExchangeLevel) -> None:
    def check(case: Case) -> Observed:
        unary = level.observe(other(case, stream=False))
        laws.fold(unpacked(unary), unpacked(level.observe(other(case, stream=True))))
        return unary

    prove(check, cases(), ["continued", "two kills in one request", "one byte a read"])


def test_nobody_is_left(level: ExchangeLevel) -> None:
    def check(case: Case) -> Observed:
        seen = level.observe(case)
        laws.no_false_success(seen, ORACLE)
        return seen

    plan = st.one_of(some.hopeless(), some.hopeless(), some.plans())
    prove(check, cases(plan), ["nobody left", "stream", "unary", "continued"])


def test_budget(level: ExchangeLevel) -> None:
    """Of cuts while something is left: then the rows of a lost finish are asked for, which takes a call."""

    def check(case: Case) -> Observed:
        seen = level.observe(replace(case, body=long(case.body)))
        laws.budget(seen, ORACLE)
        return seen

    where = st.builds(faults.at_token, st.integers(0, 1))
    prove(check, cases(some.plans(where=where)), ["continued twice", "three kills in one request", "stream", "unary"])


def long(body: bytes) -> bytes:
    """The same request for more tokens than any cut leaves, whatever they are."""
    value: dict[str, Any] = json.loads(body)
    sampling = {**value["sampling_params"], "max_new_tokens": 9, "ignore_eos": True}
    sampling.pop("stop_token_ids", None)
    return json.dumps({**value, "sampling_params": sampling}).encode()


@pytest.mark.parametrize("stream", [True, False])
def test_a_planted_mistake_is_found(stream: bool) -> None:
    """The laws see the rows: a worker that gives others is found out after a cut, and without one."""
    wrong = ExchangeLevel(catalog.make("sglang-zstd"), replace(OPTIONS, expert_mark=OPTIONS.model.experts))
    body: dict[str, Any] = {
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        "stream": stream,
    }
    for plan in ((), ((faults.at_token(2), faults.CLOSE),)):
        case = Case(json.dumps({**body, "return_routed_experts": True}).encode(), plan)
        with pytest.raises(AssertionError, match="routed_experts"):
            laws.equivalence(unpacked(wrong.observe(case)), ORACLE)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("junk", [b"", b"no frame", bytes(32)])
def test_what_cannot_be_decoded(junk: bytes, stream: bool) -> None:
    """It passes as it came while nothing must be made of it, and is no rows for a continuation: that fails loudly."""
    level = ExchangeLevel(catalog.make("sglang-zstd"), replace(OPTIONS, packing=lambda rows: junk))
    body: dict[str, Any] = {"rid": "a", "input_ids": [1, 2], "return_routed_experts": True, "stream": stream}
    body["sampling_params"] = {"max_new_tokens": 4, "temperature": 0}
    seen = level.observe(Case(json.dumps(body).encode()))
    laws.passthrough(seen, rewritten=not stream)
    assert b'"routed_experts":"%b"' % base64.b64encode(junk) in seen.response.body
    seen = level.observe(Case(json.dumps(body).encode(), ((faults.at_token(2), faults.CLOSE),)))
    laws.no_false_success(seen, ORACLE)
    assert seen.response.status == 502 or not seen.response.complete
    assert b'"routed_experts"' not in seen.response.body
