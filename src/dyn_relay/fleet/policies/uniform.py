"""Any."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dyn_relay.fleet.policies.base import Ask, Policy
from dyn_relay.fleet.target import Target


class Uniform(Policy):
    """Each with the same chance."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, candidates: Sequence[Target], ask: Ask) -> Target:
        return self._rng.choice(candidates)
