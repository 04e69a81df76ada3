"""What a policy is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dyn_relay.fleet.worker import Worker


class Policy(Protocol):
    """Chooses among workers that may all take the attempt."""

    def choose(self, candidates: Sequence[Worker]) -> Worker:
        """One of `candidates`, which is never empty and is in the order of joining."""
