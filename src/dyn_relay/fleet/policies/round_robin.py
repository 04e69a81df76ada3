"""Each in turn."""

from __future__ import annotations

from collections.abc import Sequence

from dyn_relay.fleet.worker import Worker


class RoundRobin:
    """The next one, in the order of joining, after the one chosen last. Stays fair while candidates come and go."""

    def __init__(self) -> None:
        self._last = 0

    def choose(self, candidates: Sequence[Worker]) -> Worker:
        worker = next((worker for worker in candidates if worker.number > self._last), candidates[0])
        self._last = worker.number
        return worker
