"""A worker that has failed a request gets it again only when every other one has failed it, too."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Finding
from dyn_testkit.history import History

#: Ends of an attempt that say nothing about its worker: the request may stay.
_STAYS = (None, "left", "stale", "moved")


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows, and workers that stay the same."""
    workers = set(history.run.workers)
    if not workers:
        return
    for row in history.rows:
        excluded: set[str] = set()
        for attempt in row["attempts"]:
            if attempt["url"] in excluded and workers - excluded:
                others = ", ".join(sorted(workers - excluded))
                yield Finding(
                    row["rid"], "exclusion", f"attempt {attempt['number']} is {attempt['worker']}'s again, not {others}"
                )
            if not workers - excluded:
                excluded.clear()  # another lap
            if attempt["cause"] not in _STAYS:
                excluded.add(attempt["url"])
