"""The circuit breaker of one worker: how often in a row requests may fail there until it is left alone for a while.

A dead worker's hundred streams are one incident, since only the first of them finds it ready; a busy answer and a
client's mistake are none. The states that it leads to are in `worker.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dyn_relay.fleet.target import Lease


@dataclass(slots=True)
class Breaker:
    """Counts. The thresholds are --cb-failure-threshold (0: it never opens) and --cb-success-threshold."""

    failure_threshold: int = 0
    success_threshold: int = 1
    #: Incidents since an attempt last ended well.
    incidents: int = 0
    #: Attempts that ended well since it was half open.
    passed: int = 0
    #: The one attempt that a half-open worker was given last.
    trial: Lease | None = None

    def incident(self) -> bool:
        """Count one; True if it opens."""
        self.incidents += 1
        return 0 < self.failure_threshold <= self.incidents

    def success(self) -> bool:
        """Count an attempt that ended well; True if it closes, should it be half open."""
        self.incidents = 0
        self.passed += 1
        return self.passed >= self.success_threshold

    def clear(self) -> None:
        """Begin anew: its trials begin, or it is another process."""
        self.incidents = self.passed = 0
        self.trial = None

    @property
    def trying(self) -> bool:
        """A trial is under way."""
        return self.trial is not None and self.trial.held
