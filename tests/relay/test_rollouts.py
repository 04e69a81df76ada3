"""Operations on a fleet that is at work: nobody who waits for an answer sees anything of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from dyn_relay.sockets import open_network
from dyn_testkit.fleet import open_fleet
from dyn_testkit.oracle import Oracle
from dyn_testkit.relay import open_relay, until
from dyn_testkit.tokenizer import PLAIN
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import MODEL, ORACLE
from tests.relay.crowd import crowd, order, plans, wrong
from tests.relay.harness import World, world

#: Workers that differ in what they speak, as well as in how fast they are.
MIXED = [
    WorkerOptions(tick=0.5),
    WorkerOptions(tick=0.4, dialect="incremental"),
    WorkerOptions(tick=0.3, tokens_per_tick=3, dialect="mixed"),
    WorkerOptions(tick=0.5, max_running_requests=32),
]


async def empty(w, number):
    """Let a worker be emptied at once."""
    answer = await order(w, f"/workers/{w.workers[number].url}/drain?after=0")
    assert answer.status == 202


async def gone(w, number):
    """Return once the list has it no more."""
    await until(lambda: w.app.fleet.get(w.workers[number].url) is None)


@pytest.mark.parametrize("text", [False, True], ids=["ids", "text"])
async def test_200_streams_are_moved(autojump_clock, text):
    """K3: a worker with its share of 200 streams and 200 unary requests is emptied, then one that took some of them."""
    options = [replace(one, skip_tokenizer_init=not text) for one in MIXED]
    oracle = Oracle(MODEL, tokenizer=PLAIN) if text else ORACLE
    async with world(plans=[None] * 4, options=options, wall=trio.current_time, migration_limit=1) as w:

        async def drain():
            await until(lambda: sum(worker.live for worker in w.workers) == 400)
            await trio.sleep(5)
            assert w.workers[0].live == 100
            await empty(w, 0)
            await until(lambda: not w.workers[0].live)
            await gone(w, 0)
            loads = [worker.live for worker in w.workers[1:]]
            assert max(loads) - min(loads) <= 1  # A9
            await trio.sleep(2)
            await empty(w, 1)
            await gone(w, 1)

        history = await crowd(w, oracle, plans(400, 48), drain)
        assert wrong(history) == []
        moved = [attempt for row in history.rows for attempt in row["attempts"] if attempt["cause"] == "moved"]
        assert len(moved) >= 200
        resumed = [one for row in history.rows for one in row["attempts"][1:] if one["first_token"] is not None]
        assert w.metric('dyn_relay_migrations_total{reason="moved"}') == len(resumed)
        assert {attempt["cause"] for row in history.rows for attempt in row["attempts"]} == {None, "moved"}


async def test_a_rolling_restart_three_times_over(autojump_clock):
    """Every worker is emptied, restarted and taken back, one after the other, three rounds: no request fails."""
    async with world(plans=[None] * 4, options=MIXED, wall=trio.current_time, migration_limit=1) as w:
        deaths = []

        async def roll():
            await trio.sleep(10)
            for _ in range(3):
                for number, worker in enumerate(w.workers):
                    await empty(w, number)
                    await gone(w, number)
                    assert worker.live == 0
                    worker.kill()
                    deaths.append(number)
                    await trio.sleep(2)
                    await worker.restart()
                    await order(w, "/workers", {"url": worker.url})
                    await w.ready()

        history = await crowd(w, ORACLE, plans(180, 60, each=0.6), roll)
        assert wrong(history) == []
        assert deaths == [0, 1, 2, 3] * 3
        causes = [attempt["cause"] for row in history.rows for attempt in row["attempts"]]
        assert set(causes) <= {None, "moved"}
        assert causes.count("moved") > 40
        assert w.metric('dyn_relay_requests_total{outcome="done"}') == 180


async def test_200_streams_are_moved_over_sockets():
    """K3, in real time, between real sockets."""
    async with open_network() as network, open_fleet(network) as fleet:
        workers = await fleet(4, options=[replace(one, tick=one.tick / 2) for one in MIXED])
        async with (
            open_relay(network, workers=[worker.url for worker in workers], wall=trio.current_time, seed=1) as relay,
            trio.open_nursery() as nursery,
        ):
            await relay.ready()
            w = World(relay, workers, nursery)

            async def drain():
                await until(lambda: sum(worker.live for worker in workers) == 400)
                for worker in workers:
                    worker.scheduler.resume()
                await until(lambda: all(live.ids for live in workers[0].scheduler.live.values()))
                for number in (0, 1):
                    await empty(w, number)
                    await gone(w, number)

            for worker in workers:  # until all requests are there, however slow the machine is
                worker.scheduler.pause("in_place")
            history = await crowd(w, ORACLE, plans(400, 24), drain)
        assert wrong(history) == []
        causes = [attempt["cause"] for row in history.rows for attempt in row["attempts"]]
        assert causes.count("moved") >= 100
        assert set(causes) == {None, "moved"}
