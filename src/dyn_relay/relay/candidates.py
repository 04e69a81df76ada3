"""Which workers may get the next attempt of a request, as far as they and its format are concerned."""

from __future__ import annotations

from collections.abc import Collection

from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.target import Target
from dyn_relay.fleet.worker import Role, State, Worker
from dyn_relay.formats.base import Exchange
from dyn_relay.relay.record import RequestRecord


class Candidates:
    """The fleet's workers of one part, as one request sees them."""

    def __init__(
        self,
        fleet: Fleet,
        exchange: Exchange,
        record: RequestRecord,
        role: Role,
        prefills: Candidates | None = None,
    ) -> None:
        """`prefills`: those one of which is to be beside the one that is chosen."""
        self._fleet = fleet
        self._role = role
        self._exchange = exchange
        self._record = record
        self._prefills = prefills
        #: The decode worker that was chosen, beside which one is chosen now.
        self.decode: Worker | None = None

    def may_take(self, worker: Worker) -> bool:
        """The first attempt may go to any of them, of a pair to any two that fit."""
        if worker.part is not self._role or self._odd(worker):
            return False
        return not self._record.started_work or not self._exchange.unfit(worker.traits)

    def _odd(self, worker: Worker) -> str:
        """Why it can be no pair, with the decode worker or with any prefill worker; "" if it can."""
        if self.decode is not None:
            return self._exchange.mismatch(self.decode.traits, worker.traits)
        reason = ""
        for prefill in self._prefills._members if self._prefills is not None else ():
            reason = self._exchange.mismatch(worker.traits, prefill.traits)
            if not reason:
                break
        return reason

    def has_all(self, worker: Worker) -> bool:
        """It may take it, and has what the request asks for."""
        return worker.part is self._role and not self._exchange.lacks(worker.traits) and self.may_take(worker)

    @property
    def some_has_all(self) -> bool:
        """Such a worker is in the fleet. While it is, no other one's answer will do, though it be busy or dead."""
        return any(map(self.has_all, self._fleet.staying))

    def rank(self, target: Target) -> int | None:
        """The rank that an attempt at the target names.

        None if its client asks for one that nobody has: the first attempt says so, for the engine to refuse.
        """
        pinned = self._exchange.pinned
        if pinned is None or self._record.started_work:
            return target.rank
        known = any(one.rank == pinned for worker in self._members for one in worker.targets)
        return target.rank if known else None

    def has_room(self, excluded: Collection[str]) -> bool:
        """A worker that is well could take it now."""
        return self._fleet.has_room(excluded, self.has_all if self.some_has_all else self.may_take)

    def left(self, excluded: Collection[str]) -> list[Worker]:
        """Those that the request has not failed with."""
        return [worker for worker in self._members if worker.id not in excluded]

    @property
    def _members(self) -> list[Worker]:
        return [worker for worker in self._fleet.staying if worker.part is self._role]

    @property
    def dead(self) -> bool:
        """None of them answers, as far as is known, or there is none."""
        return all(worker.state is State.DEAD or worker.misplaced for worker in self._members)

    def unfit(self, excluded: Collection[str]) -> dict[str, str]:
        """Of those, the ones that are passed over, by id, and why."""
        begun, unfit, lacks = self._record.started_work, self._exchange.unfit, self._exchange.lacks
        left = self.left(excluded)
        reasons = {one.id: self._odd(one) or (begun and unfit(one.traits)) or lacks(one.traits) for one in left}
        return {name: reason for name, reason in reasons.items() if reason}
