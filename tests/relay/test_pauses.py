"""Pauses: those ordered through the proxy, and those of a trainer that talks to the workers itself."""

from __future__ import annotations

import pytest
import trio

from dyn_testkit.client import fetch
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.crowd import order
from tests.relay.harness import judged, world

SLOW = WorkerOptions(tick=0.5)
MODES = pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}


async def several(w, count, tokens, meanwhile):
    """The answers to so many requests, and something that is done while they are under way."""
    answers = {}

    async def client(number):
        answers[number] = await w.ask(generate(tokens, rid=f"r{number}", stream=bool(number % 2)))

    async with trio.open_nursery() as clients:
        for number in range(count):
            clients.start_soon(client, number)
        await until(lambda: sum(worker.live for worker in w.workers) == count)
        await trio.sleep(3)
        await meanwhile()
    await w.quiet()
    return [answers[number] for number in range(count)]


def exact(answers, tokens):
    return [
        problem
        for number, answer in enumerate(answers)
        for problem in judged(answer, generate(tokens, rid=f"r{number}", stream=bool(number % 2)), ORACLE)
    ]


def reasons(answers):
    values = [answer.values()[-1] if number % 2 else answer.json() for number, answer in enumerate(answers)]
    return [value["meta_info"]["finish_reason"]["type"] for value in values]


async def loads(w, worker):
    answer = await fetch(w.network, worker.url, "/v1/loads?include=core", method="GET")
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in answer.json()["loads"])


@MODES
async def test_no_attempt_begins_in_a_pause(autojump_clock, mode):
    """Requests wait, as they do at an engine of stock's, and so do those that would go on elsewhere."""
    async with world(plans=[None, None], options=SLOW, policy="round_robin") as w:
        late = []

        async def newcomer():
            late.append(await w.ask(generate(4)))

        async def pause():
            async with trio.open_nursery() as clients:
                answer = await order(w, "/pause_generation", {"mode": mode})
                assert answer.status == 200
                assert {name: answer.json()[name] for name in PAUSED} == PAUSED
                assert [row["answer"] for row in answer.json()["workers"]] == [PAUSED, PAUSED]
                assert (await order(w, "/workers", method="GET")).json()["paused"] is True
                assert (await order(w, "/ready", method="GET")).status == 503
                assert (await order(w, "/health", method="GET")).status == 200
                before = [len(worker.generates) for worker in w.workers]
                clients.start_soon(newcomer)
                await trio.sleep(10)
                w.workers[0].kill()  # what it has would go on elsewhere
                await trio.sleep(400)
                assert [len(worker.generates) for worker in w.workers] == before
                await w.workers[0].restart()
                answer = await order(w, "/continue_generation", {})
                assert answer.json()["message"] == "Generation continued successfully."
            assert (await order(w, "/workers", method="GET")).json()["paused"] is False
            assert (await order(w, "/ready", method="GET")).status == 200

        answers = await several(w, 4, 40, pause)
        if mode == "abort":
            assert reasons(answers) == ["abort"] * 4
        else:
            assert exact(answers, 40) == []
        assert judged(late[0], generate(4), ORACLE) == []


@pytest.mark.parametrize("limit", [0.0, 20.0], ids=["no-first-token-limit", "first-token-limit"])
async def test_silence_in_a_pause_is_nobodys_fault(autojump_clock, limit):
    """Deadlines stand still: no stall, no late first token, no penalty."""
    options = WorkerOptions(tick=0.5, max_running_requests=1)
    async with world(plans=[None], options=options, first_token_timeout_secs=limit, stall_timeout_secs=30) as w:

        async def pause():
            await order(w, "/pause_generation", {"mode": "in_place"})
            w.workers[0].health_status = 503
            await trio.sleep(1000)
            w.workers[0].health_status = 200
            await order(w, "/continue_generation", {})

        answers = await several(w, 2, 20, pause)
        assert exact(answers, 20) == []
        assert [[attempt["cause"] for attempt in row["attempts"]] for row in w.rows] == [[None], [None]]
        assert w.app.fleet.workers[0].failures == 0


async def test_what_was_not_sent_yet_is_taken_back(autojump_clock):
    """An attempt that is being dialled when everything is paused never begins."""
    async with world(plans=[None, None], options=SLOW, policy="round_robin", connect_timeout_secs=1000) as w:
        await trio.sleep(5)
        w.network.hang(("w1", 30000))
        answers = []

        async def client():
            answers.append(await w.ask(generate(4, sampling={"frequency_penalty": 0.5})))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: w.app.fleet.workers[0].in_flight)
            with trio.move_on_after(1):  # w1 cannot be told
                await order(w, "/pause_generation", {})
            begun = trio.current_time()
            await until(lambda: not w.app.fleet.workers[0].in_flight)
            assert trio.current_time() - begun < 1
            w.network.accept(("w1", 30000))
            await trio.sleep(30)
            assert [len(worker.generates) for worker in w.workers] == [0, 0]
            await order(w, "/continue_generation", {})
        assert answers[0].status == 200


async def test_waiting_in_a_pause_ends_with_the_client_and_with_an_abort(autojump_clock):
    async with world(plans=[None]) as w:
        await order(w, "/pause_generation", {})
        with trio.move_on_after(5):
            await w.ask(generate(4))
        await w.quiet()
        answers = []

        async def client():
            answers.append(await w.ask(generate(4, rid="R", stream=False)))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await trio.sleep(5)
            await order(w, "/abort_request", {"rid": "R"})
        assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert w.workers[0].generates == []
        assert [row["outcome"] for row in w.rows] == ["client_gone", "aborted"]


async def test_a_pause_that_no_worker_obeys_is_none(autojump_clock):
    """And one that some have not obeyed is one, loudly."""
    keys = [WorkerOptions(admin_api_key="admin"), WorkerOptions(admin_api_key="admin")]
    async with world(options=keys) as w:
        answer = await order(w, "/pause_generation", {})
        assert (answer.status, answer.json()["success"]) == (401, False)
        assert judged(await w.ask(generate(4)), generate(4), ORACLE) == []
    async with world(options=[WorkerOptions(admin_api_key="admin"), WorkerOptions()]) as w:
        answer = await order(w, "/pause_generation", {})
        assert (answer.status, answer.json()["message"]) == (502, "1 of 2 workers: w1: status 401")
        assert w.app.fleet.paused
        assert (await order(w, "/continue_generation", {})).status == 502
        assert not w.app.fleet.paused


async def test_the_end_of_a_pause_that_no_worker_obeys_is_none(autojump_clock):
    """Whoever was let go on would meet engines that are paused still."""
    async with world() as w:
        assert (await order(w, "/pause_generation", {})).status == 200
        for worker in w.workers:
            worker.kill()
        assert (await order(w, "/continue_generation", {})).status == 502
        assert (await order(w, "/workers", method="GET")).json()["paused"] is True


async def test_a_pause_with_on_abort_resume(autojump_clock):
    """What the pause has aborted waits, and goes on exactly when it is over: no limit is used, nobody is blamed."""
    async with world(options=SLOW, on_abort="resume", migration_limit=1) as w:

        async def pause():
            for _ in range(6):
                await order(w, "/pause_generation", {"mode": "abort"})
                await trio.sleep(60)
                assert [worker.live for worker in w.workers] == [0, 0]
                await order(w, "/continue_generation", {})
                await trio.sleep(3)

        answers = await several(w, 8, 60, pause)
        assert exact(answers, 60) == []
        assert {attempt["cause"] for row in w.rows for attempt in row["attempts"]} == {None, "moved"}
        assert [worker.failures for worker in w.app.fleet.workers] == [0, 0]


async def drained(w, *, settle):
    """Slime's way of quieting all engines: abort everything, look, abort again. Seconds that it took."""
    begun = trio.current_time()
    while True:
        for worker in w.workers:
            await fetch(w.network, worker.url, "/abort_request", {"abort_all": True})
        await trio.sleep(settle)
        if not any([await loads(w, worker) for worker in w.workers]):
            return trio.current_time() - begun
        assert trio.current_time() - begun < 60, "the drain does not end"


@pytest.mark.parametrize("on_abort", ["relay", "resume"])
async def test_a_trainers_drain_ends_at_once(autojump_clock, on_abort):
    """H5: everything is aborted at the workers, past the proxy: nothing is resumed into that, and every load is 0."""
    async with world(options=SLOW, on_abort=on_abort, migration_limit=1) as w:

        async def drain():
            before = [len(worker.generates) for worker in w.workers]
            assert await drained(w, settle=3) < 4
            for worker in w.workers:
                await fetch(w.network, worker.url, "/pause_generation", {"mode": "abort"})
            await trio.sleep(300)
            assert [await loads(w, worker) for worker in w.workers] == [0, 0]
            assert [len(worker.generates) for worker in w.workers] == before
            for worker in w.workers:
                await fetch(w.network, worker.url, "/continue_generation", {})

        answers = await several(w, 8, 60, drain)
        if on_abort == "relay":
            assert reasons(answers) == ["abort"] * 8
        else:
            assert exact(answers, 60) == []
            assert {attempt["cause"] for row in w.rows for attempt in row["attempts"]} == {None, "interrupted"}
            assert [worker.failures for worker in w.app.fleet.workers] == [0, 0]


async def test_repeated_aborts_hold_everything_back(autojump_clock):
    """H5: as long as aborts come nothing is resumed, not even what a dead worker has left; then it is."""
    async with world(plans=[None] * 3, options=SLOW, on_abort="resume", policy="round_robin", migration_limit=1) as w:

        async def drain():
            before = sum(len(worker.generates) for worker in w.workers)
            await fetch(w.network, w.workers[0].url, "/abort_request", {"abort_all": True})
            await trio.sleep(0.5)
            w.workers[1].kill()
            await trio.sleep(3.5)
            await fetch(w.network, w.workers[2].url, "/abort_request", {"abort_all": True})
            await trio.sleep(4)
            assert sum(len(worker.generates) for worker in w.workers) == before
            await until(lambda: sum(len(worker.generates) for worker in w.workers) == before + 6)

        assert exact(await several(w, 6, 60, drain), 60) == []


async def test_an_abort_that_comes_too_often_is_relayed(autojump_clock):
    """Somebody does not want it: after --migration-limit it ends as an abort, with all that was delivered."""
    async with world(plans=[None], options=SLOW, on_abort="resume", migration_limit=1) as w:

        async def abort():
            await fetch(w.network, w.workers[0].url, "/abort_request", {"abort_all": True})
            await until(lambda: not w.workers[0].live)
            await until(lambda: w.workers[0].live == 2)
            await trio.sleep(5)
            await fetch(w.network, w.workers[0].url, "/abort_request", {"abort_all": True})

        answers = await several(w, 2, 60, abort)
        assert reasons(answers) == ["abort", "abort"]
        assert answers[1].values()[-1]["meta_info"]["completion_tokens"] > 6
        assert [row["outcome"] for row in w.rows] == ["aborted", "aborted"]


async def test_a_drain_of_the_proxy_ends_a_pause(autojump_clock):
    """Nobody can reach it to do so: what waits goes to its worker, and waits there."""
    async with world(plans=[None]) as w:
        await order(w, "/pause_generation", {})
        answers = []

        async def client():
            answers.append(await w.ask(generate()))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: len(w.app.live))
            await trio.sleep(10)
            assert w.workers[0].generates == []
            w.app.drain()
            await until(lambda: w.workers[0].generates)
            await trio.sleep(10)
            assert answers == []
            await fetch(w.network, w.workers[0].url, "/continue_generation", {})
        assert judged(answers[0], generate(), ORACLE) == []
