"""What befalls sidecars, and what is between one and its engine. The engine's own death is `kill`, as of any worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from dyn_testkit.simulation.scenario import PlannedFault
    from dyn_testkit.simulation.world import World

#: Seconds within which a sidecar that was started, or an engine that it reaches again, serves.
PATIENCE = 20.0


class Sidecars:
    """A sidecar is killed, or stopped as by SIGSTOP; or its engine and it cannot reach each other."""

    faults = frozenset({"kill_sidecar", "stall_sidecar", "sever"})

    async def setup(self, world: World) -> None:
        """Nothing."""

    async def invoke(self, world: World, fault: PlannedFault) -> None:
        """Its engine goes on."""
        host = world.workers[fault.worker].host
        beside = world.sidecars[fault.worker]
        match fault.kind:
            case "kill_sidecar":
                beside.host.kill()
            case "stall_sidecar":
                beside.gate.shut()
            case "sever":
                world.network.partition(host, host)

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """Another process; the same goes on; they reach each other."""
        host = world.workers[fault.worker].host
        beside = world.sidecars[fault.worker]
        match fault.kind:
            case "kill_sidecar":
                beside.host.restart()
            case "stall_sidecar":
                beside.gate.open()
            case "sever":
                world.network.heal(host, host)
        with trio.move_on_after(PATIENCE):
            await beside.host.sidecar.open.wait()
