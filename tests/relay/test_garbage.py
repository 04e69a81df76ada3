"""A request that ends leaves nothing that refers to itself: the collector comes seldom."""

from __future__ import annotations

import gc
from types import FunctionType

import pytest

from dyn_testkit.faults import CLOSE, Fault, FaultPlan, at_token, first
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import generate
from tests.relay.harness import world

#: Ours, and what is made for us.
OURS = ("dyn_relay", "httptools", "msgspec")


def ours(one):
    """Our objects, and functions that were made of our code while it ran."""
    named = one if isinstance(one, FunctionType) else type(one)
    return (named.__module__ or "").split(".")[0] in OURS


@pytest.mark.parametrize(
    "fields", [{}, {"stream": True}, {"stream": True, "return_logprob": True}, {"return_logprob": True}]
)
@pytest.mark.parametrize("cut", [False, True], ids=["undisturbed", "migrated"])
@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
async def test_a_request_that_ends_leaves_no_garbage(autojump_clock, fields, cut, dialect):
    plan = FaultPlan.of(Fault(at_token(6), CLOSE, first(100))) if cut else None
    async with world(plans=[plan, None], options=WorkerOptions(tick=0.01, dialect=dialect)) as w:
        for rid in ("warm-1", "warm-2"):
            await w.ask(generate(12, rid=rid, **fields))
        await w.quiet()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for rid in ("x-1", "x-2", "x-3", "x-4"):
                await w.ask(generate(12, rid=rid, **fields))
            await w.quiet()
            gc.collect()
            left = [one for one in gc.garbage if ours(one)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert left == []
        assert (w.metric('dyn_relay_migrations_total{reason="cut"}') > 0) is cut
