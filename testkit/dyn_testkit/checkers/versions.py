"""Every token is labelled with the weights that made it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dyn_testkit.checkers.base import Finding, subjects
from dyn_testkit.history import History


def check(history: History) -> Iterator[Finding]:
    """Needs the router's rows, and workers that told which weights made what."""
    made = {(one.worker, one.body.get("rid")): one.made for one in history.arrivals if one.made is not None}
    rows = {row["rid"]: row for row in history.rows}
    for subject in subjects(history):
        meta = subject.answer.meta
        row = rows.get(meta.get("id"))
        if row is None:
            continue
        labels = _by_token([(one["version"], one["start"], one["end"]) for one in meta.get("weight_versions") or []])
        for attempt in row["attempts"]:
            spans = made.get((attempt["url"], attempt["rid"]))
            if spans is None:
                continue
            wanted = _by_token(spans)[: attempt["tokens"]]
            got = labels[attempt["resumed_from"] : attempt["resumed_from"] + attempt["tokens"]]
            if got != wanted:
                at = next((at for at, (one, two) in enumerate(zip(got, wanted, strict=False)) if one != two), len(got))
                said, had = (one[at] if at < len(one) else None for one in (got, wanted))
                what = f"token {attempt['resumed_from'] + at} is said to be of {said}"
                yield Finding(subject.record.key, "versions", f"{what}, {attempt['worker']} had {had}")
                break


def _by_token(spans: Sequence[tuple[Any, int, int]]) -> list[Any]:
    """The version of each token."""
    return [version for version, start, end in spans for _ in range(start, end)]
