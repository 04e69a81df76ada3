"""Silence, and health endpoints that lie both ways."""

from __future__ import annotations

import pytest
import trio

from dyn_testkit import faults
from dyn_testkit.faults import AFTER_FINISH, STALL, FaultPlan, at_token, every, inside_json
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


@BOTH
async def test_a_stall_moves_on_although_health_says_200(autojump_clock, stream):
    """B2: the scheduler is dead, /health lies: after two stall timeouts the request goes on elsewhere."""
    plan = FaultPlan.in_order([(at_token(3), STALL)])
    async with world(plans=[plan, None], policy="round_robin", stall_timeout_secs=30) as w:
        begin = trio.current_time()
        response = await w.ask(generate(stream=stream, sampling={"stream_interval": 1}))
        assert judged(response, generate(stream=stream), ORACLE) == []
        assert 59 < trio.current_time() - begin < 65
        await w.quiet()
        assert w.metric('dyn_relay_migrations_total{reason="stall"}') == 1
        assert w.workers[0].aborts == [{"rid": w.workers[0].generates[0].json()["rid"]}]


async def test_a_stall_moves_on_at_once_if_health_fails_too(autojump_clock):
    """A stopped engine: silence, and its health endpoint does not answer."""
    plan = FaultPlan.in_order([(at_token(3), STALL)])
    async with world(plans=[plan, None], policy="round_robin", stall_timeout_secs=30) as w:
        w.workers[0].health_status = 503
        begin = trio.current_time()
        response = await w.ask(generate())
        assert judged(response, generate(), ORACLE) == []
        assert trio.current_time() - begin < 35


async def test_a_busy_engine_is_not_a_dead_one(autojump_clock):
    """B1: /health fails for a minute while the stream goes on: it is not touched, new requests avoid the worker."""
    options = WorkerOptions(tick=1.0)
    async with world(options=options, policy="round_robin", health_check_interval_secs=5, stall_timeout_secs=20) as w:
        body = generate(90, rid="long")
        answers = []

        async def client():
            answers.append(await w.ask(body))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: w.workers[0].generates)
            w.workers[0].health_status = 503
            await trio.sleep(30)
            assert w.app.fleet.workers[0].state == "unready"
            for _ in range(3):
                await w.ask(generate(2))
            assert len(w.workers[0].generates) == 1
            w.workers[0].health_status = 200
        assert judged(answers[0], body, ORACLE) == []
        assert w.app.fleet.workers[0].state == "ready"
        assert w.metric('dyn_relay_migrations_total{reason="stall"}') == 0


async def test_one_failed_probe_changes_nothing(autojump_clock):
    """B4."""
    async with world(plans=[None], health_check_interval_secs=1) as w:
        w.workers[0].health_status = 503
        asked = len(w.workers[0].requests)
        await w.workers[0].reaches(requests=asked + 1)
        w.workers[0].health_status = 200
        await trio.sleep(10)
        assert w.app.fleet.workers[0].state == "ready"


@BOTH
async def test_a_slow_generation_has_no_total_timeout(autojump_clock, stream):
    """J1: a token every 20 s for three hours."""
    options = WorkerOptions(tick=20.0)
    async with world(plans=[None], options=options) as w:
        body = generate(540, stream=stream, sampling={"stream_interval": 1})
        begin = trio.current_time()
        response = await w.ask(body)
        assert judged(response, generate(540, stream=stream), ORACLE) == []
        assert trio.current_time() - begin > 3 * 3600 - 60


async def test_a_long_queue_before_the_first_token_is_no_stall(autojump_clock):
    """While the worker is healthy, the first token may take as long as it takes."""
    plan = FaultPlan.in_order([(at_token(0), STALL)])
    async with world(plans=[plan, None], policy="round_robin", stall_timeout_secs=30) as w:
        answers = []

        async def client():
            answers.append(await w.ask(generate()))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await trio.sleep(1000)
            plan.release()
        assert judged(answers[0], generate(), ORACLE) == []
        assert w.workers[1].generates == []


@BOTH
async def test_first_token_timeout(autojump_clock, stream):
    """A4: a worker that accepts and never answers; with --first-token-timeout-secs the request moves on."""
    plan = FaultPlan.of(faults.Fault(faults.AT_HEAD, STALL, every))
    async with world(plans=[plan, None], policy="round_robin", first_token_timeout_secs=7) as w:
        begin = trio.current_time()
        response = await w.ask(generate(stream=stream))
        assert judged(response, generate(stream=stream), ORACLE) == []
        assert 7 <= trio.current_time() - begin < 9
    async with world(plans=[plan], migration_limit=0, first_token_timeout_secs=7) as w:
        response = await w.ask(generate())
        assert response.status == 504
        assert response.json()["reason"] == "migration_limit"


async def test_a_hanging_worker_hangs_nobody_else(autojump_clock):
    """A4: 64 requests hang at w1; those at w2 go on as if nothing was."""
    plan = FaultPlan.of(faults.Fault(faults.AT_HEAD, STALL, every))
    async with world(plans=[plan, None], first_token_timeout_secs=30) as w:
        times = []

        async def client(number):
            begin = trio.current_time()
            response = await w.ask(generate(rid=f"r{number}"))
            assert judged(response, generate(rid=f"r{number}"), ORACLE) == []
            times.append(trio.current_time() - begin)

        async with trio.open_nursery() as clients:
            for number in range(128):
                clients.start_soon(client, number)
        quick = [seconds for seconds in times if seconds < 1]
        assert len(quick) >= 64
        assert max(times) < 35


async def test_comments_are_no_progress(autojump_clock):
    """O1: a worker that sends only comments is silent; the stream ends without an answer, so it moves on."""
    plan = FaultPlan.in_order([(faults.AT_HEAD, faults.COMMENTS_ONLY)])
    async with world(plans=[plan, None], policy="round_robin") as w:
        response = await w.ask(generate())
        assert judged(response, generate(), ORACLE) == []


async def test_keep_alive_comments_while_the_client_waits(autojump_clock):
    """O1: silent for 90 s before and between attempts: a comment every 15 s, and the events are the same."""
    plans = [FaultPlan.in_order([(at_token(2), STALL)]), FaultPlan.in_order([(at_token(0), STALL)])]
    async with world(plans=plans, policy="round_robin", stall_timeout_secs=45, sse_keep_alive_interval_secs=15) as w:
        answers = []

        async def client():
            answers.append(await w.ask(generate()))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await plans[1].fired()
            await trio.sleep(100)
            plans[1].release()
        [response] = answers
        assert judged(response, generate(), ORACLE) == []
        assert 10 <= response.body.count(b": keep-alive\n\n") <= 14


async def test_no_comments_for_a_unary_client(autojump_clock):
    """O1."""
    options = WorkerOptions(tick=10.0)
    async with world(plans=[None], options=options, sse_keep_alive_interval_secs=5) as w:
        response = await w.ask(generate(stream=False))
        assert judged(response, generate(stream=False), ORACLE) == []


async def test_request_timeout(autojump_clock):
    options = WorkerOptions(tick=10.0)
    async with world(plans=[None], options=options, request_timeout_secs=25) as w:
        response = await w.ask(generate(stream=False))
        assert (response.status, response.json()["reason"]) == (504, "request_timeout")
        response = await w.ask(generate())
        assert not response.complete
        assert response.values()[-1]["error"]["reason"] == "request_timeout"
        await until(lambda: not w.workers[0].live)


async def test_stale_connections_are_no_deaths(autojump_clock):
    """D1: the worker closes idle connections after 5 s: whenever the next request comes, no failure is recorded."""
    for pause in (4.95, 5.0, 5.05, 2.9, 3.1):
        async with world(plans=[None], upstream_pool_idle_timeout_secs=60, health_check_interval_secs=3600) as w:
            for _ in range(3):
                assert judged(await w.ask(generate()), generate(), ORACLE) == []
                await trio.sleep(pause)
            assert w.app.fleet.workers[0].failures == 0
            assert w.metric('dyn_relay_migrations_total{reason="cut"}') == 0


async def test_a_stall_while_an_event_is_held_back(autojump_clock):
    """One event came from each of two workers whose dialect it does not show, then silence: that is a stall as well."""
    plans = [FaultPlan.in_order([(at_token(1), STALL)]), FaultPlan.in_order([(at_token(1), STALL)]), None]
    options = WorkerOptions(dialect="mixed")
    async with world(plans=plans, options=options, policy="round_robin", stall_timeout_secs=30) as w:
        response = await w.ask(generate())
        assert judged(response, generate(), ORACLE, "mixed") == []
        for plan in plans[:2]:
            plan.verify()


@pytest.mark.parametrize(
    ("place", "budget"),
    [(AFTER_FINISH, 0), (AFTER_FINISH, 1), (inside_json(1, 5), 8)],
    ids=["finish-no-token", "finish", "half-event"],
)
@BOTH
async def test_silence_after_the_answer_has_begun_is_a_stall(autojump_clock, place, budget, stream):
    """Whatever has come of it, be it a finish without a token or half an event, and however well the worker feels."""
    plan = FaultPlan.in_order([(place, STALL)])
    body = generate(budget, stream=stream, sampling={"stream_interval": 1})
    async with world(plans=[plan, None], policy="round_robin", stall_timeout_secs=30) as w:
        with trio.fail_after(600):
            response = await w.ask(body)
        plan.verify()
        assert judged(response, body, ORACLE) == []
