"""The laws on the whole proxy over real sockets: one proxy, nine workers, one case after the other."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from dyn_testkit.laws import cases as some
from dyn_testkit.simnet import WHOLE
from properties import checks
from properties.goals import CUTS_MET
from properties.prove import prove
from properties.proxies import Sockets, impatient

#: The kernel cuts the bytes here.
MET = tuple(goal for goal in CUTS_MET if goal != "one byte a read")


@pytest.fixture(scope="module")
def sockets():
    with impatient(), Sockets() as running:
        yield running


def cases(**strategies):
    return some.cases(fragmentation=st.just(WHOLE), **strategies)


def test_equivalence(sockets):
    """C1: whatever is killed, in whatever dialect: the answer is the oracle's."""
    prove(checks.equivalence(sockets), cases(), sometimes=MET)


def test_admission(sockets):
    prove(checks.admission(sockets), some.judged_bodies(), cases(), sometimes=["one kill", "stream", "unary"])


def test_budget(sockets):
    prove(checks.budget(sockets), cases(), sometimes=MET)


def test_snapshot(sockets):
    """M2."""
    prove(checks.snapshot(sockets), cases(), sometimes=[*MET, "cached tokens", "logprobs of the prompt"])


def test_fold(sockets):
    prove(checks.fold(sockets), cases(), sometimes=["continued", "two kills in one request"])


def test_passthrough(sockets):
    goals = ["nothing happens", "stream", "unary"]
    prove(checks.passthrough(sockets), some.judged_bodies(), cases(), sometimes=goals)


def test_no_false_success(sockets):
    """A2, C5: nobody is left; no client takes what came for an answer, nor any part of it."""
    plan = st.one_of(some.hopeless(), some.hopeless(), some.plans())
    goals = ["nobody left", "stream", "unary", "continued"]
    prove(checks.no_false_success(sockets), cases(plan=plan), st.integers(0, 100_000), sometimes=goals)


def test_exactly_once(sockets):
    """M3, A11: one row a request, its tokens add up, and nothing stays in flight."""
    prove(checks.exactly_once(sockets), cases(), sometimes=MET)
