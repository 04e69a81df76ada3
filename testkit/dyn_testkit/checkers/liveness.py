"""Every request ends: whole, or in a loud failure that the faults explain; and soon, once the faults have ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dyn_testkit import fold
from dyn_testkit.checkers.base import Finding, explained, in_effect, places, prompt_of
from dyn_testkit.history import History, Record

#: Seconds between the sending of a request and the beginning of its row, at most.
NEAR = 30.0

#: For want of a worker: each must have been tried, or a fault must keep it away.
ALONE = frozenset({"no_worker", "no_survivor", "busy", "failed"})

#: Ends of an attempt of which nothing can have come: every request may go elsewhere then.
UNSENT = ("connect", "busy")

#: Attempts that ended without a token before a request may be said to kill workers.
DEATHS = 2

#: What a protected request may fail of; an unprotected one fails of what makes it so.
FAIR = ALONE | {"migration_limit", "suspected_poison"}


def check(history: History) -> Iterator[Finding]:
    """Records and references pair up; what is not whole is loud and excused; nothing takes too long."""
    run, records, references = history.run, history.records, history.references
    yield from (Finding(key, "liveness", "was never answered") for key in references if key not in records)
    rows = _by_id(history)
    end = max((fault.at if fault.until is None else fault.until for fault in history.faults), default=0.0)
    for key, record in records.items():
        if run.patience is not None and record.ended > max(end, record.sent) + run.patience:
            last = max(end, record.sent)
            yield Finding(key, "liveness", f"ended {record.ended - last:.1f} s after the last fault")
        if record.checked:
            continue
        if key not in references:
            yield Finding(key, "liveness", "has no reference")
        elif references[key].status != 200:
            yield from _refused(record, references[key], rows, history)
        elif not record.left:
            yield from _whole(record, rows, history)


def _refused(
    record: Record, reference: Record, rows: Mapping[str, dict[str, Any]], history: History
) -> Iterator[Finding]:
    """What an engine refuses is refused, in its words; unless no engine could be asked."""
    if record.left or (record.status, record.text) == (reference.status, reference.text):
        return
    message = f"{record.status} {record.text[:200]}, not {reference.text[:200]}"
    if record.status < 500:
        yield Finding(record.key, "liveness", message)
    else:
        yield from _excused(record, message, rows, history)


def _whole(record: Record, rows: Mapping[str, dict[str, Any]], history: History) -> Iterator[Finding]:
    try:
        fold.answer(record)
    except fold.Incomplete as error:
        if loud(record) or str(error).startswith(fold.ENGINE_ERROR):
            yield from _excused(record, str(error), rows, history)
        else:
            yield Finding(record.key, "liveness", f"not whole, and nothing says so: {error}")


def _excused(record: Record, message: str, rows: Mapping[str, dict[str, Any]], history: History) -> Iterator[Finding]:
    """A loud failure is none that counts if the faults explain it."""
    row = _row(record, rows, history)
    if history.run.migration_limit is None or row is None:
        yield Finding(record.key, "liveness", message)
        return
    unexplained = _unexplained(row, history)
    if unexplained:
        yield Finding(record.key, "liveness", f"{message}; {unexplained}")


def loud(record: Record) -> bool:
    """No client takes it for a whole answer: a status, a broken connection, or an error event."""
    return record.status != 200 or bool(record.error) or any('"error"' in event[:10] for event in record.events)


def _unexplained(row: Mapping[str, Any], history: History) -> str:
    """What about a failed request the faults do not explain; "" if they explain it all."""
    began = row["time"] - history.run.began
    attempts = row["attempts"]
    for attempt in attempts:
        if attempt["cause"] and not explained(history, row, attempt):
            return f"attempt {attempt['number']} failed ({attempt['cause']}) though nothing had befallen its worker"
    if row["error"] == "migration_limit" and len(attempts) <= (history.run.migration_limit or 0):
        return f"gave up after {len(attempts)} attempts"
    if row["error"] == "suspected_poison" and sum(_died(attempt) for attempt in attempts) < DEATHS:
        return "is said to kill workers, and did not"
    alone = ALONE | ({"no_fit_worker"} if history.run.prefills else set())  # told of workers of the other role
    if row["migratable"] and row["error"] not in FAIR | alone:
        return f"gave up for {row['error']}, which no fault brings about"
    unsent = all(attempt["cause"] in UNSENT for attempt in attempts)
    if row["error"] in alone and (row["migratable"] or unsent):
        ended = began + row["duration"]
        tried = {url for attempt in attempts for url in places(attempt)}
        kept = {fault.target for fault in history.faults if in_effect(fault, ended, ended, history.run.aftermath)}
        left = [sorted(set(role) - tried - kept) for role in (history.run.workers, history.run.prefills) if role]
        if all(left):  # of pairs, one of each
            return f"gave up without asking {left[0][0]}, which nothing had befallen"
    return "" if attempts or history.faults else "gave up without an attempt"


def _died(attempt: Mapping[str, Any]) -> bool:
    return attempt["cause"] in ("cut", "stall", "first_token") and not attempt["tokens"]


def _row(record: Record, rows: Mapping[str, dict[str, Any]], history: History) -> dict[str, Any] | None:
    """The row of a request that failed: by its rid; if it named none, by its time and the length of its prompt."""
    if record.body.get("rid"):
        return rows.get(record.body["rid"])
    prompt = len(prompt_of(record.body))

    def apart(row: dict[str, Any]) -> float:
        return abs(float(row["time"]) - history.run.began - record.sent)

    failed = (row for row in history.rows if row["error"])
    near = [row for row in failed if row["prompt_tokens"] == prompt and apart(row) <= NEAR]
    return min(near, key=apart, default=None)


def _by_id(history: History) -> dict[str, dict[str, Any]]:
    return {row["rid"]: row for row in history.rows}
