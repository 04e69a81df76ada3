"""A worker that is known to be ill gets nothing new while another one is well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dyn_testkit.checkers.base import INNOCENT, ROUNDING, Finding
from dyn_testkit.history import Fault, History

#: Seconds in which the workers of one fault fall, and come back, one after the other.
SETTLING = 10.0


class _Dispatch(NamedTuple):
    """One attempt, in the run's time."""

    began: float
    ended: float
    failed: bool
    rid: str
    number: int
    #: The workers that the request had been at before.
    tried: frozenset[str]


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows, its time to notice, and workers that stay the same.

    A worker is known to be ill once its health has been bad for long enough, and for a while after it failed a request
    that it had not been told to end.
    """
    notice, inhibited = history.run.notice, history.run.inhibited
    if notice is None:
        return
    for fault in history.faults:
        if "health" not in fault.harms or fault.until is None:
            continue
        sent = list(_dispatches(history, fault.target))
        failures = [one.ended for one in sent if one.failed and fault.at + SETTLING <= one.ended]
        for one in sent:
            known = one.began > fault.at + notice or any(ROUNDING < one.began - at < inhibited for at in failures)
            well = _well(history, one) - {fault.target}
            if known and fault.at < one.began < fault.until - SETTLING and well:
                what = (
                    f"attempt {one.number} went to {fault.target}, {one.began - fault.at:.0f} s into its {fault.kind}"
                )
                yield Finding(one.rid, "avoidance", f"{what}, not to {min(well)}")


def _dispatches(history: History, worker: str) -> Iterator[_Dispatch]:
    told = {order.rid for order in history.orders if order.worker == worker}
    for row in history.rows:
        since = row["time"] - history.run.began
        for attempt in row["attempts"]:
            if attempt["url"] == worker:
                tried = frozenset(each["url"] for each in row["attempts"][: attempt["number"]])
                began, ended = since + attempt["started"], since + attempt["ended"]
                failed = attempt["cause"] not in INNOCENT and attempt["rid"] not in told
                yield _Dispatch(began, ended, failed, row["rid"], attempt["number"], tried)


def _well(history: History, one: _Dispatch) -> set[str]:
    """The workers that nothing has befallen for long enough, without those that the request has been at."""
    notice = history.run.notice or 0.0
    ill = {fault.target for fault in history.faults if "attempts" in fault.harms and _near(fault, one.began, notice)}
    return set(history.run.workers) - ill - one.tried


def _near(fault: Fault, when: float, notice: float) -> bool:
    return fault.at <= when + ROUNDING and (fault.until is None or when <= fault.until + notice)
