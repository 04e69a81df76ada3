"""Planned moves that come to nothing, or meet somebody who is gone: no permit is lost, and no answer."""

from __future__ import annotations

import trio

from dyn_relay.fleet.rejoin import Standing
from dyn_testkit.faults import KILL_WORKER, STALL, Fault, FaultPlan, at_token, every, first
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.crowd import order
from tests.relay.harness import judged, world
from tests.relay.leaving import SLOW


async def asking(w, answers, tokens=60, **extra):
    """One request; what is wrong with its answer is put into `answers`."""
    body = generate(tokens, **extra)
    answers.append(judged(await w.ask(body), body, ORACLE))


async def leave_in_turn(w, clients, answers, lengths):
    """w1 has one request of each length when it is to be empty at once; w2 is there again."""
    await order(w, "/workers/w2/drain")
    for count, tokens in enumerate(lengths, 1):
        clients.start_soon(asking, w, answers, tokens)
        await until(lambda count=count: w.workers[0].live == count)
    await order(w, "/workers", {"url": w.workers[1].url})
    await w.ready()
    await order(w, "/workers/w1/drain?after=0")


def attempts(w):
    """Of each request, in the order of ending."""
    return [[(attempt["worker"], attempt["cause"]) for attempt in row["attempts"]] for row in w.rows]


def permits(w):
    """In use, and waited for."""
    return w.app._permits.inside, w.app._permits.waiting


def dies_after_the_look(w, worker, monkeypatch):
    """It answers when it is asked for a sign of life, and is gone when requests come."""
    look = w.app.fleet.look

    async def look_too_early():
        await look()
        worker.kill()

    monkeypatch.setattr(w.app.fleet, "look", look_too_early)


async def test_nobody_is_moved_to_one_that_has_died_unnoticed(autojump_clock):
    """A17: the only other worker is dead, and no probe has seen it yet: the stream stays, and is whole."""
    async with world(options=SLOW, policy="round_robin", health_check_interval_secs=1000) as w:
        answers = []
        async with trio.open_nursery() as clients:
            clients.start_soon(asking, w, answers)
            await until(lambda: w.workers[0].live)
            await trio.sleep(3)
            w.workers[1].kill()
            assert w.app.fleet.workers[1].state == "ready"
            assert (await order(w, "/workers/w1/drain?after=0")).status == 202
        await w.quiet()
        assert answers == [[]]
        assert attempts(w) == [[("w1", None)]]


async def test_who_finds_nobody_goes_back(autojump_clock, monkeypatch):
    """A17: the other worker dies after it was looked at, and the first one is still there: nobody is asked again."""
    async with world(options=SLOW, policy="round_robin") as w:
        answers = []
        dies_after_the_look(w, w.workers[1], monkeypatch)
        async with trio.open_nursery() as clients:
            clients.start_soon(asking, w, answers)
            await until(lambda: w.workers[0].live)
            await order(w, "/workers/w2/drain")
            clients.start_soon(w.ask, generate(60, sampling={"frequency_penalty": 0.5}))  # this cannot be moved
            await until(lambda: w.workers[0].live == 2)
            await order(w, "/workers", {"url": w.workers[1].url})
            await w.ready()
            await order(w, "/workers/w1/drain?after=0")
        await w.quiet()
        assert answers == [[]]
        moved = next(each for each in attempts(w) if len(each) > 1)
        assert moved == [("w1", "moved"), ("w3", "connect"), ("w1", None)]


async def test_who_finds_nobody_and_cannot_go_back_waits(autojump_clock, monkeypatch):
    """A17: the same, but the first worker is gone with it, and the other one is back within --busy-patience-secs."""
    settings = {"policy": "round_robin", "migration_limit": 1, "busy_patience_secs": 20}
    async with world(options=SLOW, **settings) as w:
        answers = []
        dies_after_the_look(w, w.workers[1], monkeypatch)
        async with trio.open_nursery() as clients:
            clients.start_soon(asking, w, answers)
            await until(lambda: w.workers[0].live)
            await order(w, "/workers/w1/drain?after=0")
            await until(lambda: w.app.fleet.get("w1") is None)
            await trio.sleep(10)
            await w.workers[1].restart()
        await w.quiet()
        assert answers == [[]]


async def test_those_that_serve_for_want_of_others_are_moved_to(autojump_clock):
    """A15: after an outage nobody can be compared with; who serves all the same takes what is moved."""
    settings = {"policy": "round_robin", "rejoin": "weight-version-match", "health_check_interval_secs": 2}
    async with world(plans=[None] * 3, options=SLOW, **settings) as w:
        for worker in w.workers:
            worker.kill()
        await until(lambda: {worker.state for worker in w.app.fleet.workers} == {"dead"})
        for worker in w.workers[:2]:
            await worker.restart()
        await until(lambda: [worker.state for worker in w.app.fleet.workers] == ["ready", "ready", "dead"])
        assert {worker.standing for worker in w.app.fleet.workers[:2]} == {Standing.PROVISIONAL}
        answers = []
        async with trio.open_nursery() as clients:
            clients.start_soon(asking, w, answers)
            await until(lambda: any(worker.live for worker in w.workers))
            here = next(worker for worker in w.app.fleet.workers if worker.in_flight)
            await order(w, f"/workers/{here.id}/drain?after=0")
        await w.quiet()
        assert answers == [[]]
        assert [[cause for _, cause in each] for each in attempts(w)] == [["moved", None]]


async def test_nothing_is_moved_in_a_pause(autojump_clock):
    """What an engine holds in place would have to wait elsewhere: it stays until the pause is over."""
    async with world(options=SLOW, policy="round_robin") as w:
        answers = []
        async with trio.open_nursery() as clients:
            clients.start_soon(asking, w, answers)
            await until(lambda: w.workers[0].live)
            await order(w, "/pause_generation", {"mode": "in_place"})
            await order(w, "/workers/w1/drain?after=0")
            await trio.sleep(30)
            assert w.workers[0].live == 1
            await order(w, "/continue_generation", {})
            await until(lambda: w.workers[1].live)
        await w.quiet()
        assert answers == [[]]
        assert attempts(w) == [[("w1", "moved"), ("w2", None)]]


async def test_a_worker_that_is_taken_back_keeps_what_waits_for_a_permit(autojump_clock):
    """K3: added again while its requests go one by one: the others stay."""
    hold = FaultPlan.of(Fault(at_token(0), STALL, every))
    async with world(plans=[None, hold], options=SLOW, policy="round_robin", retry_permits=1) as w:
        answers = []
        async with trio.open_nursery() as clients:
            await leave_in_turn(w, clients, answers, [60] * 4)
            await hold.fired()
            await order(w, "/workers", {"url": w.workers[0].url})
            await w.ready()
            hold.release()
        await w.quiet()
        assert answers == [[]] * 4
        assert len(w.workers[1].generates) == 1
        assert permits(w) == (0, 0)


async def test_a_move_that_is_given_up_gives_its_permit_back(autojump_clock):
    """Its silent worker is being asked for its health when it is to leave; when it has answered, nobody is left."""
    stall = FaultPlan.of(Fault(at_token(3), STALL, first(1)))
    settings = {"stall_timeout_secs": 10, "health_check_interval_secs": 1000, "retry_permits": 1}
    slow = WorkerOptions(tick=1.0, health_delay=8)
    async with world(plans=[stall, None], options=[slow, SLOW], policy="round_robin", **settings) as w:
        answers = []

        def probes():
            return sum(recorded.path == "/health" for recorded in w.workers[0].requests)

        async with trio.open_nursery() as clients:
            before = probes()
            clients.start_soon(asking, w, answers)
            await stall.fired()
            await until(lambda: probes() > before)
            await order(w, "/workers/w1/drain?after=0")
            await until(lambda: permits(w) == (1, 0))
            await order(w, "/workers/w2/drain")
            stall.release()
            await trio.sleep(20)
            assert w.workers[0].live == 1
            assert permits(w) == (0, 0)
        await w.quiet()
        assert answers == [[]]


async def test_who_has_ended_before_its_turn_needs_no_permit(autojump_clock):
    """The second of two waits for the permit of the first, and its answer ends meanwhile."""
    hold = FaultPlan.of(Fault(at_token(0), STALL, first(1)))
    async with world(plans=[None, hold], options=SLOW, policy="round_robin", retry_permits=1) as w:
        answers = []
        async with trio.open_nursery() as clients:
            await leave_in_turn(w, clients, answers, [60, 20, 61])
            await hold.fired()
            await until(lambda: len(answers) == 1)
            assert permits(w) == (1, 1)
            hold.release()
            await until(lambda: w.workers[1].live == 2)
        await w.quiet()
        assert answers == [[]] * 3
        assert permits(w) == (0, 0)


async def test_an_order_that_is_replaced_waits_for_no_permit(autojump_clock):
    """K3: `?after=0`, and then a drain without a time, while the second of two requests waits for its turn."""
    hold = FaultPlan.of(Fault(at_token(0), STALL, first(1)))
    async with world(plans=[None, hold], options=SLOW, policy="round_robin", retry_permits=1) as w:
        answers = []
        async with trio.open_nursery() as clients:
            await leave_in_turn(w, clients, answers, [60] * 2)
            await hold.fired()
            await until(lambda: permits(w) == (1, 1))
            await order(w, "/workers/w1/drain")
            await trio.sleep(1)
            assert permits(w) == (1, 0)
            hold.release()
        await w.quiet()
        assert answers == [[]] * 2
        assert permits(w) == (0, 0)


async def test_a_continuation_that_is_moved_on_has_one_permit(autojump_clock):
    """B8: it has waited for its first token with one, and goes on with the one that the move has waited for."""
    plans = [FaultPlan.in_order([(at_token(3), KILL_WORKER)]), FaultPlan.of(Fault(at_token(0), STALL, every)), None]
    async with world(plans=plans, options=SLOW, policy="round_robin", retry_permits=2, stall_timeout_secs=0) as w:
        answers = []
        async with trio.open_nursery() as clients:
            clients.start_soon(asking, w, answers)
            await plans[1].fired()
            assert permits(w) == (1, 0)
            await order(w, "/workers/w2/drain?after=0")
            await until(lambda: w.workers[2].live)
            assert permits(w)[0] <= 1
        await w.quiet()
        assert answers == [[]]
        assert attempts(w) == [[("w1", "cut"), ("w2", "moved"), ("w3", None)]]
        assert permits(w) == (0, 0)


async def test_who_has_a_permit_needs_no_second_one(autojump_clock):
    """It waits for its first token at the worker that leaves, which gives none."""
    silent = FaultPlan.of(Fault(at_token(0), STALL, every))
    plans = [FaultPlan.in_order([(at_token(3), KILL_WORKER)]), silent, None]
    async with world(plans=plans, options=SLOW, policy="round_robin", retry_permits=1, stall_timeout_secs=0) as w:
        answers = []
        async with trio.open_nursery() as clients:
            clients.start_soon(asking, w, answers)
            await silent.fired()
            await until(lambda: w.app.fleet.workers[0].state == "dead")
            await order(w, "/workers/w2/drain?after=0")
            await until(lambda: w.workers[2].live)
        await w.quiet()
        assert answers == [[]]
        assert permits(w) == (0, 0)
