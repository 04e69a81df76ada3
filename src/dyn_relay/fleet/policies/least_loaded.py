"""The one with the least to do."""

from __future__ import annotations

from collections.abc import Sequence

from dyn_relay.fleet.policies.base import Ask, Policy
from dyn_relay.fleet.policies.round_robin import RoundRobin
from dyn_relay.fleet.target import Target


def burden(target: Target) -> tuple[int, int, int]:
    """What loads are compared by: live answers; among equals those of all ranks of its worker, then tokens held."""
    return target.load, target.worker.load, target.tokens


class LeastLoaded(Policy):
    """Least load; equals take turns, so that an idle fleet is used evenly."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, candidates: Sequence[Target], ask: Ask) -> Target:
        least = min(map(burden, candidates))
        return self._turns.choose([target for target in candidates if burden(target) == least], ask)
