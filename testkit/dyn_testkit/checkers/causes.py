"""No attempt fails by itself: each that did has a fault that explains it, also where its request came whole."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import INNOCENT, Finding, explained
from dyn_testkit.history import History


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows."""
    for row in history.rows:
        for attempt in row["attempts"]:
            if attempt["cause"] not in INNOCENT and not explained(history, row, attempt):
                what = f"attempt {attempt['number']} at {attempt['worker']} failed ({attempt['cause']})"
                yield Finding(row["rid"], "causes", f"{what} though nothing had befallen it")
