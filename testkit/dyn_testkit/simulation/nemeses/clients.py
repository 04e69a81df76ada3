"""What clients do: leave in the middle, read slowly, abort many requests at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dyn_testkit.client import fetch
from dyn_testkit.simulation.nemeses.base import Missed

if TYPE_CHECKING:
    from dyn_testkit.simulation.clients import Client
    from dyn_testkit.simulation.scenario import PlannedFault
    from dyn_testkit.simulation.world import World

#: Seconds that a slow client takes for each read.
SLOW_READ = 1.5
#: The share of live requests that a storm aborts.
STORM = 0.5


class Clients:
    """Clients that do as they please."""

    faults = frozenset({"leave", "dawdle", "abort_storm"})

    async def setup(self, world: World) -> None:
        """Nothing."""

    async def invoke(self, world: World, fault: PlannedFault) -> None:
        """One live client leaves, or all become slow, or some of the named live requests are aborted."""
        live = world.clients.live
        if not live:
            raise Missed
        match fault.kind:
            case "leave":
                live[int(fault.choice * len(live))].leave()
            case "dawdle":
                world.clients.pace = SLOW_READ
            case "abort_storm":
                await self._storm(world, [client for client in live if client.rid])
        world.struck.add(fault)

    async def _storm(self, world: World, named: list[Client]) -> None:
        if not named:
            raise Missed
        for client in named[: max(1, int(len(named) * STORM))]:
            client.aborted = trio.current_time()
            await fetch(world.network.host("trainer"), world.router.url, "/abort_request", {"rid": client.rid})

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """Clients read as fast as they can."""
        if fault.kind == "dawdle":
            world.clients.pace = 0.0
