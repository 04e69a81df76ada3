"""What befalls workers: death, silence, slowness, a full queue, a lie about health, other weights, a new version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import trio

from dyn_relay.net import ConnectFailed
from dyn_testkit import faults
from dyn_testkit.client import fetch
from dyn_testkit.faults import Fault, Seen, Where
from dyn_testkit.simulation.nemeses.base import AUDITOR, Missed

if TYPE_CHECKING:
    from dyn_testkit.simulation.scenario import PlannedFault
    from dyn_testkit.simulation.world import World

#: How many times slower a slow worker is.
SLOW = 3.0
#: Seconds between two deaths, and two revivals, of a swizzle.
BETWEEN = 2.0
#: Seconds that a process needs to come back.
BOOT = 1.0

#: Where an answer may be cut: every place of it. Few cuts would find its end by chance.
CUTS: Mapping[str, Sequence[Where]] = {
    "cut": (
        faults.AT_HEAD,
        faults.at_token(0),
        faults.at_token(1),
        faults.at_token(7),
        faults.inside_chunk_size(3),
        faults.inside_json(5, 30),
    ),
    "late_cut": (
        faults.at_token(-1),
        faults.AFTER_LAST_TOKEN,
        faults.AFTER_FINISH,
        faults.BEFORE_LAST_CHUNK,
        faults.AFTER_DONE,
    ),
}


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
        """Start them again; an upgraded one reports another version."""
        for number in reversed(self._order(world, fault)):
            worker = world.workers[number]
            if fault.kind == "swizzle":
                await trio.sleep(BETWEEN)
            if fault.kind == "upgrade":
                await worker.restart(replace(worker.options, version=f"0.5.{24 + worker.deaths}"))
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
        """Drain: no health any more, live requests go on. Weights: by the engine's own endpoint."""
        worker = world.workers[fault.worker]
        if fault.kind == "drain":
            worker.health_status = 503
            return
        version = world.new_version()
        order = {"model_path": "mock/model", "weight_version": version}
        try:
            done = await fetch(world.network.host("trainer"), worker.url, "/update_weights_from_disk", order)
        except ConnectFailed:
            raise Missed from None
        if done.status != 200:
            raise Missed
        world.versions[fault.worker] = version

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """A drained worker ends, with what it has not finished, and comes back."""
        worker = world.workers[fault.worker]
        if fault.kind == "drain":
            worker.kill()
            await trio.sleep(BOOT)
            worker.health_status = 200
            await worker.restart()


class Cut:
    """Cuts the next answer of a worker, early or at its end, at a place that `choice` gives."""

    faults = frozenset(CUTS)

    async def setup(self, world: World) -> None:
        """Nothing."""

    async def invoke(self, world: World, fault: PlannedFault) -> None:
        """Wait until it has happened, for at most `duration`."""
        worker = world.workers[fault.worker]
        places = CUTS[fault.kind]
        place = places[int(fault.choice * len(places))]
        what = faults.RESET if int(fault.choice * 1000) % 2 else faults.CLOSE
        begun = len(worker.generates)

        def fits(body: dict[str, Any]) -> bool:
            # Stock SGLang sends an EOS together with its finish: there is no place between them.
            ends_by_budget = body["sampling_params"].get("ignore_eos") is True
            return body.get("rid") != AUDITOR and (ends_by_budget or place is not faults.AFTER_LAST_TOKEN)

        def following(seen: Seen) -> bool:
            since = [recorded.json() for recorded in worker.generates[begun : seen.index + 1]]
            return bool(since) and fits(since[-1]) and not any(map(fits, since[:-1]))

        planned = Fault(place, what, following)
        worker.faults.add(planned)
        with trio.move_on_after(fault.duration):
            await worker.faults.fired(planned)
        if not worker.faults.count(planned):
            worker.faults.revoke(planned)
            raise Missed

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """Nothing: it is over."""
