"""What the fixtures of `plugin.py` run, and what they find wrong: mistakes at once, the rest at the end of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from math import inf
from typing import Any

import trio
from trio.testing import MockClock

from dyn_relay.net import Network
from dyn_relay.sockets import open_network
from dyn_testkit.client import Response
from dyn_testkit.determinism import seeded
from dyn_testkit.fleet import Fleet, open_fleet
from dyn_testkit.plugin import Findings
from dyn_testkit.relay import Relay, open_relay
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker

#: Seconds that a request whose answer is out has to end.
GRACE = 1.0
#: The port of all that runs in memory.
PORT = 30000


class Mistake(Exception):
    """A fixture is used in a way that cannot work; the message says what to do instead."""


async def network(stack: AsyncExitStack, test: str, seed: int | None) -> Network:
    """A network in memory with this seed; None: real sockets. Raises `Mistake` if the clock does not fit."""
    clock = trio.lowlevel.current_clock()
    if seed is None:
        if isinstance(clock, MockClock):
            raise Mistake(
                f"{test}: real sockets know nothing of a mock clock: time would run away from them. Add `sim` to the "
                "arguments, and all is in memory; or leave the clock out"
            )
        return await stack.enter_async_context(open_network())
    if not (isinstance(clock, MockClock) and (clock.autojump_threshold < inf or clock.rate > 0)):
        why = "stands still" if isinstance(clock, MockClock) else "is the real one: every second would be waited for"
        raise Mistake(f"{test}: `sim` needs virtual time, and the clock {why}. Add `autojump_clock` to the arguments")
    stack.enter_context(seeded(seed))
    return SimNetwork(seed)


@asynccontextmanager
async def fleet(network: Network, findings: Findings) -> AsyncIterator[Fleet]:
    """An empty fleet; each fault must have happened by its end."""
    simulated = isinstance(network, SimNetwork)
    async with open_fleet(network, *(("w{}", PORT) if simulated else ())) as workers:
        yield workers
        findings.found += workers.unfired


class AttendedRelay(Relay):
    """A `Relay` that tells the mistakes which would make a test pass, or fail, for no good reason."""

    #: The workers that were ready when `ready` was last awaited.
    _known = 0
    #: Calls of `ask` that have no answer yet.
    _asking = 0

    async def ask(self, body: Any, path: str = "/generate", **kwargs: Any) -> Response:
        """One request through it. Raises `Mistake` before `ready` was awaited: which worker gets it would be luck."""
        workers = self.app.fleet.workers
        if not workers:
            raise Mistake("the proxy has no worker: `await fleet(2)` first, then `await relay.ready()`")
        if self._known < len(workers):
            states = ", ".join(f"{worker.url} is {worker.state}" for worker in workers)
            raise Mistake(f"`await relay.ready()` before the first request, and after each `fleet(...)`: {states}")
        self._asking += 1
        try:
            return await super().ask(body, path, **kwargs)
        finally:
            self._asking -= 1

    async def ready(self) -> None:
        """Return once every worker is ready."""
        await super().ready()
        self._known = len(self.app.fleet.workers)

    def join(self, worker: MockWorker) -> None:
        """One worker more."""
        self.app.fleet.add(worker.url)

    def unanswered(self) -> list[str]:
        """What is wrong when the test's function returns: pytest-trio cancels its nursery next."""
        if not self._asking:
            return []
        return [f"{self._asking} `relay.ask` had no answer when the test ended: await it, or cancel it"]

    async def left(self) -> list[str]:
        """What is wrong when all that the test has begun is over."""
        with trio.move_on_after(GRACE):
            await self.quiet()
        return [
            f"the request {request.rid!r} was still live when the test ended: read its answer, or close its connection"
            for request in self.app.live
        ]


@asynccontextmanager
async def relay(
    network: Network, fleet: Fleet, findings: Findings, options: dict[str, Any]
) -> AsyncIterator[AttendedRelay]:
    """A proxy before whatever workers the fleet gets; no request may be left at its end."""
    if isinstance(network, SimNetwork):
        opened = open_relay(network.host("relay"), "relay", PORT, clients=network, wall=trio.current_time, **options)
    else:
        opened = open_relay(network, **options)
    async with opened as running:
        attended = AttendedRelay(running.app, running.url, running.rows, running.network)
        fleet.follow(attended.join)
        findings.at_return.append(attended.unanswered)
        yield attended
        findings.found += await attended.left()
