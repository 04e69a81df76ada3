"""One dialect a stream, never another across a cut; the reference's, if that is a stream too."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit import fold
from dyn_testkit.checkers.base import Subject, per_answer


def _dialect(subject: Subject) -> Iterator[str]:
    for what, got, want in (
        ("output_ids", subject.answer.dialect, subject.reference.dialect),
        ("logprobs", subject.answer.logprob_dialect, subject.reference.logprob_dialect),
    ):
        if fold.EITHER not in (got, want) and got != want:
            yield f"{what} stream {got}, the reference {want}"


check = per_answer("dialect", _dialect)
