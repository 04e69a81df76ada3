"""What befalls workers: death, silence, slowness, a full queue, a lie about health, other weights, a new version."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import trio

from dyn_relay.net import ConnectFailed
from dyn_testkit.client import fetch
from dyn_testkit.simulation.nemeses.base import Missed

if TYPE_CHECKING:
    from dyn_testkit.simulation.scenario import PlannedFault
    from dyn_testkit.simulation.world import World

#: How many times slower a slow worker is.
SLOW = 3.0
#: Seconds between two deaths, and two revivals, of a swizzle.
BETWEEN = 2.0
#: Seconds that a process needs to come back.
BOOT = 1.0
#: Seconds that a trainer waits for one worker.
PATIENCE = 5.0


class Death:
    """Kills one worker, or all but one, one by one; they come back in another order."""

    faults = frozenset({"kill", "swizzle", "upgrade"})

    async def setup(self, world: World) -> None:
        """Nothing."""

    async def invoke(self, world: World, fault: PlannedFault) -> None:
        """Kill with FIN or RST, by `choice`."""
        for number in self._order(world, fault):
            world.workers[number].kill(reset=fault.choice < 0.5)
            if fault.kind == "swizzle":
                await trio.sleep(BETWEEN)

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """Start them again; an upgraded one reports another version, and speaks as any of the fleet does."""
        for number in reversed(self._order(world, fault)):
            worker = world.workers[number]
            if fault.kind == "swizzle":
                await trio.sleep(BETWEEN)
            if fault.kind == "upgrade":
                spoken = Random(fault.choice).choice(world.dialects)
                options = replace(worker.options, version=f"0.5.{24 + worker.deaths}", dialect=spoken)
                await worker.restart(options)
            else:
                await worker.restart()

    def _order(self, world: World, fault: PlannedFault) -> list[int]:
        order = list(world.struck_workers(fault))
        Random(fault.choice).shuffle(order)
        return order


class Illness:
    """Workers that live, but not as they should."""

    faults = frozenset({"stall", "lie", "slow", "busy"})

    async def setup(self, world: World) -> None:
        """Nothing."""

    async def invoke(self, world: World, fault: PlannedFault) -> None:
        """Make it ill."""
        worker = world.workers[fault.worker]
        match fault.kind:
            case "stall":
                worker.freeze()
            case "lie":
                worker.freeze()
                worker.health_status = 200
            case "slow":
                worker.scheduler.drag = SLOW
            case "busy":
                worker.scheduler.full = True

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """Make it well again."""
        worker = world.workers[fault.worker]
        match fault.kind:
            case "stall" | "lie":
                worker.thaw()
            case "slow":
                worker.scheduler.drag = 1.0
            case "busy":
                worker.scheduler.full = False


class Rollout:
    """What operators and trainers do on purpose: drain a worker, then restart it; give it new weights in mid-flight."""

    faults = frozenset({"drain", "weights"})

    async def setup(self, world: World) -> None:
        """Nothing."""

    async def invoke(self, world: World, fault: PlannedFault) -> None:
        """Drain: no health any more, live requests go on. Weights: for all workers, by the engine's own endpoint."""
        if fault.kind == "drain":
            world.workers[fault.worker].health_status = 503
            return
        version = world.new_version()
        updated = [number for number in range(len(world.workers)) if await self._update(world, number, version)]
        if fault.worker not in updated:
            raise Missed
        world.befell(fault, updated)

    async def _update(self, world: World, number: int, version: str) -> bool:
        """New weights for one worker; False if it cannot take them now."""
        order = {"model_path": "mock/model", "weight_version": version}
        with trio.move_on_after(PATIENCE):
            try:
                done = await fetch(
                    world.network.host("trainer"), world.workers[number].url, "/update_weights_from_disk", order
                )
            except ConnectFailed:
                return False
            if done.status == 200:
                world.versions[number] = version
            return done.status == 200
        return False

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """A drained worker ends, with what it has not finished, and comes back."""
        worker = world.workers[fault.worker]
        if fault.kind == "drain":
            worker.kill()
            await trio.sleep(BOOT)
            worker.health_status = 200
            await worker.restart()
