"""Cuts answers at chosen places, once or again and again, or says something else in their place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import trio

from dyn_testkit import faults
from dyn_testkit.faults import Fault, Seen, What, Where
from dyn_testkit.simulation.nemeses.base import AUDITOR, Missed

if TYPE_CHECKING:
    from dyn_testkit.simulation.scenario import PlannedFault
    from dyn_testkit.simulation.world import World
    from dyn_testkit.worker import MockWorker

_ENDS = (faults.RESET, faults.CLOSE)
_EARLY = (
    faults.AT_HEAD,
    faults.at_token(0),
    faults.at_token(1),
    faults.at_token(7),
    faults.inside_chunk_size(3),
    faults.inside_json(5, 30),
)
_LATE = (
    faults.at_token(-1),
    faults.AFTER_LAST_TOKEN,
    faults.AFTER_FINISH,
    faults.BEFORE_LAST_CHUNK,
    faults.AFTER_DONE,
)

#: What may come of an answer, by kind: every place of it, and what happens there. Few would find its end by chance.
CUTS: Mapping[str, Sequence[tuple[Where, What]]] = {
    "cut": list(product(_EARLY, _ENDS)),
    "late_cut": list(product(_LATE, _ENDS)),
    "error": [
        (faults.AT_HEAD, faults.status(500)),
        (faults.AT_HEAD, faults.status(503)),
        (faults.at_token(0), faults.abort_event(500)),
        (faults.at_token(3), faults.abort_event(500)),
        (faults.at_token(3), faults.abort_event(503)),
    ],
    "garbage": [
        (faults.AT_HEAD, faults.GARBAGE),
        (faults.AT_HEAD, faults.EMPTY_200),
        (faults.at_token(2), faults.GARBAGE),
        (faults.inside_chunk_size(3), faults.GARBAGE),
        (faults.inside_json(4, 20), faults.GARBAGE),
    ],
    "call": [
        *product(
            (faults.AT_HEAD, faults.at_token(0), faults.at_token(3), faults.AFTER_LAST_TOKEN),
            (faults.goaway(11), faults.rst_stream(2), faults.grpc_status(14), faults.NO_TRAILERS),
        ),
        (faults.AT_HEAD, faults.rst_stream(7)),
        (faults.AT_HEAD, faults.UNPROCESSED),
        (faults.at_token(2), faults.DRAIN),
        *product(
            (faults.at_token(2), faults.at_token(7)),
            (faults.BAD_LENGTH, faults.TRUNCATED, faults.COMPRESSED, faults.NOT_PROTOBUF),
        ),
    ],
}
#: Of these, what only a call over gRPC comes to.
OF_CALLS = frozenset({"call"})

#: Where one request is cut again and again, and how often.
_BITES = (faults.at_token(1), faults.at_token(3), faults.at_token(0), faults.inside_json(2, 30), faults.at_token(6))
_LEAST_BITES, _MOST_BITES = 2, 6
#: Seconds between two looks whether it is over.
LOOK = 5.0


def _audits(body: Mapping[str, Any]) -> bool:
    """The generation is none of a client's."""
    return body.get("rid") == AUDITOR


class Cut:
    """Cuts the next answer of a worker, or says something else in its place, as `choice` gives."""

    faults = frozenset(CUTS)

    async def setup(self, world: World) -> None:
        """Nothing."""

    async def invoke(self, world: World, fault: PlannedFault) -> None:
        """Wait until it has happened, for at most `duration`."""
        worker = world.workers[fault.worker]
        where, what = CUTS[fault.kind][int(fault.choice * len(CUTS[fault.kind]))]
        begun = len(worker.generates)

        def fits(body: Mapping[str, Any]) -> bool:
            # Stock SGLang sends an EOS together with its finish: there is no place between them.
            ends_by_budget = body["sampling_params"].get("ignore_eos") is True
            return not _audits(body) and (ends_by_budget or where is not faults.AFTER_LAST_TOKEN)

        def following(seen: Seen) -> bool:
            since = [recorded.json() for recorded in worker.generates[begun : seen.index + 1]]
            return bool(since) and fits(since[-1]) and not any(map(fits, since[:-1]))

        planned = Fault(where, what, following)
        worker.faults.add(planned)
        with trio.move_on_after(fault.duration):
            await worker.faults.fired(planned)
        if not worker.faults.count(planned):
            worker.faults.revoke(planned)
            raise Missed

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """Nothing: it is over."""


class Hound:
    """Cuts one request again and again, wherever it goes."""

    faults = frozenset({"hound"})

    async def setup(self, world: World) -> None:
        """Nothing."""

    async def invoke(self, world: World, fault: PlannedFault) -> None:
        """The next request that any worker reads, for at most `duration`."""
        bites = _LEAST_BITES + int(fault.choice * (_MOST_BITES - _LEAST_BITES + 1))
        prey: list[list[int]] = []
        laid: list[tuple[MockWorker, Fault]] = []

        def bitten() -> int:
            return sum(worker.faults.count(planned) for worker, planned in laid)

        def is_prey(seen: Seen) -> bool:
            body = json.loads(seen.body)
            if _audits(body) or bitten() >= bites:
                return False
            if not prey:
                prey.append(body["input_ids"])
            return bool(body["input_ids"][: len(prey[0])] == prey[0])

        for number, worker in enumerate(world.workers):
            planned = Fault(_BITES[(number + bites) % len(_BITES)], faults.RESET, is_prey)
            worker.faults.add(planned)
            laid.append((worker, planned))
        with trio.move_on_after(fault.duration):
            while bitten() < bites:  # noqa: ASYNC110 - whichever worker it is
                await trio.sleep(LOOK)
        for worker, planned in laid:
            worker.faults.revoke(planned)
        if not bitten():
            raise Missed
        world.befell(fault, [number for number, (worker, planned) in enumerate(laid) if worker.faults.count(planned)])

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """Nothing: it is over."""
