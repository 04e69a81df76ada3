"""The one with the fewest live generations."""

from __future__ import annotations

from collections.abc import Sequence

from dyn_relay.fleet.policies.round_robin import RoundRobin
from dyn_relay.fleet.worker import Worker


class LeastLoaded:
    """Least load; equals take turns, so that an idle fleet is used evenly."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, candidates: Sequence[Worker]) -> Worker:
        least = min(worker.load for worker in candidates)
        return self._turns.choose([worker for worker in candidates if worker.load == least])
