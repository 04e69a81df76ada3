"""Whatever counts things in flight is back at 0 when all is over."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Finding
from dyn_testkit.history import History


def check(history: History) -> Iterator[Finding]:
    """Looks at the last sample, at names with `in_flight` or `lease` in them."""
    if not history.samples:
        return
    for name, value in history.samples[-1].values.items():
        if value and ("in_flight" in name or "lease" in name):
            yield Finding("run", "leases", f"{name} is {value:g} at the end")
