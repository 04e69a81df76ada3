"""What a history comes to: every check, and whether it has shown anything. A run and `dyn-chaos check` end here."""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from dyn_chaos.actions.drain import KIND as DRAIN
from dyn_chaos.actions.drain import LIVE
from dyn_chaos.measures import percentile
from dyn_chaos.nemesis import CERTAIN, UNDONE
from dyn_chaos.report import Outcome
from dyn_chaos.sampler import GAUGES, MIGRATIONS
from dyn_testkit import checkers, fold
from dyn_testkit.checkers.liveness import loud
from dyn_testkit.checkers.logprobs import widest_difference
from dyn_testkit.history import Fault, History, Record

#: Keys of `Run.settings` that a campaign sets: as `Campaign.moves`, and that something had to be struck.
MOVES, STRIKES = "moves", "strikes"


#: Checks that mean nothing before the end of a run: requests are under way, rows are not there yet.
OF_THE_END = frozenset({"liveness", "exactly_once", "leases"})


def verdict(history: History, name: str = "") -> Outcome:
    """Run all checks; on a run that was broken off, those of single answers.

    Raises `fold.Incomplete` for a reference that is not whole.
    """
    outcome = Outcome(name or history.run.name or "history")
    outcome.expect(bool(history.records), "vacuous", "no request came to its end")
    if history.end:
        if history.end.died is not None:
            outcome.expect(False, "relay", f"the proxy ended in mid-campaign, {_status(history.end.died)}")
        outcome.findings += checkers.check(history)
        _run(history, outcome)
    else:
        outcome.expect(False, "unfinished", "the run was broken off; its answers until then were checked")
        outcome.findings += checkers.check(history, checkers.CHECKERS.keys() - OF_THE_END)
    _answers(history, outcome)
    return outcome


def _status(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"


def _run(history: History, outcome: Outcome) -> None:
    """The run as a whole."""
    _faults(history, outcome)
    if history.run.traced:
        for row in history.rows:
            outcome.expect(row["migratable"], "unprotected", f"reason {row['reason']}", row["rid"])
    if history.samples:
        _idle(history.samples[-1].values, outcome)
    elif history.run.settings.get(STRIKES):
        outcome.expect(False, "gauges", "there are no samples of the proxy")
    _moved(history, outcome)


def _answers(history: History, outcome: Outcome) -> None:
    records, found = history.records, {finding.key for finding in outcome.findings}
    failed = {key for key, record in records.items() if not record.checked and loud(record)}
    right = records.keys() - found - failed
    outcome.facts["answers right"] = f"{len(right)}/{len(records.keys() | history.references.keys())}"
    if failed:
        outcome.facts["failed loudly"] = len(failed)
    if history.run.tolerance:
        outcome.facts["widest logprob difference"] = widest(records, history.references)
    slowest = max((record.ended - record.sent for record in records.values()), default=0.0)
    outcome.facts["slowest answer"] = f"{slowest:.1f} s"


def _faults(history: History, outcome: Outcome) -> None:
    counts: Counter[str] = Counter()
    for fault in history.faults:
        counts[fault.kind] += 1
        what = f"{fault.kind} of {fault.target}"
        why = f": {fault.choice['problem']}" if "problem" in fault.choice else ""
        outcome.expect(bool(fault.proof), "unproven", f"{what} is not to be seen{why}", fault.target)
        outcome.expect(
            bool(fault.choice.get(UNDONE, "not undone")), "unproven", f"{what} is not seen to be over", fault.target
        )
        met = any(_met(fault, record) for record in history.records.values())
        outcome.expect(met and fault.choice.get(LIVE) != 0, "vacuous", f"{what} met no request", fault.target)
        if fault.kind == DRAIN:
            for rid in _dispatched(history, fault):
                outcome.expect(False, "drain", f"was sent to {fault.target} while that was draining", rid)
    if history.run.settings.get(STRIKES):
        outcome.expect(bool(history.faults), "vacuous", "the load ended before the first strike")
        done = [f"{kind} x{count}" for kind, count in counts.items()]
        if len(history.faults) == 1:
            done = [f"{fault.kind} of {fault.target} ({fault.proof})" for fault in history.faults]
        outcome.facts["done"] = ", ".join(done) or "nothing"


def _met(fault: Fault, record: Record) -> bool:
    """The request was under way while the fault was in effect."""
    return fault.at <= record.ended and record.sent <= (math.inf if fault.until is None else fault.until)


def _dispatched(history: History, fault: Fault) -> Iterator[str]:
    """The rids of attempts that began at a worker while a fault of it was certainly in effect."""
    since, until = fault.choice.get(CERTAIN, (math.inf, None))
    for row in history.rows:
        for attempt in row["attempts"]:
            began = row["time"] - history.run.began + attempt["started"]
            if attempt["url"].rstrip("/") == fault.target and since < began < (until or math.inf):
                yield row["rid"]


def _idle(last: Mapping[str, float], outcome: Outcome) -> None:
    """Gauges that are not zero are `leases`' to find."""
    for gauge in GAUGES:
        outcome.expect(gauge in last, "gauges", f"the proxy has no {gauge}")


def _moved(history: History, outcome: Outcome) -> None:
    moves = history.run.settings.get(MOVES)
    if history.run.traced:
        moved = [row for row in history.rows if len(row["attempts"]) > 1]
        outcome.facts["migrated"] = len(moved)
        gaps = [gap for row in moved for gap in recovery_gaps(row)]
        if gaps:
            shown = (percentile(gaps, share) for share in (0.5, 0.95, 1.0))
            outcome.facts["recovery gap p50/p95/max"] = "/".join(f"{gap:.2f}" for gap in shown) + " s"
        count: float = len(moved)
    elif history.samples:
        count = outcome.facts["migrations"] = int(history.samples[-1].values[MIGRATIONS])
    else:
        return
    outcome.expect(moves is not True or count > 0, "vacuous", "nothing was migrated")
    outcome.expect(moves is not False or count == 0, "migrations", f"{count:.0f} though nothing had failed")


def recovery_gaps(row: Mapping[str, Any]) -> Iterator[float]:
    """Seconds without tokens around each cut of a request: from its last token, or its dispatch, to the next one."""
    last = None
    for before, after in pairwise(row["attempts"]):
        last = before["last_token"] if before["last_token"] is not None else last
        if after["first_token"] is not None:
            yield after["first_token"] - (before["started"] if last is None else last)


def widest(records: Mapping[str, Record], references: Mapping[str, Record]) -> float:
    """The largest logprob difference of all complete answers with their references."""
    found = 0.0
    for key in records.keys() & references.keys():
        try:
            found = max(found, widest_difference(fold.answer(records[key]), fold.answer(references[key])))
        except fold.Incomplete:
            continue
    return found
