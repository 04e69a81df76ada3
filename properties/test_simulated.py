"""The laws on the whole proxy over the network in memory: bytes cut anywhere, silence, dying workers, in no time."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from dyn_testkit import faults
from dyn_testkit.laws import cases as some
from properties import checks
from properties.goals import CUTS_MET
from properties.prove import prove
from properties.proxies import OPTIONS, Simulated


def timeless(body):
    return re.sub(rb'"e2e_latency":[^,}]+', b"", body)


@pytest.fixture(scope="module")
def simulated():
    return Simulated()


def test_every_law_under_cuts(simulated):
    prove(checks.everything(simulated), some.cases(), sometimes=CUTS_MET)


def test_every_law_under_cuts_while_sources_rest():
    """Also: a client is given the bytes that it would be given without, but for the time that they took."""
    paced = replace(OPTIONS, tick=0.001)
    plain, resting = Simulated(paced), Simulated(paced, coalesce_ms=5)
    hold = checks.everything(resting)

    def check(case):
        seen = hold(case)
        assert timeless(seen.response.body) == timeless(plain.observe(case).response.body)
        return seen

    prove(check, some.cases(), sometimes=CUTS_MET)


def test_every_law_under_other_deaths(simulated):
    """B2, A4, A13: whole workers die, go silent, talk nonsense, or say that they failed."""
    at_head = st.tuples(
        st.just(faults.AT_HEAD),
        st.sampled_from(
            (faults.status(500), faults.status(502), faults.status(503), faults.EMPTY_200, faults.COMMENTS_ONLY)
        ),
    )
    among_tokens = st.tuples(
        st.builds(faults.at_token, st.integers(1, some.MAX_TOKENS)),
        st.sampled_from((faults.KILL_WORKER, faults.STALL, faults.GARBAGE, faults.abort_event(500))),
    )
    late = st.tuples(
        st.sampled_from((faults.AFTER_LAST_TOKEN, faults.AFTER_FINISH)),
        st.sampled_from((faults.KILL_WORKER, faults.STALL, faults.GARBAGE)),
    )
    fault = st.one_of(among_tokens, at_head, late)
    plan = st.integers(0, 3).flatmap(lambda count: st.tuples(*[fault] * count))
    goals = ["nothing happens", "three kills in one request", "continued twice", "dialect changed across a cut"]
    prove(checks.everything(simulated), some.cases(plan=plan), sometimes=goals)


def test_no_false_success(simulated):
    """A2, C5: nobody is left; no client takes what came for an answer, nor any part of it."""
    plan = st.one_of(some.hopeless(), some.hopeless(), some.plans())
    goals = ["nobody left", "stream", "unary", "continued"]
    kept = st.integers(0, 100_000)
    prove(checks.no_false_success(simulated), some.cases(plan=plan), kept, sometimes=goals)
