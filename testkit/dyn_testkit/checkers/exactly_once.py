"""One trace row a request, its attempts one after the other, their tokens the client's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from dyn_testkit.checkers.base import Finding, name_of
from dyn_testkit.history import History


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows; a run without them is not judged."""
    if not history.run.traced:
        return
    rows = Counter(row["rid"] for row in history.rows)
    seen = Counter(str(arrival.body["rid"]) for arrival in history.arrivals if arrival.body.get("rid"))
    yield from _unlisted(history)
    reached = [record for record in history.records.values() if record.status or record.left]
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
        for attempt in row["attempts"]:
            if seen[attempt["rid"]] > 1:
                yield Finding(row["rid"], "exactly_once", f"workers saw attempt {attempt['number']} more than once")
        given = sum(attempt["tokens"] for attempt in row["attempts"])
        if row["completion_tokens"] is not None and given != row["completion_tokens"]:
            yield Finding(row["rid"], "exactly_once", f"{row['completion_tokens']} tokens, attempts gave {given}")


def _unlisted(history: History) -> Iterator[Finding]:
    """What workers saw is in the rows."""
    listed = {attempt["rid"] for row in history.rows for attempt in row["attempts"]}
    for arrival in history.arrivals:
        if arrival.body.get("rid") and arrival.body["rid"] not in listed:
            yield Finding("run", "exactly_once", f"{arrival.worker} saw {arrival.body['rid']}, which is in no row")
