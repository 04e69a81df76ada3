"""What befalls the network between the router and one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from dyn_testkit.simulation.nemeses.base import Missed

if TYPE_CHECKING:
    from dyn_testkit.simulation.scenario import PlannedFault
    from dyn_testkit.simulation.world import World

#: Seconds between two looks for a connection that can be reset.
LOOK = 0.5


class Links:
    """Partitions, resets, refusals, dials that hang or are never accepted."""

    faults = frozenset({"partition", "reset", "refuse", "hang", "deaf"})

    async def setup(self, world: World) -> None:
        """Nothing."""

    async def invoke(self, world: World, fault: PlannedFault) -> None:
        """A reset waits for a connection, for at most `duration`."""
        network, worker = world.network, world.workers[fault.worker]
        address = (worker.host, world.port(fault.worker))
        match fault.kind:
            case "partition":
                network.partition(world.ROUTER, worker.host)
            case "refuse":
                network.refuse(address)
            case "hang":
                network.hang(address)
            case "deaf":
                network.deafen(address)
            case "reset":
                with trio.move_on_after(fault.duration):
                    while not network.reset(world.ROUTER, worker.host):  # noqa: ASYNC110 - connections are no event
                        await trio.sleep(LOOK)
                    world.struck.add(fault)
                    return
                raise Missed

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """All is well again."""
        network, worker = world.network, world.workers[fault.worker]
        address = (worker.host, world.port(fault.worker))
        match fault.kind:
            case "partition":
                network.heal(world.ROUTER, worker.host)
            case "refuse" | "hang":
                network.accept(address)
            case "deaf":
                network.hear(address)
