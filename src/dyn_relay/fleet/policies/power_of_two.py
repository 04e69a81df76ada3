"""The better of two."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dyn_relay.fleet.policies.base import Ask, Policy
from dyn_relay.fleet.policies.least_loaded import burden
from dyn_relay.fleet.target import Target


class PowerOfTwo(Policy):
    """Two different ones by chance, then the one with less load: near the best balance without a herd on one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Sequence[Target], ask: Ask) -> Target:
        return min(self._rng.sample(candidates, min(2, len(candidates))), key=burden)
