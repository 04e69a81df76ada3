"""Token ids, all and in order; of an answer that its client did not wait for, the first ones."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit import fold
from dyn_testkit.checkers.base import Finding, Subject, per_answer
from dyn_testkit.history import History


def _tokens(subject: Subject) -> Iterator[str]:
    got, want = subject.answer.ids, subject.reference.ids
    if got != want:
        same = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
        yield f"{len(got)} ids against {len(want)}; equal up to {same}"


_answers = per_answer("tokens", _tokens)


def check(history: History) -> Iterator[Finding]:
    """Whole answers, and the parts of those that were left or aborted."""
    yield from _answers(history)
    for key, record in history.records.items():
        if record.left and key in history.references and history.references[key].status == 200:
            got, want = fold.delivered(record), fold.answer(history.references[key]).ids
            if got != want[: len(got)]:
                yield Finding(key, "tokens", f"{len(got)} ids, not the first ones of the uninterrupted answer")
