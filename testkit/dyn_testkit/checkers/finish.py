"""`finish_reason` as in the reference, once, in the last event."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Subject, per_answer


def _finish(subject: Subject) -> Iterator[str]:
    reasons = [meta.get("finish_reason") for meta in subject.answer.metas]
    if any(reason is not None for reason in reasons[:-1]):
        yield "a finish_reason before the last event"
    if reasons[-1] != subject.reference.meta["finish_reason"]:
        yield f"{reasons[-1]} against {subject.reference.meta['finish_reason']}"


check = per_answer("finish", _finish)
