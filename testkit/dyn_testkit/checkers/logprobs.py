"""Logprobs: as many, of the same tokens, of the same values within the tolerance; the prompt's in every event."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dyn_testkit import fold
from dyn_testkit.checkers.base import Subject, per_answer


def _logprobs(subject: Subject) -> Iterator[str]:
    yield from _compare(subject, (*fold.PER_TOKEN, *fold.PER_PROMPT_TOKEN))
    rows = subject.answer.meta.get("output_token_logprobs")
    if rows is not None and [row[1] for row in rows] != subject.answer.ids:
        yield "output_token_logprobs are of other tokens than output_ids"
    for name in fold.PER_PROMPT_TOKEN:
        first = subject.answer.metas[0].get(name)
        if any(meta.get(name) != first for meta in subject.answer.metas):
            yield f"{name} changes within the stream"


check = per_answer("logprobs", _logprobs)


def widest_difference(got: fold.Answer, want: fold.Answer) -> float:
    """The largest absolute difference between corresponding logprobs; infinite where they do not correspond."""
    widest = 0.0
    for name in (*fold.PER_TOKEN, *fold.PER_PROMPT_TOKEN):
        mine, theirs = _entries(got.meta.get(name)), _entries(want.meta.get(name))
        if len(mine) != len(theirs):
            return math.inf
        for (a, *_), (b, *_) in zip(mine, theirs, strict=True):
            if (a is None) != (b is None):
                return math.inf
            if a is not None and b is not None:
                widest = max(widest, abs(a - b))
    return widest


def _compare(subject: Subject, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        got, want = subject.answer.meta.get(name), subject.reference.meta.get(name)
        if got != want:
            yield from (f"{name}{text}" for text in _differences(got, want, subject.tolerance))


def _differences(got: Any, want: Any, tolerance: float) -> Iterator[str]:
    """The first difference between two lists of logprob entries, or of rows of them."""
    if got is None or want is None or len(got) != len(want):
        yield f": {_length(got)} rows against {_length(want)}"
        return
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        if (mine is None) != (theirs is None):
            yield f"[{i}]: {mine} against {theirs}"
            return
        left, right = _entries([mine]), _entries([theirs])
        if len(left) != len(right):
            yield f"[{i}]: {len(left)} entries against {len(right)}"
            return
        for (a, token, text), (b, other, other_text) in zip(left, right, strict=True):
            if (a is None) != (b is None) or (a is not None and b is not None and not abs(a - b) <= tolerance):
                yield f"[{i}]: {a} against {b}"
                return
            if token != other and not _tied(left, right, tolerance):
                yield f"[{i}]: token {token} against {other}"
                return
            if token == other and text != other_text:
                yield f"[{i}]: {text!r} against {other_text!r}"
                return


def _tied(left: list[fold.Logprob], right: list[fold.Logprob], tolerance: float) -> bool:
    """Top tokens may trade places where their logprobs are equal within the tolerance.

    Ranks were compared by value before, so it is enough that every token that differs has an equal in another rank.
    """
    for rank, ((value, token, _), (_, other, _)) in enumerate(zip(left, right, strict=True)):
        others = [v for at, (v, *_) in enumerate(left) if at != rank]
        if token != other and not any(value is None or v is None or abs(value - v) <= 2 * tolerance for v in others):
            return False
    return True


def _entries(rows: Any) -> list[fold.Logprob]:
    """All entries, rows of top logprobs flattened."""
    flat: list[fold.Logprob] = []
    for row in rows or []:
        if row is None:
            continue
        entries = row if row and isinstance(row[0], list) else [row]
        flat += map(tuple, entries)
    return flat


def _length(rows: Any) -> str:
    return "no" if rows is None else str(len(rows))
