"""Descriptors and memory do not grow with the number of requests that have ended."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Finding
from dyn_testkit.history import History

#: Open files at the end beyond those at the beginning: connections that idle pools keep.
MORE_FDS = 64
#: Resident memory at the end over that after a quarter of the run, when every pool has been filled once.
MORE_RSS = 1.25
#: Bytes that do not count: allocators keep some.
SLACK = 16 << 20


def check(history: History) -> Iterator[Finding]:
    """Looks at `fds` (a count) and `rss` (bytes) of samples, where there are any."""
    samples = history.samples
    fds = [sample.values["fds"] for sample in samples if "fds" in sample.values]
    if fds and fds[-1] > fds[0] + MORE_FDS:
        yield Finding("run", "leak", f"{fds[-1]:.0f} descriptors at the end, {fds[0]:.0f} at the beginning")
    rss = [sample.values["rss"] for sample in samples if "rss" in sample.values]
    if len(rss) >= 4:
        early, late = rss[len(rss) // 4], rss[-1]
        if late > early * MORE_RSS + SLACK:
            yield Finding("run", "leak", f"{late / 1e6:.0f} MB at the end, {early / 1e6:.0f} MB after a quarter")
