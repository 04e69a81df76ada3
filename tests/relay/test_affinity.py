"""Sessions and shared prefixes through a whole proxy, and what becomes of them when workers fail."""

from __future__ import annotations

import pytest
import trio

from dyn_testkit import faults
from dyn_testkit.faults import KILL_WORKER, FaultPlan, at_token, every, status
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import World, judged, world

AFFINITY = pytest.mark.parametrize("policy", ["consistent_hashing", "cache_aware", "manual"])
PROMPT = [token % 500 for token in range(1024)]


def counts(w: World) -> list[int]:
    return [len(worker.generates) for worker in w.workers]


async def served_by(w: World, body: object, **more: object) -> int:
    """The number of the worker that took it last."""
    before = counts(w)
    response = await w.ask(body, **more)  # type: ignore[arg-type]
    assert response.status == 200
    return next(at for at, (old, new) in enumerate(zip(before, counts(w), strict=True)) if new > old)


@AFFINITY
@pytest.mark.parametrize(
    ("headers", "options", "fields"),
    [
        ([("X-SMG-Routing-Key", "{}")], {}, {}),
        ([("X-Session-ID", "{}")], {"request_id_headers": ("X-Other", "X-Session-ID")}, {}),
        ([("X-SMG-Routing-Key", "{}"), ("X-Session-ID", "one")], {"request_id_headers": ("x-session-id",)}, {}),
        ([], {}, {"rid": "{}"}),
        ([], {}, {"session_id": "{}"}),
    ],
    ids=["smg", "request-id-headers", "smg-first", "rid", "session_id"],
)
async def test_a_sessions_requests_meet(autojump_clock, policy, headers, options, fields):
    """A3: by SMG's header, by one of --request-id-headers, by the rid, one after the other; and sessions spread."""
    async with world(plans=[None] * 4, policy=policy, **options) as w:
        homes = {}
        for turn in range(3):
            for name in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"):
                body = {**generate(2), "input_ids": [*map(ord, name * 200)]}
                body |= {field: value.format(name) for field, value in fields.items()}
                sent = [(field, value.format(name)) for field, value in headers]
                home = await served_by(w, body, headers=dict(sent))
                assert homes.setdefault(name, home) == home, (name, turn)
        assert len(set(homes.values())) > 1


@AFFINITY
async def test_a_session_survives_its_worker(autojump_clock, policy):
    """A3: W1 dies between two calls with one rid: the second is served by another one, and so is the third."""
    async with world(plans=[None] * 3, policy=policy) as w:
        body = {**generate(2, rid="job"), "input_ids": PROMPT}
        home = await served_by(w, body)
        w.workers[home].kill()
        second = await served_by(w, body)
        assert second != home
        await w.workers[home].restart()
        await w.ready()
        assert await served_by(w, body) == second


@AFFINITY
async def test_a_failed_worker_is_left_whatever_it_has_cached(autojump_clock, policy):
    """A1: W1 has the best match and dies in mid-stream: the next attempt goes elsewhere, and no dial to W1 again."""
    async with world(plans=[None] * 3, policy=policy) as w:
        body = {**generate(8, rid="job"), "input_ids": PROMPT}
        home = await served_by(w, body)
        plan = FaultPlan.of(faults.Fault(at_token(3), KILL_WORKER, every))
        w.workers[home].faults = plan
        dialled = w.workers[home].dialled
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        plan.verify()
        assert w.workers[home].dialled <= dialled + 1
        assert sum(counts(w)) == 3


@AFFINITY
async def test_a_busy_home_is_no_attractor(autojump_clock, policy):
    """A8: the session's worker says 503: it goes on at another one, at once, and from then on; nobody is unwell."""
    async with world(policy=policy) as w:
        body = {**generate(2, rid="job"), "input_ids": PROMPT}
        home = await served_by(w, body)
        w.workers[home].faults = FaultPlan.of(faults.Fault(faults.AT_HEAD, status(503), every))
        for _ in range(3):
            assert (await w.ask(body)).status == 200
        assert w.metric('dyn_relay_attempts_total{outcome="busy"}') == 1
        assert counts(w)[1 - home] == 3
        assert sorted(worker.state for worker in w.app.fleet.workers) == ["busy", "ready"]


@AFFINITY
async def test_resumed_streams_spread(autojump_clock, policy):
    """A9: 32 sessions of one worker, which dies: no survivor gets more than one more of them than another."""
    options = WorkerOptions(tick=0.01)
    async with world(plans=[None] * 4, options=options, policy=policy) as w:
        answers = []

        async def one(number: int) -> None:
            body = {**generate(60, rid=f"r{number}"), "input_ids": [number % 500] * 1024}
            answers.append(judged(await w.ask(body), body, ORACLE))

        async with trio.open_nursery() as clients:
            for number in range(128):
                clients.start_soon(one, number)
            await trio.sleep(0.2)
            before = [worker.in_flight for worker in w.app.fleet.workers]
            assert min(before) > 15
            w.workers[0].kill()
            await trio.sleep(0.2)
            loads = [worker.in_flight for worker in w.app.fleet.workers]
            assert sum(loads) == 128
            assert max(loads[1:]) - min(loads[1:]) <= max(1, max(before[1:]) - min(before[1:]))
            assert max(loads[1:]) <= max(43, *before[1:])
        assert answers == [[]] * 128


async def test_a_continuation_goes_to_whoever_knows_the_prompt(autojump_clock):
    """Resumed work follows a cache that is known, if its holder has no more than the mean to do."""
    async with world(plans=[None] * 3, policy="cache_aware") as w:
        body = {**generate(8), "input_ids": PROMPT}
        home = await served_by(w, body)
        w.workers[home].faults = FaultPlan.of(faults.Fault(faults.AT_HEAD, status(503), every))
        assert (await w.ask(body)).status == 200
        other = next(at for at in range(3) if at != home and counts(w)[at])
        w.workers[home].faults = FaultPlan.of()
        await trio.sleep(2)  # until it is not thought to be busy
        plan = FaultPlan.of(faults.Fault(at_token(3), KILL_WORKER, every))
        w.workers[other].faults = plan
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        plan.verify()
        assert counts(w)[3 - home - other] == 0
