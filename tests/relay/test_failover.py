"""Which worker gets the next attempt, and what a failure costs."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import trio

from dyn_relay.relay.budget import BACKOFF_CAP, AttemptBudget
from dyn_relay.relay.failure import Failure, Kind, Phase
from dyn_testkit import faults
from dyn_testkit.faults import CLOSE, EMPTY_200, KILL_WORKER, RESET, STALL, FaultPlan, at_token, every, first, status
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


def cut_all(where=None, what=CLOSE):
    return FaultPlan.of(faults.Fault(where or at_token(3), what, every))


@BOTH
async def test_refused_connection_goes_elsewhere_unnoticed(autojump_clock, stream):
    """A1, A5, A17: connect refused on w1 -> w2, without an error and without using up the migration limit."""
    async with world(policy="round_robin", migration_limit=1) as w:
        w.workers[0].kill()
        for _ in range(4):
            response = await w.ask(generate(stream=stream))
            assert judged(response, generate(stream=stream), ORACLE) == []
        assert w.metric('dyn_relay_migrations_total{reason="cut"}') == 0


async def test_the_dead_worker_is_excluded_at_once(autojump_clock):
    """A1: after a death the next attempt goes to the survivor on the first try."""
    plan = FaultPlan.in_order([(at_token(3), KILL_WORKER)])
    async with world(plans=[plan, None], policy="round_robin") as w:
        response = await w.ask(generate())
        assert judged(response, generate(), ORACLE) == []
        before = w.workers[0].dialled
        for _ in range(3):
            await w.ask(generate())
        assert w.workers[0].dialled == before
        assert len(w.workers[1].generates) == 4


@BOTH
async def test_an_empty_200_is_not_an_answer(autojump_clock, stream):
    """A2: status 200 and no body -> the next worker; if there is none, an error that says so."""
    plan = FaultPlan.in_order([(faults.AT_HEAD, EMPTY_200)])
    async with world(plans=[plan, None], policy="round_robin") as w:
        response = await w.ask(generate(stream=stream))
        assert judged(response, generate(stream=stream), ORACLE) == []
        plan.verify()
    async with world(plans=[cut_all(faults.AT_HEAD, EMPTY_200)]) as w:
        response = await w.ask(generate(stream=stream))
        assert response.status == 502
        assert response.json()["delivered"] == 0


async def test_a_second_lap_within_the_budget(autojump_clock):
    """A7: w1 and w2 fail once each, limit 3 -> w1, w2, w1."""
    plans = [FaultPlan.in_order([(at_token(2), RESET)]), FaultPlan.in_order([(at_token(2), RESET)])]
    async with world(plans=plans, policy="round_robin") as w:
        response = await w.ask(generate())
        assert judged(response, generate(), ORACLE) == []
        assert [len(worker.generates) for worker in w.workers] == [2, 1]


async def test_the_limit_names_every_failure(autojump_clock):
    """A7: with limit 1 the error names both failures."""
    async with world(plans=[cut_all(), cut_all()], migration_limit=1, policy="round_robin") as w:
        response = await w.ask(generate(stream=False))
        assert response.status == 502
        error = response.json()
        assert error["reason"] == "migration_limit"
        assert "w1: cut" in error["message"]
        assert "w2: cut" in error["message"]
        assert error["delivered"] == 6


@BOTH
async def test_busy_moves_on_without_a_mark(autojump_clock, stream):
    """A8: 503 on w1 -> w2 at once; w1 is busy, and healthy, no migration is counted, the limit is not touched."""
    plan = FaultPlan.of(faults.Fault(faults.AT_HEAD, status(503), every))
    async with world(plans=[plan, None], policy="round_robin", migration_limit=1) as w:
        for _ in range(4):
            response = await w.ask(generate(stream=stream))
            assert judged(response, generate(stream=stream), ORACLE) == []
        assert [worker.state for worker in w.app.fleet.workers] == ["busy", "ready"]
        assert all(worker["is_healthy"] for worker in (await w.ask(None, "/workers")).json()["workers"])
        assert w.metric('dyn_relay_attempts_total{outcome="busy"}') == 1  # left alone for a second
        assert w.metric('dyn_relay_migrations_total{reason="busy"}') == 0


async def test_when_all_are_busy_the_engine_speaks(autojump_clock):
    """A8: every worker's queue is full: the client gets the engine's own 503."""
    busy = [FaultPlan.of(faults.Fault(faults.AT_HEAD, status(503), every)) for _ in range(2)]
    async with world(plans=busy) as w:
        response = await w.ask(generate(stream=False))
        assert response.status == 503
        assert response.json()["message"] == "Injected status 503"
        assert [worker.state for worker in w.app.fleet.workers] == ["busy", "busy"]


@pytest.mark.parametrize(("workers", "full"), [(20, False), (16, True)], ids=["20 refuse", "16 are busy"])
async def test_who_finds_nobody_is_told_soon(autojump_clock, workers, full):
    """A5, A8: all are asked, twice, and however many they are that takes no time."""
    busy = [FaultPlan.of(faults.Fault(faults.AT_HEAD, status(503), every)) if full else None for _ in range(workers)]
    async with world(plans=busy, health_check_interval_secs=1000) as w:
        if not full:
            for worker in w.workers:
                worker.kill()
        asked = trio.current_time()
        assert (await w.ask(generate(stream=False))).status == 503
        assert trio.current_time() - asked < 2
        await w.quiet()
        asked_of = Counter(attempt["worker"] for attempt in w.rows[0]["attempts"])
        assert asked_of == {worker.id: 2 for worker in w.app.fleet.workers}


def test_the_pause_after_a_loss_has_an_end():
    """However many there were; after the first there is none, and who has not taken the request is no loss."""
    lost, busy = Failure(Kind.CUT, Phase.TOKENS, "w1", ""), Failure(Kind.BUSY, Phase.ANSWERED, "w2", "")
    assert AttemptBudget(migrations=3).after(lost).backoff(random.Random(1)) == 0
    for losses in (2, 20, 10_000):
        budget = AttemptBudget(migrations=20_000, history=(lost,) * losses)
        assert 0 < budget.backoff(random.Random(1)) <= 1.5 * BACKOFF_CAP
        assert budget.after(busy).backoff(random.Random(1)) == 0


async def test_resumed_streams_spread(autojump_clock):
    """A9, B8: a worker dies with 32 streams: they go on at the three others, evenly."""
    options = WorkerOptions(tick=0.01)
    async with world(plans=[None] * 4, options=options) as w:
        answers = []

        async def one(number):
            body = generate(60, rid=f"r{number}")
            answers.append(judged(await w.ask(body), body, ORACLE))

        async with trio.open_nursery() as clients:
            for number in range(128):
                clients.start_soon(one, number)
            for worker in w.workers:
                await worker.reaches(requests=32)
            await trio.sleep(0.2)
            assert [worker.in_flight for worker in w.app.fleet.workers] == [32] * 4
            w.workers[0].kill()
            await trio.sleep(0.2)
            loads = [worker.in_flight for worker in w.app.fleet.workers]
            assert loads[0] == 0
            assert max(loads[1:]) - min(loads[1:]) <= 1
        assert answers == [[]] * 128
        await w.quiet()
        assert w.metric("dyn_relay_attempts_in_flight") == 0
        assert w.metric("dyn_relay_requests_in_flight") == 0


async def test_client_mistakes_hurt_no_worker(autojump_clock):
    """A13: 50 bad requests: the engine's 400 each time, no migration, every worker healthy."""
    async with world() as w:
        direct = None
        for _ in range(50):
            response = await w.ask(generate(stream=False, sampling={"temperature": -1}))
            assert response.status == 400
            direct = direct or response.body
            assert response.body == direct
        assert b"temperature" in response.body
        assert sum(len(worker.generates) for worker in w.workers) == 50
        assert [worker.state for worker in w.app.fleet.workers] == ["ready", "ready"]


async def test_load_is_counted_before_the_dial(autojump_clock):
    """A11: 16 requests at once while no worker has answered: eight each."""
    plans = [FaultPlan.of(faults.Fault(at_token(0), STALL, every)) for _ in range(2)]
    async with world(plans=plans) as w:
        async with trio.open_nursery() as clients:
            for _ in range(16):
                clients.start_soon(w.ask, generate())
            for worker in w.workers:
                await worker.reaches(requests=8)
            await trio.sleep(0.5)
            assert [len(worker.generates) for worker in w.workers] == [8, 8]
            for plan in plans:
                plan.release()
        await w.quiet()


async def test_a_5xx_before_tokens_goes_elsewhere(autojump_clock):
    """A worker that says 500 has failed the attempt; nobody else is to blame."""
    plan = FaultPlan.of(faults.Fault(faults.AT_HEAD, status(500), every))
    async with world(plans=[plan, None], policy="round_robin") as w:
        response = await w.ask(generate())
        assert judged(response, generate(), ORACLE) == []
    async with world(plans=[plan, plan], migration_limit=1) as w:
        response = await w.ask(generate(stream=False))
        assert (response.status, response.body) == (500, b"Internal Server Error")


@BOTH
@pytest.mark.parametrize("code", [500, 503])
async def test_an_abort_with_5xx_after_tokens_is_a_failed_attempt(autojump_clock, stream, code):
    plan = FaultPlan.in_order([(at_token(3), faults.abort_event(code))])
    async with world(plans=[plan, None], policy="round_robin") as w:
        response = await w.ask(generate(stream=stream))
        assert judged(response, generate(stream=stream), ORACLE) == []
        plan.verify()


@BOTH
async def test_garbage_is_not_forwarded(autojump_clock, stream):
    """Wrong framing or wrong JSON in mid-stream, then silence: the connection is given up at once."""
    for where in (at_token(3), faults.inside_chunk_size(3), faults.inside_json(3, 20), faults.AT_HEAD):
        plan = FaultPlan.in_order([(where, faults.GARBAGE)])
        async with world(plans=[plan, None], policy="round_robin", stall_timeout_secs=5) as w:
            response = await w.ask(generate(stream=stream))
            assert judged(response, generate(stream=stream), ORACLE) == [], where
            assert b"oops" not in response.body


async def test_no_worker_at_all(autojump_clock):
    """C11: nothing was started, and the error says so."""
    async with world(plans=[]) as w:
        response = await w.ask(generate(stream=False))
        assert response.status == 503
        assert response.json()["started"] is False
        assert response.json()["reason"] == "no_worker"
    async with world() as w:
        for worker in w.workers:
            worker.kill()
        response = await w.ask(generate(stream=False))
        assert response.status == 503
        assert response.json()["started"] is False


async def test_no_survivor_unary(autojump_clock):
    """C11: the error says how many tokens were had, and that the worker had begun."""
    async with world(plans=[cut_all(), cut_all()], migration_limit=1) as w:
        response = await w.ask(generate(stream=False))
        assert response.status == 502
        assert response.complete
        error = response.json()
        assert (error["started"], error["delivered"]) == (True, 6)
        assert "output_ids" not in response.json()


async def test_no_survivor_sse_breaks_the_framing(autojump_clock):
    """C5: one error event, no [DONE], no last chunk: nobody takes it for complete."""
    async with world(plans=[cut_all(), cut_all()], migration_limit=1) as w:
        response = await w.ask(generate())
        assert response.status == 200
        assert not response.complete
        events = response.events()
        assert b"[DONE]" not in events
        error = json.loads(events[-1])["error"]
        assert (error["reason"], error["delivered"]) == ("migration_limit", 6)
        assert [value["meta_info"]["finish_reason"] for value in response.values()[:-1]] == [None] * 6


async def test_the_sequence_limit(autojump_clock):
    """J6: exactly at --migration-max-seq-len still migrates, one more does not."""
    for limit, survives in ((3 + 3, True), (3 + 2, False)):
        plan = FaultPlan.in_order([(at_token(3), CLOSE)])
        async with world(plans=[plan, None], policy="round_robin", migration_max_seq_len=limit) as w:
            response = await w.ask(generate())
            assert response.complete is survives
            if not survives:
                assert response.values()[-1]["error"]["reason"] == "migration_max_seq_len"
    async with world(migration_max_seq_len=2) as w:
        response = await w.ask(generate())
        assert response.header("x-dyn-relay-migratable") == "no; reason=migration_max_seq_len"


async def test_migration_off(autojump_clock):
    """DYN_MIGRATION_LIMIT=0: served, not rescued, and the header says so."""
    async with world(plans=[cut_all(), None], migration_limit=0, policy="round_robin") as w:
        response = await w.ask(generate())
        assert response.header("x-dyn-relay-migratable") == "no; reason=migration_limit"
        assert not response.complete
        assert len(w.workers[1].generates) == 0


async def test_a_dead_worker_comes_back_by_itself(autojump_clock):
    async with world(plans=[None], health_check_interval_secs=1) as w:
        w.workers[0].kill()
        assert (await w.ask(generate(stream=False))).status == 503
        await w.workers[0].restart()
        await w.ready()
        response = await w.ask(generate())
        assert judged(response, generate(), ORACLE) == []


async def test_one_worker_that_restarts_in_mid_stream(autojump_clock):
    """C4: the same worker is the only choice: a fresh rid there, the client's own in every event."""
    plan = FaultPlan.in_order([(at_token(3), RESET)])
    async with world(plans=[plan]) as w:
        body = generate(rid="abc")
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        assert {value["meta_info"]["id"] for value in response.values()} == {"abc"}
        rids = [recorded.json()["rid"] for recorded in w.workers[0].generates]
        assert rids[0] == "abc"
        assert len(rids[1]) <= 128
        assert not rids[1].startswith("abc")
        assert not "abc".startswith(rids[1])


async def test_first_two_then_work(autojump_clock):
    plan = FaultPlan.of(faults.Fault(at_token(2), CLOSE, first(2)))
    async with world(plans=[plan]) as w:
        response = await w.ask(generate())
        assert judged(response, generate(), ORACLE) == []
        assert plan.count() == 2


async def test_one_ranks_full_queue_is_not_the_others(autojump_clock):
    """O2, A8: the next attempt may go to another rank of the same worker."""
    plan = FaultPlan.of(faults.Fault(faults.AT_HEAD, status(503), first(1)))
    options = [WorkerOptions(dp_size=2), WorkerOptions()]
    async with world(plans=[plan, None], options=options, policy="round_robin", dp_aware=True) as w:
        assert judged(await w.ask(generate()), generate(), ORACLE) == []
        assert [len(worker.generates) for worker in w.workers] == [2, 0]
