"""The laws on the whole proxy in direct mode: its workers are gRPC engines, reached through its own gateways."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from dyn_relay.grpc.status import Code
from dyn_testkit import faults
from dyn_testkit.laws import cases as some
from dyn_testkit.laws.sglang import OVER_GRPC
from properties import checks
from properties.goals import CUTS_MET
from properties.prove import prove
from properties.proxies import Simulated


@pytest.fixture(scope="module")
def direct():
    return Simulated(grpc=True)


def cases(**strategies):
    return some.cases(some.carriable(some.bodies()), wire=OVER_GRPC, **strategies)


def test_every_law_under_cuts(direct):
    prove(checks.everything(direct), cases(), sometimes=CUTS_MET, begin=some.hard(wire=OVER_GRPC))


def test_every_law_under_other_deaths(direct):
    """Whole workers die, go silent, talk nonsense, are about to leave, or end the call with a status."""
    statuses = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED, Code.DATA_LOSS, Code.UNKNOWN)
    ends = (*map(faults.grpc_status, statuses), faults.rst_stream(7), faults.goaway(11), faults.UNPROCESSED)
    at_head = st.tuples(st.just(faults.AT_HEAD), st.sampled_from((*ends, faults.status(503), faults.EMPTY_200)))
    malformed = (faults.NO_TRAILERS, faults.BAD_LENGTH, faults.TRUNCATED, faults.COMPRESSED, faults.NOT_PROTOBUF)
    among_tokens = st.tuples(
        st.builds(faults.at_token, st.integers(1, some.MAX_TOKENS)),
        st.sampled_from(
            (
                *ends,
                *malformed,
                faults.KILL_WORKER,
                faults.STALL,
                faults.GARBAGE,
                faults.grpc_status(Code.INTERNAL),
            )
        ),
    )
    late = st.tuples(
        st.sampled_from((faults.AFTER_LAST_TOKEN, faults.AFTER_FINISH)),
        st.sampled_from((faults.KILL_WORKER, faults.STALL, faults.GARBAGE, faults.NO_TRAILERS)),
    )
    fault = st.one_of(among_tokens, at_head, late)
    plan = st.integers(0, 3).flatmap(lambda count: st.tuples(*[fault] * count))
    goals = ["nothing happens", "continued twice", "dialect changed across a cut", "stream", "unary"]
    prove(checks.everything(direct), cases(plan=plan), sometimes=goals, begin=())
