"""The state machine of a fleet's membership finds what it is for, and says it in few steps."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import trio
from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from dyn_relay.fleet.worker import TRANSITIONS, Signal, State
from dyn_testkit.membership import Broken, Membership
from dyn_testkit.membership.world import World
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.simulation.router import relay

SETTINGS = settings(
    max_examples=1000,
    stateful_step_count=10,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
)


def found(machine=Membership):
    """What the machine finds: its message, and the steps of the shortest program, each without its arguments."""
    with pytest.raises(Broken) as caught:
        run_state_machine_as_test(seed(3)(machine), settings=SETTINGS)
    steps = re.findall(r"^state\.(\w+)", "\n".join(caught.value.__notes__), re.MULTILINE)
    assert len(steps) <= 7, "shrinking does not get far"
    return str(caught.value), steps


def test_dead_workers_that_stay_ready(monkeypatch):
    monkeypatch.delitem(TRANSITIONS, (State.READY, Signal.GONE))
    message, steps = found()
    assert re.fullmatch(r"w\d is dead, and listed as ready", message)
    assert {"add", "kill"} <= set(steps)


def test_requests_that_are_lost_though_somebody_remains():
    """A router that may not continue anything."""

    class Stubborn(Membership):
        options: ClassVar = {**Membership.options, "migration_limit": 0}

    message, steps = found(Stubborn)
    assert re.match(r"r\d was lost \(502, ", message)
    assert {"add", "send"} < set(steps)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (None, r"the router has not answered GET /workers for 30 s"),
        (b"<h1>Workers</h1>", r"GET /workers is no list of workers: 200 b'<h1>Workers</h1>'"),
        (b'{"urls": []}', r"GET /workers is no list of workers: 200"),
        (b'{"workers": [{"url": "http://w1:1", "load": 0}]}', r"an entry of GET /workers lacks is_healthy: b'"),
    ],
)
async def test_a_router_that_tells_its_operator_something_else(autojump_clock, says, words):
    network = SimNetwork()
    listener = await network.listen("router", 1)

    async def serve():
        connection = await listener.accept()
        await connection.receive()
        if says is None:
            await trio.sleep_forever()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(says), says))
        connection.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        world = World(network, nursery)
        world.router = SimpleNamespace(url="http://router:1")
        with pytest.raises(Broken, match=words):
            await world.check()
        nursery.cancel_scope.cancel()


def test_anybodys_router():
    """Here one that writes no row."""

    @asynccontextmanager
    async def silent(*args):
        async with relay(*args) as running:
            running.rows = []
            yield running

    class Mine(Membership):
        factory = staticmethod(silent)

    message, steps = found(Mine)
    assert message.startswith("run: exactly_once: ")
    assert "send" in steps
