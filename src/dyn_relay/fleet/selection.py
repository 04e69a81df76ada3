"""Who may get the next attempt, and which of them does: the best workers there are, and their policy's choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from dyn_relay.fleet.keeper import Keeper
from dyn_relay.fleet.policies.base import Ask, Policy
from dyn_relay.fleet.rejoin import Standing
from dyn_relay.fleet.target import Target
from dyn_relay.fleet.worker import TIER, TIERS, Role, State, Worker

#: Seconds between two counts of the tokens that live answers hold.
RECOUNT = 1.0


class Selection:
    """Among `workers`, by id; `clock` gives seconds."""

    def __init__(
        self,
        workers: Mapping[str, Worker],
        policies: Mapping[Role, Policy],
        keeper: Keeper,
        clock: Callable[[], float],
    ) -> None:
        self._workers = workers
        self._policies = policies
        self._keeper = keeper
        self._clock = clock
        self._recounted = -math.inf

    def has_room(self, exclude: Collection[str], accept: Callable[[Worker], bool]) -> bool:
        """Is there a target at a worker that is well, which is not excluded, and accepted?"""
        for worker in self._workers.values():
            well = worker.state is State.READY and worker.standing is not Standing.AWAY
            well = well and not (worker.locked or worker.misplaced)
            usable = well and worker.id not in exclude and accept(worker)
            if usable and any(target.id not in exclude for target in worker.targets):
                return True
        return False

    def candidates(self, exclude: Collection[str], accept: Callable[[Worker], bool], ask: Ask) -> list[Worker]:
        """The best ones of those that are not excluded, and accepted: all of the first of `TIERS` that has any."""
        usable = [w for w in self._workers.values() if not w.misplaced and accept(w)]
        if exclude:
            usable = [w for w in usable if w.id not in exclude and any(one.id not in exclude for one in w.targets)]
        usable = [worker for worker in usable if not worker.locked] or usable
        found: list[list[Worker]] = [[] for _ in TIERS]
        ready, known, first = State.READY, Standing.KNOWN, found[0]  # by name: it is every request's path
        for worker in usable:
            if worker.state is ready and worker.standing is known:
                first.append(worker)
                continue
            self._keeper.pass_time(worker)
            tier = self._tier(worker, ask)
            if tier is not None:
                found[tier].append(worker)
        return next(filter(None, found), [])

    def choose(self, workers: Sequence[Worker], exclude: Collection[str], ask: Ask) -> Target | None:
        """The policy's choice among their targets that are not excluded; None if there are none."""
        now = self._clock()
        targets = [target for worker in workers for target in worker.targets if target.id not in exclude]
        if ask.rank is not None:
            targets = [target for target in targets if target.rank == ask.rank] or targets
        targets = [target for target in targets if not target.full(now)] or targets
        if not targets:
            return None
        if now - self._recounted >= RECOUNT:
            self._recounted = now
            for worker in self._workers.values():
                worker.recount()
        return self._policies[targets[0].worker.part].choose(targets, ask)

    def _tier(self, worker: Worker, ask: Ask) -> int | None:
        """Its place in `TIERS`; None if it gets nothing."""
        if worker.standing is Standing.AWAY:
            return None
        if worker.state is State.HALF_OPEN and not (ask.resumed or worker.breaker.trying or worker.full(self._clock())):
            return 0
        return TIER.get(worker.state)
