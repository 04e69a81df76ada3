"""When no affinity is worth its queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dyn_relay.fleet.policies.base import Ask
from dyn_relay.fleet.target import Target


@dataclass(frozen=True, slots=True)
class Guard:
    """Says which targets affinity may lead to.

    The thresholds are SMG's (64 and 1.5, both must be crossed), the rule is not: it gives up affinity for everybody
    when the busiest and the idlest are too far apart; here who is too far above the mean gets nothing more by it.
    """

    #: Answers more than the mean, and times the mean.
    absolute: int
    relative: float

    def open(self, candidates: Sequence[Target], ask: Ask) -> list[Target]:
        """The candidates that are not overloaded. For a resumed answer, none that has more than the mean to do.

        Resumed answers come in crowds, when a worker dies, and are known by what they share: they must not all follow
        it to one place.
        """
        mean = sum(target.load for target in candidates) / len(candidates)
        if ask.resumed:
            return [target for target in candidates if target.load <= mean]
        most = max(mean + self.absolute, mean * self.relative)
        return [target for target in candidates if target.load <= most]
