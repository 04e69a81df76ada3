"""`--coalesce-ms`: events of a stream in quick succession go to the client together, and nothing else changes."""

from __future__ import annotations

import pytest
import trio

from dyn_testkit.faults import RESET, FaultPlan, at_token
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world

#: An engine that gives a token every 2 ms.
FAST = WorkerOptions(tick=0.002)


async def test_events_that_come_within_a_rest_go_together(autojump_clock):
    body = generate(30)
    async with world(plans=[None], options=FAST) as w:
        plain = await w.ask(body)
    async with world(plans=[None], options=FAST, coalesce_ms=10) as w:
        gathered = await w.ask(body)
    assert len(gathered.events()) == len(plain.events())
    assert judged(gathered, body, ORACLE) == []
    assert len(plain.parts) >= 30
    assert 6 <= len(gathered.parts) <= 8
    assert gathered.parts[0].count(b"data: ") == 1


async def test_a_slow_stream_is_not_held_up(autojump_clock):
    async with world(plans=[None], options=WorkerOptions(tick=0.02), coalesce_ms=10) as w:
        begin = trio.current_time()
        response = await w.ask(generate(10))
        assert len(response.parts) >= 10
        assert trio.current_time() - begin < 10 * 0.02 + 0.015


async def test_only_streams_wait(autojump_clock):
    """For a unary client the worker's events are read as they come."""
    body = generate(10, stream=False, sampling={"stream_interval": 1})
    async with world(plans=[None], options=FAST, coalesce_ms=1000) as w:
        begin = trio.current_time()
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        assert trio.current_time() - begin < 0.1


@pytest.mark.parametrize("token", [1, 7, 12])
async def test_a_cut_is_seen_when_the_rest_is_over(autojump_clock, token):
    body = generate(30)
    plan = FaultPlan.in_order([(at_token(token), RESET)])
    async with world(plans=[plan, None], options=FAST, policy="round_robin", coalesce_ms=10) as w:
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        await w.quiet()
        assert [attempt["tokens"] for attempt in w.rows[-1]["attempts"]] == [token, 30 - token]
