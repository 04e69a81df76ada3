"""After a death: how many continuations are prefilled at a time, and how long one may take. J1: no other deadline."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import trio

from dyn_relay.relay.chores import Chores
from dyn_testkit.client import begin
from dyn_testkit.faults import AT_HEAD, KILL_WORKER, RESET, STALL, Fault, FaultPlan, at_token, every, first, status
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
STREAMS = 256
#: Of the workers only the first is there at first; and a silent one is left alone.
ONE_WORKER = {"worker_urls": ["http://w1:30000"], "stall_timeout_secs": 0}


async def storm(w, count=STREAMS):
    """So many streams on w1, each with tokens; w2.. join, w1 dies. Returns the answers by rid."""
    answers = {}

    async def client(rid):
        answers[rid] = await w.ask(generate(40, rid=rid, input_ids=[5, int(rid[1:])]))

    for number in range(count):
        w.nursery.start_soon(client, f"r{number}")
    first_one, *others = w.workers
    await until(lambda: len(w.app.live) >= count and all(tokens(w)))
    for worker in others:
        w.app.fleet.add(worker.url)
    await w.ready()
    first_one.kill()
    await until(lambda: len(answers) == count)
    await w.quiet()
    return answers


def dials(w):
    """Connections that were asked for, by host, from now on."""
    counted = Counter()
    dial = w.network.dial

    async def counting(source, address):
        counted[address[0]] += 1
        return await dial(source, address)

    w.network.dial = counting
    return counted


def tokens(w):
    return [request._exchange.delivered for request in w.app.live]


def most_at_once(rows):
    """Continuations that had not had their first token, at the worst moment."""
    moves = []
    for row in rows:
        for attempt in row["attempts"][1:]:
            begun, over = attempt["started"], attempt["first_token"] or attempt["ended"]
            moves += [(round(row["time"] + over, 6), -1), (round(row["time"] + begun, 6), 1)]
    now = most = 0
    for _, move in sorted(moves):
        now += move
        most = max(most, now)
    return most


@pytest.mark.parametrize(("permits", "most"), [(8, 24), (0, STREAMS)], ids=["8 a worker", "any number"])
async def test_streams_of_a_dead_worker_come_back_in_waves(autojump_clock, permits, most):
    """B8: 256 streams on W1, kill: all resume on W2..4, so many at a time, and nobody dials W1 again."""
    options = WorkerOptions(tick=0.5)
    settings = {"wall": trio.current_time, **ONE_WORKER}
    async with world(plans=[None] * 4, options=options, retry_permits=permits, **settings) as w:
        dialled = dials(w)
        answers = await storm(w)
        for rid, answer in answers.items():
            body = generate(40, rid=rid, input_ids=[5, int(rid[1:])])
            assert judged(answer, body, ORACLE) == []
        assert {tuple(attempt["worker"] for attempt in row["attempts"])[:1] for row in w.rows} == {("w1",)}
        assert {len(row["attempts"]) for row in w.rows} == {2}
        assert len(w.workers[0].generates) == STREAMS
        spread = Counter(row["attempts"][1]["worker"] for row in w.rows)
        assert set(spread) == {"w2", "w3", "w4"}
        assert max(spread.values()) - min(spread.values()) <= 1
        assert most_at_once(w.rows) == most
        # A wave is over with its first tokens, not with its answers, which take 20 s.
        assert max(row["duration"] for row in w.rows) < 40
        # Probes, and one question whether it lives; no abort order of each stream that it had.
        assert dialled["w1"] < STREAMS + 50
        assert w.metric("dyn_relay_retry_queue_depth") == 0
        assert w.metric('dyn_relay_migrations_total{reason="cut"}') == STREAMS


def dropped(worker):
    """The names that it was told to drop."""
    return {json.loads(one.request.body)["rid"] for one in worker.requests if one.path == "/abort_request"}


@pytest.mark.parametrize("lives", [True, False], ids=["it lives", "it is dead"])
async def test_a_worker_that_lost_many_is_told_of_all_if_it_lives_and_is_one_question_if_not(
    autojump_clock, monkeypatch, lives
):
    begun = []
    start = Chores.start
    monkeypatch.setattr(Chores, "start", lambda self, work: begun.append(work) or start(self, work))
    cut = FaultPlan.of(Fault(at_token(6), RESET if lives else KILL_WORKER, first(32)))
    async with world(plans=[cut, None], options=WorkerOptions(tick=0.5), **ONE_WORKER) as w:
        async with trio.open_nursery() as clients:
            for number in range(32):
                clients.start_soon(w.ask, generate(10, rid=f"r{number:02}", input_ids=[5, number]))
            await until(lambda: len(w.app.live) == 32 and all(tokens(w)))
            w.app.fleet.add(w.workers[1].url)
        await w.quiet()
        assert {len(row["attempts"]) for row in w.rows} == {2}
        lost = {row["attempts"][0]["rid"] for row in w.rows}
        if lives:
            await until(lambda: len(dropped(w.workers[0])) == len(lost))
        assert (dropped(w.workers[0]), len(begun)) == (lost if lives else set(), 1)


async def test_who_waits_for_a_permit_holds_no_lease(autojump_clock):
    """The one survivor stalls before the first token of its one continuation: the others are nobody's load."""
    hold = FaultPlan.of(Fault(at_token(0), STALL, first(1)))
    async with world(plans=[None, hold], options=WorkerOptions(tick=0.5), retry_permits=1, **ONE_WORKER) as w:
        answers = {}
        w.nursery.start_soon(collect, answers, w, 8)
        await hold.fired()
        await trio.sleep(10)
        survivor = w.app.fleet.workers[1]
        assert (survivor.in_flight, w.metric("dyn_relay_retry_queue_depth")) == (1, 7)
        hold.release()
        await until(lambda: len(answers) == 8)
        assert w.metric("dyn_relay_retry_queue_depth") == 0


async def test_a_worker_that_becomes_ready_brings_its_permits(autojump_clock):
    """B8: W2 never gives its one continuation a token; the others go on as soon as W3 is there."""
    hold = FaultPlan.of(Fault(at_token(0), STALL, first(1)))
    async with world(plans=[None, hold, None], options=WorkerOptions(tick=0.5), retry_permits=1, **ONE_WORKER) as w:
        answers = []

        async def client():
            answers.append(judged(await w.ask(generate(40)), generate(40), ORACLE))

        async with trio.open_nursery() as clients:
            for _ in range(4):
                clients.start_soon(client)
            await until(lambda: len(w.app.live) == 4 and all(tokens(w)))
            w.app.fleet.add(w.workers[1].url)
            await w.ready()
            w.workers[0].kill()
            await hold.fired()
            await until(lambda: w.app.fleet.workers[0].state == "dead")
            assert w.metric("dyn_relay_retry_queue_depth") == 3
            w.app.fleet.add(w.workers[2].url)
            await until(lambda: len(answers) == 3)
            assert w.metric("dyn_relay_retry_queue_depth") == 0
            hold.release()
        assert answers == [[]] * 4


async def collect(answers, w, count):
    answers.update(await storm(w, count))


async def test_clients_and_aborts_end_the_waiting_for_a_permit(autojump_clock):
    hold = FaultPlan.of(Fault(at_token(0), STALL, first(1)))
    async with world(plans=[None, hold], options=WorkerOptions(tick=0.5), retry_permits=1, **ONE_WORKER) as w:
        answers, clients = {}, {}
        for rid in ("leaves", "stays"):  # one of the two waits, whoever has the permit
            clients[rid] = await w.network.connect("proxy", 30000)
            await begin(clients[rid], "/generate", generate(40, rid=rid))
        w.nursery.start_soon(collect, answers, w, 4)
        await hold.fired()
        await until(lambda: w.metric("dyn_relay_retry_queue_depth") == 5)
        waiting = [request.rid for request in w.app.live if not request._current]
        left = next(rid for rid in waiting if rid in clients)
        clients[left].close()
        await until(lambda: left not in w.app.live)
        aborted = next(rid for rid in waiting if rid not in clients)
        await w.ask({"rid": aborted}, "/abort_request")
        await until(lambda: aborted not in w.app.live)
        assert w.metric("dyn_relay_retry_queue_depth") == 3
        hold.release()
        await until(lambda: len(answers) == 4)
        assert answers[aborted].values()[-1]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("seed", range(1, 6))
async def test_a_suspect_that_waits_for_its_turn_keeps_no_permit(autojump_clock, seed):
    """W1 dies under streams with tokens and suspects without; the next suspect waits while one of them stalls.

    In whichever order they come, the streams have their permits.
    """
    proven, suspects = [f"r{number}" for number in range(12)], ["s1", "s2", "s3"]
    hold = FaultPlan.of(Fault(at_token(0), STALL, lambda seen: b"[666" in seen.body))
    options = WorkerOptions(tick=1.0)
    async with world(plans=[None, hold], options=options, retry_permits=2, seed=seed, **ONE_WORKER) as w:
        answers = {}

        async def client(rid, prompt):
            answers[rid] = await w.ask(generate(20, rid=rid, input_ids=prompt))

        for number, rid in enumerate(proven):
            w.nursery.start_soon(client, rid, [1, number])
        await until(lambda: len(tokens(w)) == 12 and min(tokens(w)) == 3)
        for number, rid in enumerate(suspects):
            w.nursery.start_soon(client, rid, [666, number])
        await until(lambda: len(w.workers[0].generates) == 15)
        w.app.fleet.add(w.workers[1].url)
        await until(lambda: w.app.fleet.workers[1].state == "ready")
        w.workers[0].kill()
        await until(lambda: set(answers) >= set(proven))
        assert not set(answers) & set(suspects)
        assert hold.count() == 1
        hold.release()
        await until(lambda: len(answers) == 15)
        assert {answer.status for answer in answers.values()} == {200}


@BOTH
async def test_no_token_in_time_after_a_cut_is_loud(autojump_clock, stream):
    """--migration-timeout-secs: 504, with what was delivered."""
    plans = [FaultPlan.in_order([(at_token(3), KILL_WORKER)]), FaultPlan.of(Fault(at_token(0), STALL, every))]
    async with world(plans=plans, policy="round_robin", migration_timeout_secs=40, stall_timeout_secs=0) as w:
        asked = trio.current_time()
        response = await w.ask(generate(stream=stream, sampling={"stream_interval": 1}))
        assert trio.current_time() - asked == pytest.approx(40, abs=3)
        error = response.values()[-1]["error"] if stream else response.json()
        assert (error["code"], error["reason"], error["delivered"]) == (504, "migration_timeout", 3)
        assert "40 s" in error["message"]
        assert "w1: cut" in error["message"]
        assert response.complete is not stream
        await w.quiet()
        [row] = w.rows
        assert (row["outcome"], row["error"]) == ("failed", "migration_timeout")
        await until(lambda: w.workers[1].live == 0)  # it was told


async def test_the_time_counts_from_the_first_of_several_losses(autojump_clock):
    """Each survivor dies before a token: 3 times 15 s are more than 40."""
    stall = [FaultPlan.of(Fault(at_token(0), STALL, every)) for _ in range(4)]
    plans = [FaultPlan.in_order([(at_token(3), KILL_WORKER)]), *stall]
    options = {"first_token_timeout_secs": 15, "migration_timeout_secs": 40, "migration_limit": 10}
    async with world(plans=plans, policy="round_robin", **options) as w:
        asked = trio.current_time()
        response = await w.ask(generate(stream=False))
        assert (response.status, response.json()["reason"]) == (504, "migration_timeout")
        assert trio.current_time() - asked == pytest.approx(40, abs=3)
        await w.quiet()
        [row] = w.rows
        assert [attempt["cause"] for attempt in row["attempts"]][:3] == ["cut", "first_token", "first_token"]


async def test_a_token_ends_the_deadline(autojump_clock):
    """One that came in time: the rest may take hours. The next cut has the whole time again."""
    plans = [
        FaultPlan.in_order([(at_token(3), KILL_WORKER)]),
        FaultPlan.in_order([(at_token(5), KILL_WORKER)]),
        None,
    ]
    async with world(plans=plans, policy="round_robin", options=WorkerOptions(tick=20), migration_timeout_secs=30) as w:
        response = await w.ask(generate(12))
        assert judged(response, generate(12), ORACLE) == []


async def test_before_the_first_cut_there_is_no_deadline(autojump_clock):
    """Also not for who is passed on by a busy worker: nothing was lost."""
    plans = [FaultPlan.of(Fault(AT_HEAD, status(503), every)), None]
    async with world(plans=plans, policy="round_robin", options=WorkerOptions(tick=50), migration_timeout_secs=10) as w:
        assert judged(await w.ask(generate(3)), generate(3), ORACLE) == []
        assert len(w.workers[0].generates) == 1


async def test_three_hours_are_no_timeout(autojump_clock):
    """J1: one token in 20 s for three hours."""
    async with world(plans=[None], options=WorkerOptions(tick=20)) as w:
        body = generate(540)
        asked = trio.current_time()
        assert judged(await w.ask(body), body, ORACLE) == []
        assert trio.current_time() - asked >= 3 * 3600 - 20


@BOTH
async def test_the_whole_time_of_a_request_is_another_limit(autojump_clock, stream):
    """--request-timeout-secs ends it first, and says so, also after a cut."""
    plans = [FaultPlan.in_order([(at_token(3), KILL_WORKER)]), FaultPlan.of(Fault(at_token(0), STALL, every))]
    options = {"migration_timeout_secs": 40, "request_timeout_secs": 20, "stall_timeout_secs": 0}
    async with world(plans=plans, policy="round_robin", **options) as w:
        response = await w.ask(generate(stream=stream, sampling={"stream_interval": 1}))
        error = response.values()[-1]["error"] if stream else response.json()
        assert (error["code"], error["reason"]) == (504, "request_timeout")
