"""How each kind of fault is seen from the outside: by an auditor who dials and asks, as anybody could."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import trio

from dyn_relay.net import ConnectFailed, Network
from dyn_relay.sidecar.door import OWN
from dyn_testkit.checkers.base import ROUNDING
from dyn_testkit.client import Response, fetch
from dyn_testkit.simulation.nemeses.base import AUDITOR, Proof
from dyn_testkit.simulation.nemeses.cuts import CUTS
from dyn_testkit.simulation.nemeses.legs import PHASES
from dyn_testkit.simulation.nemeses.workers import SLOW

if TYPE_CHECKING:
    from dyn_testkit.simulation.scenario import PlannedFault
    from dyn_testkit.simulation.world import World
    from dyn_testkit.worker import MockWorker

#: Seconds after which a silent server is taken for one that will not answer.
PATIENCE = 2.0
#: A generation that no client of a run asks for.
_ASKED = {"rid": AUDITOR, "input_ids": [1, 1, 1], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}


async def _ask(
    network: Network, whom: MockWorker | str, path: str, body: object = None, within: float = PATIENCE
) -> object:
    """The answer, `whom` being a worker or a URL; or "refused", or "silent" if nothing comes in time."""
    url = whom if isinstance(whom, str) else whom.url
    with trio.move_on_after(within):
        try:
            return await fetch(network, url, path, body)
        except ConnectFailed:
            return "refused"
    return "silent"


def _worker(world: World, fault: PlannedFault) -> MockWorker:
    return world.workers[fault.worker]


async def _refused(world: World, fault: PlannedFault) -> str:
    refused = await _ask(world.auditor, _worker(world, fault), "/health") == "refused"
    return "its dials are refused" if refused else ""


async def _all_but_one_refused(world: World, fault: PlannedFault) -> str:
    struck = world.struck_workers(fault)
    for number in struck:
        if await _ask(world.auditor, world.workers[number], "/health") != "refused":
            return ""
    return f"{len(struck)} workers refuse dials"


async def _health_silent(world: World, fault: PlannedFault) -> str:
    silent = await _ask(world.auditor, _worker(world, fault), "/health") == "silent"
    return "its /health does not answer" if silent else ""


async def _lies(world: World, fault: PlannedFault) -> str:
    worker = _worker(world, fault)
    health = await _ask(world.auditor, worker, "/health")
    generated = await _ask(world.auditor, worker, "/generate", _ASKED, within=2 * worker.options.tick + PATIENCE)
    lies = isinstance(health, Response) and health.status == 200 and generated == "silent"
    return "its /health is 200, and it generates nothing" if lies else ""


async def _slow(world: World, fault: PlannedFault) -> str:
    worker = _worker(world, fault)
    wanted = worker.options.tick * SLOW
    began = trio.current_time()
    answer = await _ask(world.auditor, worker, "/generate", _ASKED, within=2 * wanted + PATIENCE)
    took = trio.current_time() - began
    slow = isinstance(answer, Response) and took >= wanted - ROUNDING
    return f"a token takes {took:.1f} s" if slow else ""


async def _busy(world: World, fault: PlannedFault) -> str:
    answer = await _ask(world.auditor, _worker(world, fault), "/generate", _ASKED)
    return "its queue is full" if isinstance(answer, Response) and answer.status == 503 else ""


async def _draining(world: World, fault: PlannedFault) -> str:
    answer = await _ask(world.auditor, _worker(world, fault), "/health")
    return "its /health is 503" if isinstance(answer, Response) and answer.status == 503 else ""


async def _weights(world: World, fault: PlannedFault) -> str:
    answer = await _ask(world.auditor, _worker(world, fault), "/model_info")
    version = answer.json().get("weight_version") if isinstance(answer, Response) and answer.status == 200 else None
    return f"its weights are {version}" if version == world.versions[fault.worker] else ""


async def _unreachable(world: World, fault: PlannedFault) -> str:
    silent = await _ask(world.from_router, world.door(fault.worker), "/health") == "silent"
    return "the router cannot reach it" if silent else ""


async def _turned_away(world: World, fault: PlannedFault) -> str:
    refused = await _ask(world.auditor, world.door(fault.worker), "/health") == "refused"
    return "dials where the router reaches it are refused" if refused else ""


async def _alone(world: World, fault: PlannedFault) -> str:
    """The engine answers by itself; what its sidecar does is seen where the router looks for it."""
    answers = isinstance(await _ask(world.auditor, _worker(world, fault), "/health"), Response)
    beside = await _ask(world.auditor, world.door(fault.worker), OWN)
    return f"its engine is well, its sidecar is {beside}" if answers and not isinstance(beside, Response) else ""


async def _severed(world: World, fault: PlannedFault) -> str:
    answers = isinstance(await _ask(world.auditor, _worker(world, fault), "/health"), Response)
    beside = await _ask(world.auditor, world.door(fault.worker), OWN)
    through = await _ask(world.auditor, world.door(fault.worker), "/health")
    severed = answers and isinstance(beside, Response) and not _well(through)
    return "its engine is well, its sidecar answers, and nothing comes through" if severed else ""


def _well(answer: object) -> bool:
    return isinstance(answer, Response) and answer.status == 200


async def _struck(world: World, fault: PlannedFault) -> str:
    """What is over at once leaves no trace but its own note."""
    return "it struck" if fault in world.struck else ""


async def _cut(world: World, fault: PlannedFault) -> str:
    """The worker notes each fault of an answer at the moment it happens; `Cut` has waited for that."""
    firings = _worker(world, fault).faults.firings
    return f"{firings[-1].fault} happened" if firings else ""


async def _bitten(world: World, fault: PlannedFault) -> str:
    """The same, of every worker that its prey has come to."""
    struck = world.struck_workers(fault)
    return (
        f"{len(struck)} workers cut one request" if all(world.workers[each].faults.firings for each in struck) else ""
    )


PROOFS: Mapping[str, Proof] = {
    "kill": _refused,
    "swizzle": _all_but_one_refused,
    "upgrade": _refused,
    **dict.fromkeys(PHASES, _refused),
    "stall": _health_silent,
    "lie": _lies,
    "slow": _slow,
    "busy": _busy,
    "drain": _draining,
    "weights": _weights,
    **dict.fromkeys(CUTS, _cut),
    "hound": _bitten,
    "partition": _unreachable,
    "hang": _unreachable,
    "deaf": _unreachable,
    "refuse": _turned_away,
    "kill_sidecar": _alone,
    "stall_sidecar": _alone,
    "sever": _severed,
    "reset": _struck,
    "leave": _struck,
    "dawdle": _struck,
    "abort_storm": _struck,
}
