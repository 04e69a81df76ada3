"""The router's rows, and the header that it sends, say what its client got."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dyn_testkit import fold
from dyn_testkit.checkers.base import Finding, name_of
from dyn_testkit.history import History, Record

#: Says whether a request is protected.
HEADER = "x-dyn-relay-migratable"
#: Outcomes of which the client has a whole answer.
WHOLE = frozenset({"done", "completed_here"})


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows; a request that has none, or several, is `exactly_once`'s to find."""
    rows = {row["rid"]: row for row in history.rows}
    for row in history.rows:
        yield from (Finding(row["rid"], "rows", text) for text in _attempts(row))
    for key, record in history.records.items():
        name = name_of(record)
        if name in rows:
            differences = _of_checked if record.checked else _differences
            yield from (Finding(key, "rows", text) for text in differences(record, rows[name]))


def _attempts(row: Mapping[str, Any]) -> Iterator[str]:
    delivered = 0
    for attempt in row["attempts"]:
        if attempt["resumed_from"] != delivered:
            yield f"attempt {attempt['number']} went on from {attempt['resumed_from']}, {delivered} were delivered"
        delivered += attempt["tokens"]


def _of_checked(record: Record, row: Mapping[str, Any]) -> Iterator[str]:
    if row["completion_tokens"] not in (None, record.tokens):
        yield f"completion_tokens {record.tokens}, its row says {row['completion_tokens']}"


def _differences(record: Record, row: Mapping[str, Any]) -> Iterator[str]:
    protected = "yes" if row["migratable"] else f"no; reason={row['reason']}"
    if record.status and record.headers.get(HEADER) != protected:
        yield f"{HEADER} is {record.headers.get(HEADER)!r}, its row says {protected!r}"
    if record.left:
        got, given = len(fold.delivered(record)), row["completion_tokens"]
        if given is not None and got > given:
            yield f"the client has {got} tokens, its row {given}"
        return
    if record.status != row["status"]:
        yield f"status {record.status}, its row says {row['status']}"
    try:
        answer = fold.answer(record)
    except fold.Incomplete as error:
        if row["outcome"] in WHOLE:
            yield f"its row says {row['outcome']!r}: {error}"
        return
    if answer.meta["finish_reason"].get("type") != "abort" and (row["outcome"] not in WHOLE or row["error"]):
        yield f"it came whole, its row says {row['outcome']!r} {row['error']!r}"
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        if row[name] not in (None, answer.meta.get(name)):
            yield f"{name} {answer.meta.get(name)}, its row says {row[name]}"
