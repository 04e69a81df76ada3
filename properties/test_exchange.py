"""The laws on a format's exchange alone: no I/O of ours, the mock workers' bytes cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from dyn_relay.formats import catalog
from dyn_testkit import faults
from dyn_testkit.laws import cases as some
from dyn_testkit.laws.levels import ExchangeLevel
from properties import checks
from properties.goals import CUTS_MET
from properties.prove import prove
from properties.proxies import OPTIONS


@pytest.fixture(scope="module")
def exchange():
    return ExchangeLevel(catalog.make("sglang"), OPTIONS)


def test_equivalence(exchange):
    """C1: whatever is killed, wherever the bytes are cut, in whatever dialect: the answer is the oracle's."""
    prove(checks.equivalence(exchange), some.cases(), sometimes=CUTS_MET)


def test_equivalence_after_engine_errors(exchange):
    """What an engine says of itself (an abort with a code) is a failed attempt like any other."""
    whats = (faults.CLOSE, faults.abort_event(500), faults.abort_event(502))
    where = st.builds(faults.at_token, st.integers(0, some.MAX_TOKENS))
    cases = some.cases(plan=some.plans(whats, where=where))
    prove(checks.equivalence(exchange), cases, sometimes=["three kills in one request", "continued twice"])


def test_admission(exchange):
    """Every row's verdict, by value and not by presence; what is refused is never continued."""
    prove(checks.admission(exchange), some.judged_bodies(), some.cases(), sometimes=["one kill", "stream", "unary"])


def test_budget(exchange):
    prove(checks.budget(exchange), some.cases(), sometimes=CUTS_MET)


def test_snapshot(exchange):
    """M2: prompt and cached tokens are the first attempt's."""
    prove(checks.snapshot(exchange), some.cases(), sometimes=[*CUTS_MET, "cached tokens", "logprobs of the prompt"])


def test_fold(exchange):
    prove(checks.fold(exchange), some.cases(), sometimes=["continued", "two kills in one request", "one byte a read"])


def test_passthrough(exchange):
    """Without a fault a stream's bytes are the worker's; a stream with a rid goes out as it came."""
    goals = ["nothing happens", "stream", "unary", "one byte a read"]
    prove(checks.passthrough(exchange), some.judged_bodies(), some.cases(), sometimes=goals)


def test_no_false_success(exchange):
    """A2, C5: nobody is left; no client takes what came for an answer."""
    plan = st.one_of(some.hopeless(), some.hopeless(), some.plans())
    goals = ["nobody left", "stream", "unary", "continued"]
    prove(checks.no_false_success(exchange), some.cases(plan=plan), st.just(0), sometimes=goals)
