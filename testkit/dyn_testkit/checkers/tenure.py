"""Nobody is asked who has no lease; nobody is without one for longer than what befell it explains, or has one dead.

A worker has a lease from when the router reads that it takes one until that is given back, or was not renewed for as
long as it lasts. Workers of which no lease was ever told have none to lose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dyn_testkit.checkers.base import ROUNDING, Finding
from dyn_testkit.history import Fault, History, Lease

#: Seconds within which a sidecar whose engine, network and own process are well has its engine registered again: it
#: has noticed (a dial that hung is given up, the engine looked at), and one renewal was repeated.
BACK = 20.0
#: Seconds within which the lease of an engine that has died is given back; those of one fault die, and come back, one
#: after the other.
GONE = 15.0
#: Seconds from a sample's time in which the router's list, on its way, may have been read.
SEEN = 1.0
#: Prefixes of a sample's names: 1 if the router says of the worker that it may get requests, or lists it at all.
WELL, LISTED = "well ", "listed "
_ILL = frozenset({"lease", "attempts", "health", "answers", "dials"})


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when a worker had a lease without interruption."""

    since: float
    until: float
    given_back: bool = False

    def __contains__(self, when: float) -> bool:
        return self.since - ROUNDING <= when <= self.until + ROUNDING


def held(leases: Iterable[Lease]) -> dict[str, list[Span]]:
    """By worker, in order."""
    spans: dict[str, list[Span]] = {}
    for lease in leases:
        mine = spans.setdefault(lease.worker, [])
        last = mine[-1] if mine and lease.at in mine[-1] and not mine[-1].given_back else None
        if last is not None:
            mine[-1] = Span(last.since, lease.at + lease.seconds, given_back=not lease.seconds)
        elif lease.seconds:
            mine.append(Span(lease.at, lease.at + lease.seconds))
    return spans


def there(spans: Mapping[str, list[Span]], worker: str, when: float) -> bool:
    """It had a lease, or never needs one."""
    return worker not in spans or any(when in span for span in spans[worker])


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows, and what it was told of leases."""
    spans = held(history.leases)
    for row in history.rows:
        for attempt in row["attempts"]:
            began = row["time"] - history.run.began + attempt["started"]
            if not there(spans, attempt["url"], began):
                what = f"attempt {attempt['number']} went to {attempt['url']} at {began:.1f} s, which had no lease then"
                yield Finding(row["rid"], "tenure", what)
    for worker, mine in spans.items():
        faults = [fault for fault in history.faults if fault.target == worker]
        lasts = max(lease.seconds for lease in history.leases if lease.worker == worker)
        yield from _absences(worker, mine, faults, lasts, history)
        yield from _ghosts(worker, mine, faults)
        yield from _shown(worker, mine, faults, history)


def _absences(worker: str, spans: list[Span], faults: list[Fault], lasts: float, history: History) -> Iterator[Finding]:
    end = history.samples[-1].at if history.samples else spans[-1].until
    for before, after in zip(spans, [*(span.since for span in spans[1:]), end], strict=True):
        if after <= before.until:
            continue
        if not any(_takes_it(fault, before, lasts) for fault in faults):
            yield Finding("run", "tenure", f"{worker} had no lease from {before.until:.1f} s on, and nothing took it")
        late = after - _well_since(faults, before.until, after)
        if late > BACK:
            yield Finding("run", "tenure", f"{worker} was well for {late:.1f} s without a lease, at {after:.1f} s")


def _shown(worker: str, spans: list[Span], faults: list[Fault], history: History) -> Iterator[Finding]:
    """Does the router's list say the same?"""
    notice = BACK + (history.run.notice or 0.0)
    for sample in history.samples:
        mine = [span for span in spans if span.since <= sample.at + SEEN and sample.at <= span.until + ROUNDING]
        if not mine and sample.values.get(LISTED + worker):
            yield Finding("run", "tenure", f"{worker} has no lease at {sample.at:.1f} s, and the router lists it")
        calm = mine and mine[0].since + notice < sample.at
        ill = any(
            _ILL & {*fault.harms} and fault.at <= sample.at and (fault.until or math.inf) + notice >= sample.at
            for fault in faults
        )
        if calm and not ill and not sample.values.get(WELL + worker, 1):
            yield Finding(
                "run", "tenure", f"{worker} has a lease at {sample.at:.1f} s, and the router gives it nothing"
            )


def _ghosts(worker: str, spans: list[Span], faults: list[Fault]) -> Iterator[Finding]:
    for fault in faults:
        if "engine" in fault.harms and fault.until is not None:
            since, until = fault.at + GONE, fault.until - GONE
            if any(max(span.since, since) < min(span.until, until) for span in spans):
                what = f"{worker} had a lease {GONE:g} s after its engine's death at {fault.at:.1f} s ({fault.kind})"
                yield Finding("run", "tenure", what)


def _takes_it(fault: Fault, span: Span, lasts: float) -> bool:
    """`lasts`: seconds of a lease; what was not renewed because of a fault lapses so much later."""
    over = math.inf if fault.until is None else fault.until
    return "lease" in fault.harms and fault.at <= span.until + ROUNDING and span.until <= over + lasts


def _well_since(faults: list[Fault], since: float, until: float) -> float:
    """The last time in the absence at which something befell it, or its beginning."""
    begun = [fault for fault in faults if _ILL & {*fault.harms} and fault.at <= until]
    return max([since, *(until if fault.until is None else min(fault.until, until) for fault in begun)])
