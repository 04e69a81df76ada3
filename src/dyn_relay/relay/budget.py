"""Whether and how often a logical request may try again: an immutable value, a new one after each failure."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from dyn_relay.config import Config
from dyn_relay.formats.base import Verdict
from dyn_relay.relay.failure import Failure, Kind

#: Seconds between a second loss and the next attempt, doubled for each further one up to the cap.
BACKOFF_BASE = 0.05
BACKOFF_CAP = 2.0
#: As many as can make a difference.
_DOUBLINGS = 20


def limited(verdict: Verdict, config: Config, tokens: int, size: int) -> Verdict:
    """A format's verdict on a prompt of `tokens` tokens in `size` bytes, within the limits that the proxy sets."""
    if verdict.migratable and not config.migration_limit:
        return Verdict("migration_limit")
    if verdict.migratable and too_long(config, tokens):
        return Verdict("migration_max_seq_len")
    if verdict.migratable and config.replay_buffer_max is not None and size > config.replay_buffer_max:
        return Verdict("replay_buffer_max")
    return verdict


def too_long(config: Config, tokens: int) -> bool:
    """Is a sequence of so many tokens longer than what may be continued?"""
    return config.migration_max_seq_len is not None and tokens > config.migration_max_seq_len


@dataclass(frozen=True, slots=True)
class AttemptBudget:
    """What is left of a request's tries.

    `migrations` failures that count (an attempt that reached its worker and was lost) may be survived; busy workers and
    refused connections cost none of them. Every failure excludes its worker for this request at once. When every worker
    is excluded, one more lap over all of them is allowed; a failure that counts allows another one, since those are
    bounded by `migrations` already.
    """

    migrations: int
    excluded: frozenset[str] = frozenset()
    laps: int = 1
    spent: bool = False
    history: tuple[Failure, ...] = ()

    def after(self, failure: Failure) -> AttemptBudget:
        """The budget once `failure` has happened; `spent` if it cannot be survived."""
        counts, avoided = failure.rule.counts, {failure.worker, failure.beside} - {""}
        return replace(
            self,
            migrations=max(0, self.migrations - counts),
            excluded=self.excluded | avoided if failure.rule.avoids else self.excluded,
            laps=1 if counts else self.laps,
            spent=counts and self.migrations == 0,
            history=(*self.history, failure),
        )

    def lap(self) -> AttemptBudget | None:
        """Every worker is excluded: the budget for one more lap over all of them, or None if there is none."""
        if self.laps == 0 or not self.excluded:
            return None
        return replace(self, laps=self.laps - 1, excluded=frozenset())

    @property
    def barred(self) -> frozenset[str]:
        """Those that no further lap would bring back."""
        return frozenset() if self.laps else self.excluded

    @property
    def moved(self) -> bool:
        """We have taken the request from a worker that would have answered it."""
        return any(failure.kind is Kind.MOVED for failure in self.history)

    @property
    def busy(self) -> bool:
        """Since the last failure that counts, some worker has said that it lives and is busy."""
        for failure in reversed(self.history):
            if failure.kind is Kind.BUSY:
                return True
            if failure.rule.counts:
                return False
        return False

    def again(self) -> AttemptBudget:
        """Every worker is excluded, but some are only busy: the budget for yet another lap."""
        return replace(self, excluded=frozenset())

    def backoff(self, rng: random.Random) -> float:
        """Seconds to wait before the next attempt, jittered.

        0 after the first loss: the client's stream is silent meanwhile, and that a dead worker's streams do not bury
        the next one is the permits' affair (`recovery.py`). Who is lost again may be what goes wrong. 0 also after a
        worker that has not got the request, or not taken it: another one may, now. Who has asked all of them waits
        before the next lap.
        """
        losses = sum(failure.rule.counts for failure in self.history)
        if losses < 2 or not self.history[-1].rule.counts:
            return 0.0
        return min(BACKOFF_CAP, BACKOFF_BASE * 2.0 ** min(losses - 2, _DOUBLINGS)) * rng.uniform(0.5, 1.5)
