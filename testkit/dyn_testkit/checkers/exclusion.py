"""A worker that has failed a request gets it again only when every other one that is there has failed it, too.

One that has left and come back, with another lease, is another one.
"""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Finding, failed_at, places
from dyn_testkit.checkers.tenure import held, there
from dyn_testkit.history import History

#: Ends of an attempt that say nothing about its worker: the request may stay.
_STAYS = (None, "left", "stale", "moved")
#: Of a prefill worker: it may be the decode worker beside it that kept it waiting.
_SILENT = ("stall", "first_token")


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows, and workers that stay the same."""
    roles = {"url": set(history.run.workers), "prefill_url": set(history.run.prefills)}
    if not history.run.workers:
        return
    spans = held(history.leases)
    for row in history.rows:
        excluded: set[str] = set()
        #: One of each two has failed; the row does not tell which one.
        doubtful: set[str] = set()
        #: When each has failed it last.
        left: dict[str, float] = {}
        for attempt in row["attempts"]:
            began = row["time"] - history.run.began + attempt["started"]
            excluded -= {one for one in excluded if any(left[one] < span.since <= began for span in spans.get(one, ()))}
            gone = {worker for worker in spans if not there(spans, worker, began)}
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
