"""The laws on the whole proxy whose workers are sidecars, before HTTP engines and before gRPC engines."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from dyn_testkit import faults
from dyn_testkit.laws import cases as some
from dyn_testkit.laws.sglang import OVER_GRPC
from properties import checks
from properties.goals import CUTS_MET
from properties.prove import prove
from properties.proxies import Simulated


@pytest.fixture(scope="module")
def sided():
    return Simulated(sided=True)


@pytest.fixture(scope="module")
def sided_grpc():
    return Simulated(sided=True, grpc=True)


def test_every_law_under_cuts_and_deaths(sided):
    """Connections are cut; whole engines die behind live sidecars, go silent, talk nonsense, or say they failed."""
    at_head = st.tuples(
        st.just(faults.AT_HEAD),
        st.sampled_from((faults.status(500), faults.status(503), faults.EMPTY_200, faults.KILL_WORKER)),
    )
    among_tokens = st.tuples(
        st.builds(faults.at_token, st.integers(1, some.MAX_TOKENS)),
        st.sampled_from((faults.KILL_WORKER, faults.STALL, faults.GARBAGE, faults.abort_event(500))),
    )
    late = st.tuples(
        st.sampled_from((faults.AFTER_LAST_TOKEN, faults.AFTER_FINISH, faults.BEFORE_LAST_CHUNK)),
        st.sampled_from((faults.KILL_WORKER, faults.STALL)),
    )
    fault = st.one_of(among_tokens, at_head, late)
    deaths = st.integers(0, 3).flatmap(lambda count: st.tuples(*[fault] * count))
    goals = ["nothing happens", "continued twice", "stream", "unary"]
    prove(checks.everything(sided), some.cases(plan=st.one_of(some.plans(), deaths)), sometimes=goals)


def test_every_law_over_grpc_under_cuts(sided_grpc):
    cases = some.cases(some.carriable(some.bodies()), wire=OVER_GRPC)
    prove(checks.everything(sided_grpc), cases, sometimes=CUTS_MET, begin=some.hard(wire=OVER_GRPC))
