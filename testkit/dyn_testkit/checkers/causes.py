"""No attempt fails by itself: each that did has a fault that explains it, also where its request came whole."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import INNOCENT, Finding, explained, name_of
from dyn_testkit.history import History


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows."""
    aborted = {name_of(record) for record in history.records.values() if record.aborted is not None}
    for row in history.rows:
        for attempt in row["attempts"]:
            if attempt["cause"] in ("failed", "interrupted") and history.run.prefills and row["rid"] in aborted:
                continue  # a leg that is aborted while it waits for the other one says 500 (SGLang 0.5.23)
            if attempt["cause"] not in INNOCENT and not explained(history, row, attempt):
                what = f"attempt {attempt['number']} at {attempt['worker']} failed ({attempt['cause']})"
                yield Finding(row["rid"], "causes", f"{what} though nothing had befallen it")
