"""Workers are told to drop what nobody waits for, by the name they know; and an abort ends its request soon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dyn_testkit.checkers.base import ROUNDING, Finding, name_of, places
from dyn_testkit.history import History

#: Seconds within which an abort must have ended its request: it is repeated for 5 s, and a token may take its time.
SOON = 60.0
#: Ends of an attempt after which its worker may be at work on it still.
_GIVEN_UP = ("cut", "stall", "left", "moved")


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows, and workers that told what they were ordered.

    An order that comes when its request has ended is anybody's: a router need not know the name any more.
    """
    if not history.run.tapped:
        return
    yield from _left(history)
    yield from _told(history)
    yield from _aborted(history)


def _left(history: History) -> Iterator[Finding]:
    told = {(order.worker, order.rid) for order in history.orders}
    for row in history.rows:
        for attempt in row["attempts"]:
            place = (attempt["url"], attempt["rid"])
            given_up = attempt["cause"] in _GIVEN_UP and attempt["tokens"]
            if given_up and place not in told and not _deaf(history, row, attempt):
                what = f"{attempt['worker']} was never told to drop {attempt['rid']} ({attempt['cause']})"
                yield Finding(row["rid"], "orders", what)


def _told(history: History) -> Iterator[Finding]:
    rows = {attempt["rid"]: row for row in history.rows for attempt in row["attempts"]}
    for order in history.orders:
        row = rows.get(order.rid)
        if row is None or order.at >= _ended(history, row) - ROUNDING:
            continue
        if not any(order.worker in places(each) and each["rid"] == order.rid for each in row["attempts"]):
            yield Finding(order.rid, "orders", f"{order.worker} was told to drop it, and was never asked for it")


def _aborted(history: History) -> Iterator[Finding]:
    rows = {row["rid"]: row for row in history.rows}
    for record in history.records.values():
        row = rows.get(name_of(record))
        if record.aborted is None or row is None or not row["attempts"]:
            continue
        # What its client has yet to read may take longer.
        went_on = row["time"] - history.run.began + row["attempts"][-1]["ended"] - record.aborted
        if went_on > SOON:
            yield Finding(record.key, "orders", f"{row['rid']} went on for {went_on:.0f} s after its abort")


def _ended(history: History, row: Mapping[str, Any]) -> float:
    return float(row["time"] - history.run.began + row["duration"])


def _deaf(history: History, row: Mapping[str, Any], attempt: Mapping[str, Any]) -> bool:
    """Its worker cannot hear an order, or has no need of it: it was away at the end of the attempt."""
    end = row["time"] - history.run.began + attempt["ended"]
    return any(
        fault.target == attempt["url"]
        and "dials" in fault.harms
        and fault.at <= end + SOON
        and (fault.until is None or end <= fault.until + SOON)
        for fault in history.faults
    )
