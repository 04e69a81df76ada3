"""The steps, and what must hold after each of them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

import trio
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from dyn_testkit.membership.world import TICK, World
from dyn_testkit.simnet import SimHost, SimNetwork
from dyn_testkit.simulation.router import Router, RouterFactory, relay
from dyn_testkit.simulation.scenario import DIALECTS
from dyn_testkit.stepwise import Stepwise
from dyn_testkit.worker import Dialect

#: Workers, and requests at a time: as many as it takes for the rarest of meetings.
MOST_WORKERS = 4
MOST_LIVE = 6
#: Virtual seconds: what a step may take, and what it may take until all is over and seen by the probes.
LIMIT = 3600.0
SETTLING = 120.0


def _one_of(who: str) -> st.SearchStrategy[str]:
    """A name out of one of the lists of the world."""
    return st.runner().flatmap(lambda machine: st.sampled_from(getattr(machine.world, who)))


def _any(who: str) -> Callable[[Any], bool]:
    return lambda machine: bool(getattr(machine.world, who))


class Membership(RuleBasedStateMachine):
    """Workers join, die, come back, leave and return while requests run.

    After each step the router's list of workers is as it was told, a removed worker gets nothing new, and no request is
    lost while a healthy worker remains. Once all is over the list says who is alive, each request has one row, and
    nothing is in flight.
    """

    #: Makes the router.
    factory: ClassVar[RouterFactory] = staticmethod(relay)
    #: Its options: nothing may end a request but the loss of all workers.
    options: ClassVar[Mapping[str, Any]] = {
        "migration_limit": 1000,
        "suspect_attempts": 1000,
        "health_check_interval_secs": 20.0,
        "health_failure_threshold": 1,
        "health_success_threshold": 1,
    }

    def __init__(self) -> None:
        super().__init__()
        self._trio = Stepwise(0)
        self.world = self._trio.step(self._open)

    async def _open(self) -> World:
        network = SimNetwork(0)
        world = World(network, self._trio.nursery)
        world.router = await self._trio.nursery.start(self._route, network.host("router"))
        return world

    async def _route(self, network: SimHost, task_status: trio.TaskStatus[Router]) -> None:
        async with type(self).factory(network, network.name, (), 0, self.options) as router:
            task_status.started(router)
            await trio.sleep_forever()

    def teardown(self) -> None:
        """Let all end and check it, unless a step has failed already or Hypothesis has broken off; end the world."""
        try:
            if sys.exception() is None:
                self.settle()
        finally:
            self._trio.close()

    # -- steps

    @precondition(lambda self: len(self.world.members) < MOST_WORKERS)
    @rule(dialect=st.sampled_from(DIALECTS))
    def add(self, dialect: Dialect) -> None:
        """A worker joins."""
        self._step(self.world.add, f"w{len(self.world.members) + 1}", dialect)

    @precondition(lambda self: len(self.world.live) < MOST_LIVE)
    @rule(count=st.integers(1, 4), tokens=st.integers(1, 60), stream=st.booleans())
    def send(self, count: int, tokens: int, stream: bool) -> None:
        """Requests come, and go to workers."""
        self._step(self.world.send, count, tokens, stream)

    @precondition(_any("alive"))
    @rule(name=_one_of("alive"))
    def kill(self, name: str) -> None:
        """A worker dies."""
        self._step(self.world.kill, name)

    @precondition(_any("dead"))
    @rule(name=_one_of("dead"))
    def revive(self, name: str) -> None:
        """A dead worker comes back."""
        self._step(self.world.restart, name)

    @precondition(_any("alive"))
    @rule(name=_one_of("alive"), dialect=st.sampled_from(DIALECTS))
    def restart(self, name: str, dialect: Dialect) -> None:
        """A worker dies and is back at once, with other options."""
        self._step(self._restart, name, dialect)

    async def _restart(self, name: str, dialect: Dialect) -> None:
        await self.world.kill(name)
        await self.world.restart(name, dialect)

    @precondition(_any("listed"))
    @rule(name=_one_of("listed"))
    def remove(self, name: str) -> None:
        """A worker leaves the fleet: what it does may end."""
        self._step(self.world.remove, name)

    @precondition(_any("removed"))
    @rule(name=_one_of("removed"))
    def rejoin(self, name: str) -> None:
        """A worker that had left returns."""
        self._step(self.world.join, name)

    @precondition(_any("live"))
    @rule(rid=_one_of("live"))
    def abort(self, rid: str) -> None:
        """Somebody aborts a request."""
        self._step(self.world.abort, rid)

    @rule(seconds=st.sampled_from([1, 5, 30]))
    def wait(self, seconds: int) -> None:
        """Time passes."""
        self._step(trio.sleep, seconds)

    @rule()
    def settle(self) -> None:
        """Time passes until all requests have ended and all probes have seen how the workers are."""
        self._step(self._settle)

    async def _settle(self) -> None:
        with trio.move_on_after(LIMIT):
            while self.world.live:  # noqa: ASYNC110 - virtual time
                await trio.sleep(TICK)
        await trio.sleep(SETTLING)
        await self.world.check()
        await self.world.check_quiet()
        self.world.check_history()

    # -- what holds after each

    def _step(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        self._trio.step(work, *args)
        self._trio.step(self.world.check)
