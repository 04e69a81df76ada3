"""A worker that has failed a request gets it again only when every other one that is there has failed it, too.

One that has left and come back, with another lease, is another one, and there once the router has found it well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from dyn_testkit.checkers.base import Finding, failed_at, places
from dyn_testkit.checkers.tenure import WELL, Span, held
from dyn_testkit.history import History, Sample

#: Ends of an attempt that say nothing about its worker: the request may stay.
_STAYS = (None, "left", "stale", "moved")
#: Of a prefill worker: it may be the decode worker beside it that kept it waiting.
_SILENT = ("stall", "first_token")


@dataclass(frozen=True, slots=True)
class _Tenure:
    """One worker's leases, and when the router was seen to give it requests; None if nobody looked."""

    spans: list[Span]
    seen: list[float] | None

    @classmethod
    def of(cls, worker: str, spans: list[Span], samples: list[Sample]) -> _Tenure:
        shown = [sample for sample in samples if WELL + worker in sample.values]
        return cls(spans, [sample.at for sample in shown if sample.values[WELL + worker]] if shown else None)

    def anew(self, since: float, until: float) -> bool:
        """It has taken a lease meanwhile."""
        return any(since < span.since <= until for span in self.spans)

    def known(self, when: float) -> bool:
        """It has a lease, under which the router has found it well."""
        span = next((span for span in self.spans if when in span), None)
        if span is None or self.seen is None:
            return span is not None
        before = bisect_right(self.seen, when)
        return before > 0 and self.seen[before - 1] >= span.since


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows, and workers that stay the same."""
    roles = {"url": set(history.run.workers), "prefill_url": set(history.run.prefills)}
    if not history.run.workers:
        return
    tenures = {worker: _Tenure.of(worker, spans, history.samples) for worker, spans in held(history.leases).items()}
    for row in history.rows:
        excluded: set[str] = set()
        #: One of each two has failed; the row does not tell which one.
        doubtful: set[str] = set()
        #: When each has failed it last.
        left: dict[str, float] = {}
        for attempt in row["attempts"]:
            began = row["time"] - history.run.began + attempt["started"]
            excluded -= {one for one in excluded if one in tenures and tenures[one].anew(left[one], began)}
            gone = {worker for worker, tenure in tenures.items() if not tenure.known(began)}
            asked = {role: workers - gone for role, workers in roles.items() if attempt.get(role)}
            if not all(workers - excluded for workers in asked.values()):
                excluded, doubtful = set(), set()  # another lap, over all
            elif not all(workers - excluded - doubtful for workers in asked.values()):
                excluded, doubtful = set(), excluded | doubtful  # or not: it depends on whom the doubt is about
            for role, workers in asked.items():
                if attempt[role] in excluded:
                    others = ", ".join(sorted(workers - excluded - doubtful))
                    what = f"attempt {attempt['number']} is {attempt[role]}'s again, not {others}"
                    yield Finding(row["rid"], "exclusion", what)
            left |= dict.fromkeys(places(attempt), began)
            failed = failed_at(attempt)
            if attempt["cause"] not in _STAYS:
                (doubtful if failed is None else excluded).update([failed] if failed else places(attempt))
                if attempt["cause"] in _SILENT:
                    doubtful.update(place for place in places(attempt)[:1] if place != failed)
