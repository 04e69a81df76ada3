"""The better of two."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dyn_relay.fleet.worker import Worker


class PowerOfTwo:
    """Two different ones by chance, then the one with less load: near the best balance without a herd on one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Sequence[Worker]) -> Worker:
        pair = self._rng.sample(candidates, min(2, len(candidates)))
        return min(pair, key=lambda worker: worker.load)
