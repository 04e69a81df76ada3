"""Each in turn."""

from __future__ import annotations

from collections.abc import Sequence

from dyn_relay.fleet.policies.base import Ask, Policy
from dyn_relay.fleet.target import Target


class RoundRobin(Policy):
    """The next one, in the order of joining, after the one chosen last. Stays fair while candidates come and go."""

    def __init__(self) -> None:
        self._last = (0, 0)

    def choose(self, candidates: Sequence[Target], ask: Ask) -> Target:
        target = next((target for target in candidates if target.order > self._last), candidates[0])
        self._last = target.order
        return target
