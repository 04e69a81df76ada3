"""A request is rescued as often as is allowed, and no more."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Finding
from dyn_testkit.history import History

#: Ends of an attempt that use up one of the migrations: its worker may have been at work on it.
_COUNTED = frozenset({"cut", "stall", "first_token", "interrupted", "failed", "garbage"})
#: Ends that say nothing about the next try: a worker that is busy, or is to be empty, may be asked again and again.
_FREE = frozenset({"busy", "stale", "moved"})


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows, the limit, and workers that stay the same."""
    limit, workers = history.run.migration_limit, len(history.run.workers) + len(history.run.prefills)
    if limit is None or not workers:
        return
    for row in history.rows:
        rescues = sum(attempt["cause"] in _COUNTED for attempt in row["attempts"][:-1])
        if rescues > limit:
            yield Finding(row["rid"], "limit", f"{rescues} lost attempts were followed by another, {limit} may be")
        laps = 0
        for attempt in row["attempts"]:
            laps = 0 if attempt["cause"] in _COUNTED or attempt["cause"] in _FREE else laps + 1
            if laps > 2 * workers:
                yield Finding(row["rid"], "limit", f"{laps} tries in a row, of {workers} workers")
                break
