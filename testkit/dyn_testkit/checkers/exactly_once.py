"""One trace row a request, its attempts one after the other, their tokens the client's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from dyn_testkit.checkers.base import Finding, name_of, places
from dyn_testkit.history import History


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows; a run without them is not judged."""
    if not history.run.traced:
        return
    rows = Counter(row["rid"] for row in history.rows)
    yield from _arrived(history)
    # Who left before any answer may have left before the router had read the request.
    reached = [record for record in history.records.values() if record.status]
    if not len(reached) <= len(history.rows) <= len(history.records):
        yield Finding("run", "exactly_once", f"{len(history.rows)} rows for {len(reached)} requests")
    for record in reached:
        name = name_of(record)
        if name and rows[name] != 1:
            yield Finding(record.key, "exactly_once", f"{rows[name]} rows")
    for row in history.rows:
        for one, two in pairwise(row["attempts"]):
            if one["ended"] > two["started"]:
                yield Finding(row["rid"], "exactly_once", f"attempts {one['number']} and {two['number']} overlap")
        given = sum(attempt["tokens"] for attempt in row["attempts"])
        if row["completion_tokens"] is not None and given != row["completion_tokens"]:
            yield Finding(row["rid"], "exactly_once", f"{row['completion_tokens']} tokens, attempts gave {given}")


def _arrived(history: History) -> Iterator[Finding]:
    """What workers saw is in the rows, and what gave tokens was seen: where, and how often."""
    if not history.run.tapped:
        return
    seen = Counter((arrival.worker, str(arrival.body.get("rid") or "")) for arrival in history.arrivals)
    listed = Counter(
        (url, attempt["rid"]) for row in history.rows for attempt in row["attempts"] for url in places(attempt)
    )
    gave = {(each["url"], each["rid"]) for row in history.rows for each in row["attempts"] if each["tokens"]}
    for place, count in seen.items():
        if place[1] and count > listed[place]:
            yield Finding("run", "exactly_once", f"{place[0]} saw {place[1]} {count} times, rows have {listed[place]}")
    for worker, rid in gave - seen.keys():
        if rid:
            yield Finding(rid, "exactly_once", f"{worker} is said to have had it, and never saw it")
