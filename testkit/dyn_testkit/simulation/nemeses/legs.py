"""Kills a worker of a prefill/decode pair while a leg of a request is in a certain phase."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import trio

from dyn_testkit import faults
from dyn_testkit.faults import Fault, Seen, Where
from dyn_testkit.simulation.nemeses.base import AUDITOR, Missed

if TYPE_CHECKING:
    from dyn_testkit.simulation.scenario import PlannedFault
    from dyn_testkit.simulation.world import World

#: Where the leg is when its worker dies, by kind. The last is decode's alone: prefill's answer has one token.
PHASES: Mapping[str, Where] = {
    "kill_at_bootstrap": faults.AT_BOOTSTRAP,
    "kill_in_transfer": faults.IN_TRANSFER,
    "kill_after_transfer": faults.AFTER_TRANSFER,
    "kill_at_first_token": faults.at_token(1),
    "kill_amid_tokens": faults.at_token(9),
}


class Legs:
    """The next leg that comes so far; the worker stays dead for `duration`."""

    faults = frozenset(PHASES)

    async def setup(self, world: World) -> None:
        """Nothing."""

    async def invoke(self, world: World, fault: PlannedFault) -> None:
        """Wait until it has happened, for at most `duration`."""
        worker = world.workers[fault.worker]
        begun = len(worker.generates)

        def comes(seen: Seen) -> bool:
            return seen.index >= begun and json.loads(seen.body).get("rid") != AUDITOR

        planned = Fault(PHASES[fault.kind], faults.KILL_WORKER, comes)
        worker.faults.add(planned)
        with trio.move_on_after(fault.duration):
            await worker.faults.fired(planned)
        worker.faults.revoke(planned)
        if not worker.faults.count(planned):
            raise Missed

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """Another process."""
        await world.workers[fault.worker].restart()
