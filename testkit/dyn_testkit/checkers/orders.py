"""Workers are told to drop what nobody waits for, by the name they know; and an abort ends its request soon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dyn_testkit.checkers.base import Finding, name_of
from dyn_testkit.history import History

#: Seconds within which an abort must have ended its request: it is repeated for 5 s, and a token may take its time.
SOON = 60.0
#: Ends of an attempt after which its worker may be at work on it still.
_GIVEN_UP = ("cut", "stall", "left")


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows, and workers that told what they were ordered."""
    if not history.run.tapped:
        return
    told = {(order.worker, order.rid) for order in history.orders}
    for row in history.rows:
        for attempt in row["attempts"]:
            place = (attempt["url"], attempt["rid"])
            given_up = attempt["cause"] in _GIVEN_UP and attempt["tokens"]
            if given_up and place not in told and not _ill(history, row, attempt):
                what = f"{attempt['worker']} was never told to drop {attempt['rid']} ({attempt['cause']})"
                yield Finding(row["rid"], "orders", what)
    places = {(attempt["url"], attempt["rid"]) for row in history.rows for attempt in row["attempts"]}
    named = {rid for _, rid in places}
    for order in history.orders:
        if order.rid in named and (order.worker, order.rid) not in places:
            yield Finding(order.rid, "orders", f"{order.worker} was told to drop it, and was never asked for it")
    for record in history.records.values():
        if record.aborted is not None and record.ended > record.aborted + SOON:
            what = f"{name_of(record)} went on for {record.ended - record.aborted:.0f} s after its abort"
            yield Finding(record.key, "orders", what)


def _ill(history: History, row: Mapping[str, Any], attempt: Mapping[str, Any]) -> bool:
    """Its worker cannot hear an order, or has no need of it: it was away at the end of the attempt."""
    end = row["time"] - history.run.began + attempt["ended"]
    return any(
        fault.target == attempt["url"]
        and "dials" in fault.harms
        and fault.at <= end + SOON
        and (fault.until is None or end <= fault.until + SOON)
        for fault in history.faults
    )
