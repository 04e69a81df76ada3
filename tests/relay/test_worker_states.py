"""The states of workers as clients and operators meet them."""

from __future__ import annotations

import pytest
import trio

from dyn_relay.fleet.worker import State
from dyn_testkit import faults
from dyn_testkit.client import fetch
from dyn_testkit.faults import CLOSE, FaultPlan, at_token, every, first, status
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import MODEL, ORACLE, generate
from tests.relay.harness import judged, world

MINUTE = 60.0


async def listed(w):
    return {entry["id"]: entry for entry in (await w.ask(None, "/workers")).json()["workers"]}


async def test_an_operator_sees_state_cause_since_when_and_what_they_do(autojump_clock):
    async with world(options=WorkerOptions(tick=1.0), policy="round_robin") as w:
        w.workers[1].kill()
        await trio.sleep(60)
        w.nursery.start_soon(w.ask, generate(20))
        await trio.sleep(10.5)
        seen = await listed(w)
        assert seen["w1"]["state"] == "ready"
        assert seen["w1"]["targets"] == [{"id": "w1", "dp_rank": None, "in_flight": 1, "load": 1, "tokens": 13}]
        assert (seen["w2"]["state"], seen["w2"]["is_healthy"]) == ("dead", False)
        assert seen["w2"]["cause"].startswith("too many probes could not connect: ")
        assert 40 < seen["w2"]["since"] < 60
        assert w.metric('dyn_relay_worker_transitions_total{from="ready",to="dead"}') == 1
        assert w.metric('dyn_relay_worker_state{role="regular",state="dead",worker="w2"}') == 1


@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
@pytest.mark.parametrize(("code", "says", "avoided"), [(503, "7", 7), (429, "7", 7), (503, None, 1), (429, "soon", 1)])
async def test_a_full_queue_is_left_alone_and_healthy(autojump_clock, stream, code, says, avoided):
    """A8, A13: as long as it says; the request goes elsewhere, and the circuit counts nothing."""
    plan = FaultPlan.of(faults.Fault(faults.AT_HEAD, status(code, says), first(1)))
    async with world(plans=[plan, None], policy="round_robin", cb_failure_threshold=1) as w:
        began = trio.current_time()
        while (asked := len(w.workers[0].generates)) < 2:
            body = generate(stream=stream)
            assert judged(await w.ask(body), body, ORACLE) == []
            entry = (await listed(w))["w1"]
            if asked == 1 and trio.current_time() - began < avoided:
                assert (entry["state"], entry["is_healthy"]) == ("busy", True)
            await trio.sleep(0.1)
        assert avoided <= trio.current_time() - began < avoided + 0.5
        assert (await listed(w))["w1"]["state"] == "ready"
        assert w.app.fleet.workers[0].failures == 0


async def test_client_mistakes_and_busy_answers_never_open_the_circuit(autojump_clock):
    """A13, A8: 400, 401 to our own key, 503."""
    async with world(plans=[None], cb_failure_threshold=2) as w:
        for _ in range(50):
            assert (await w.ask(generate(stream=False, sampling={"temperature": -1}))).status == 400
        assert (await listed(w))["w1"]["state"] == "ready"
    async with world(plans=[None], options=WorkerOptions(api_key="another"), cb_failure_threshold=2) as w:
        for _ in range(20):
            assert (await w.ask(generate(stream=False))).status == 401
            await trio.sleep(10)
        assert w.app.fleet.workers[0].failures >= 20
        assert w.metric('dyn_relay_worker_transitions_total{from="ready",to="suspect"}') >= 20
        assert w.metric('dyn_relay_worker_transitions_total{from="ready",to="open"}') == 0
    full = FaultPlan.of(faults.Fault(faults.AT_HEAD, status(503), every))
    async with world(plans=[full], cb_failure_threshold=2) as w:
        for _ in range(50):
            assert (await w.ask(generate(stream=False))).status == 503
        assert (await listed(w))["w1"]["state"] == "busy"


async def test_a_worker_that_cuts_every_answer_is_left_alone_and_tried_again(autojump_clock):
    """B2: its health endpoint is happy all the time. Nobody's answer suffers."""
    bad = faults.Fault(at_token(2), CLOSE, every)
    plan = FaultPlan.of(bad)
    async with world(plans=[plan, None], policy="round_robin", inhibited_duration_secs=1) as w:

        async def ask(times):
            for _ in range(times):
                body = generate()
                assert judged(await w.ask(body), body, ORACLE) == []
                await trio.sleep(1.5)

        await ask(20)
        assert (await listed(w))["w1"]["state"] == "open"
        assert (await listed(w))["w1"]["cause"].startswith("too many requests failed in a row: cut")
        assert plan.count() == 5
        while (await listed(w))["w1"]["since"] < 55:
            await ask(1)
        assert plan.count() == 5, "whatever its probes say"
        await trio.sleep(10)
        await ask(2)
        assert plan.count() == 6, "one trial, which fails"
        assert (await listed(w))["w1"]["state"] == "open"
        plan.revoke(bad)
        await trio.sleep(65)
        await ask(4)
        assert (await listed(w))["w1"]["state"] == "ready"
        assert w.metric('dyn_relay_worker_transitions_total{from="half_open",to="ready"}') == 1


@pytest.mark.parametrize(
    ("state", "ready"), [("busy", 200), ("half_open", 200), ("open", 503), ("stale", 503), ("suspect", 503)]
)
async def test_who_can_take_requests_makes_the_proxy_ready(autojump_clock, state, ready):
    """A half-open worker must get requests, or it would stay half open."""
    async with world(plans=[None], health_check_interval_secs=1000) as w:
        w.app.fleet.workers[0].state = State(state)
        for path in ("/health", "/readiness"):
            assert (await w.ask(None, path)).status == ready


async def test_a_worker_that_waits_is_admitted(autojump_clock):
    async with world(rejoin="manual", health_check_interval_secs=1) as w:
        w.workers[0].kill()
        await trio.sleep(10)
        await w.workers[0].restart()
        await trio.sleep(10)
        assert (await listed(w))["w1"]["state"] == "stale"
        answer = await w.ask({}, "/workers/w1/admit")
        assert (answer.status, answer.json()["state"]) == (200, "ready")
        assert (await w.ask({}, "/workers/w9/admit")).status == 404
        assert (await w.ask(None, "/workers/w1/admit", method="GET")).status == 405


async def test_a_restart_that_nobody_saw_is_seen_by_the_infos(autojump_clock):
    """A15: killed and back between two probes, with no request in between: its circuit is closed, and it is vetted."""
    async with world(options=[WorkerOptions(weight_version="7")] * 2, rejoin="weight-version-match") as w:
        one = w.app.fleet.workers[0]
        one.breaker.incidents = 4
        epoch = one.epoch
        w.workers[0].kill()
        await w.workers[0].restart(WorkerOptions(weight_version="5"))
        await trio.sleep(25)
        assert one.epoch not in (None, epoch)
        assert one.breaker.incidents == 0
        assert (await listed(w))["w1"]["state"] == "stale"


async def test_half_an_hour_of_absence_and_return(autojump_clock):
    """A15, A10, A17, B8: a worker dies under load, the weights move on twice, it returns with its old ones.

    Load runs all the time. No request is lost, all answers are exact, it serves nothing while it is stale, and its fair
    share once it has been updated.
    """
    options = WorkerOptions(model=MODEL, weight_version="1", tick=0.5)
    lost, done, ended = [], [], trio.Event()
    async with world(
        plans=[None] * 3, options=options, rejoin="weight-version-match", health_check_interval_secs=5
    ) as w:
        dead = w.workers[0]

        async def client(number):
            count = 0
            while not ended.is_set():
                body = generate(10 + number, rid=f"c{number}-{count}", stream=number % 2 == 0)
                response = await w.ask(body)
                lost.extend(one for one in judged(response, body, ORACLE) if "weight_version" not in one)
                done.append(trio.current_time())
                count += 1

        async def update(version, *workers):
            for worker in workers:
                order = {"new_version": version, "abort_all_requests": False}
                answer = await fetch(w.network, worker.url, "/update_weight_version", order)
                assert answer.status == 200

        async def state():
            return (await listed(w))["w1"]["state"]

        async with trio.open_nursery() as clients:
            for number in range(12):
                clients.start_soon(client, number)
            await trio.sleep(2 * MINUTE)
            assert len(dead.generates) > 20
            dead.kill()
            await trio.sleep(MINUTE)
            assert await state() == "dead"
            await trio.sleep(4 * MINUTE)
            await update("2", *w.workers[1:])
            await trio.sleep(5 * MINUTE)
            await update("3", *w.workers[1:])
            await trio.sleep(5 * MINUTE)
            before = len(dead.generates)
            await dead.restart()
            for minute in range(8):
                await trio.sleep(MINUTE)
                assert await state() == "stale", minute
            assert len(dead.generates) == before, "it was asked while it had old weights"
            assert "it has '1', the fleet '3'" in (await listed(w))["w1"]["cause"]
            await update("3", dead)
            await trio.sleep(10)
            assert await state() == "ready"
            counts = [len(worker.generates) for worker in w.workers]
            await trio.sleep(5 * MINUTE)
            shares = [len(worker.generates) - count for worker, count in zip(w.workers, counts, strict=True)]
            ended.set()
        await w.quiet()
        assert lost == []
        assert len(done) > 12 * 30 * MINUTE / 15
        assert max(shares) - min(shares) < sum(shares) * 0.1, shares
        assert w.metric('dyn_relay_requests_total{outcome="done"}') == len(done)
        assert w.metric("dyn_relay_attempts_in_flight") == 0
