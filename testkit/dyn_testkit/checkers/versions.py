"""Every token is labelled with the weights that made it.

An engine tells them apart with its finish; until then an event has one version, the newest (SGLang 0.5.23). So of a
stream whose worker died, the tokens of the event that brought another version may be labelled with that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from dyn_testkit.checkers.base import Finding, Subject, subjects
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
            base = attempt["resumed_from"]
            wanted = _by_token(spans)[: attempt["tokens"]]
            told = _as_told(subject, wanted, base) if attempt["cause"] else wanted
            got = labels[base : base + attempt["tokens"]]
            for at, (said, had) in enumerate(zip_longest(got, wanted)):
                if said != had and said != told[at]:
                    what = f"token {base + at} is said to be of {said}, {attempt['worker']} had {had}"
                    yield Finding(subject.record.key, "versions", what)
                    break


def _as_told(subject: Subject, made: Sequence[Any], base: int) -> list[Any]:
    """What the events of a stream could say of an attempt's tokens: each the version of the last one in its event."""
    if not subject.record.streaming:
        return list(made)
    told: list[Any] = []
    for total in (meta["completion_tokens"] - base for meta in subject.answer.metas):
        upto = min(total, len(made))
        if upto > len(told):
            told += [made[upto - 1]] * (upto - len(told))
    return told


def _by_token(spans: Sequence[tuple[Any, int, int]]) -> list[Any]:
    """The version of each token."""
    return [version for version, start, end in spans for _ in range(start, end)]
