"""Any."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dyn_relay.fleet.worker import Worker


class Uniform:
    """Each with the same chance."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Sequence[Worker]) -> Worker:
        return self._rng.choice(candidates)
