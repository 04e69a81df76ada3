"""A process takes a dead one's place: what no configuration says it has from the others."""

from __future__ import annotations

import pytest
import trio

from dyn_relay.fleet.discovery import file
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.test_discovery import HEARD, File
from tests.relay.test_siblings import processes

NEW = "http://new:1"


async def replaced(relays, start, network):
    """The last of them, ended, and another in its place."""
    number = len(relays) - 1
    relays[number].app.draining.set()
    await until(lambda: (f"process-{number}", 1) not in network.listening)
    relays[number] = await start(number, replacement=True)
    return relays[number]


def states(relay):
    return {worker.url: worker.state.value for worker in relay.app.fleet.workers}


@pytest.mark.parametrize("rejoin", ["weight-version-match", "manual"])
async def test_it_does_not_let_in_whom_the_others_keep_out(autojump_clock, tmp_path, rejoin):
    """A15: a worker has come back with old weights; to the new process it is no newcomer."""
    options = WorkerOptions(weight_version="7")
    async with processes(tmp_path, count=2, options=options, rejoin=rejoin) as (relays, workers, start, network):
        old, good = workers
        old.kill()
        await until(lambda: {states(relay)[old.url] for relay in relays} == {"dead"})
        await old.restart(WorkerOptions(weight_version="5"))
        wanted = {old.url: "stale", good.url: "ready"}
        await until(lambda: all(states(relay) == wanted for relay in relays))
        relay = await replaced(relays, start, network)
        await until(lambda: states(relay)[good.url] == "ready")
        for _ in range(60):
            await trio.sleep(1)
            assert states(relay)[old.url] != "ready"
        assert states(relay) == wanted


async def test_it_lets_in_who_was_welcomed_beforehand(autojump_clock, tmp_path):
    """A worker was let in while it was away: a process that was not there then does not keep it out."""
    async with processes(tmp_path, count=2, rejoin="manual") as (relays, workers, start, network):
        away, good = workers
        away.kill()
        await until(lambda: {states(relay)[away.url] for relay in relays} == {"dead"})
        name = relays[0].app.fleet.get(away.url).id
        assert (await relays[0].ask({}, f"/workers/{name}/admit")).status == 200
        relay = await replaced(relays, start, network)
        await until(lambda: states(relay)[good.url] == "ready")
        await away.restart()
        await until(lambda: all(states(one)[away.url] == "ready" for one in relays))


@pytest.fixture
def listed(monkeypatch):
    """A file of workers that all processes read; it names one that the configuration has as well."""
    found = File()
    found.urls = ["http://w1:30000"]
    monkeypatch.setattr(file, "_in_thread", lambda: found.read)
    return found


async def test_who_was_removed_by_hand_stays_away(autojump_clock, tmp_path, listed):
    """Discovery names it all the time: only what it says anew acts, also in a process that hears it first."""
    async with processes(tmp_path, discovery_file="workers") as (relays, workers, start, network):
        listed.urls = [NEW]
        await trio.sleep(HEARD)
        gone = relays[0].app.fleet.get(NEW).id
        assert (await relays[0].ask(None, f"/workers/{gone}", method="DELETE")).status == 202
        relay = await replaced(relays, start, network)
        await trio.sleep(2 * HEARD)
        assert [set(states(one)) for one in relays] == [{worker.url for worker in workers}] * 3
        listed.urls = ["http://other:1"]
        await trio.sleep(HEARD)
        listed.urls = ["http://other:1", NEW]
        await trio.sleep(HEARD)
        assert NEW in states(relay), "dropped, and named again"


async def test_whom_discovery_drops_leaves_it_too(autojump_clock, tmp_path, listed):
    """A17: it was named by the file, not by the process that told of it."""
    async with processes(tmp_path, discovery_file="workers") as (relays, _, start, network):
        listed.urls = [NEW]
        await trio.sleep(HEARD)
        relay = await replaced(relays, start, network)
        assert relay.app.fleet.get(NEW).named_by == {"file"}
        listed.urls = ["http://other:1"]
        await trio.sleep(HEARD)
        assert [NEW in states(one) for one in relays] == [False] * 3
