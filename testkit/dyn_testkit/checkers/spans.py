"""`weight_versions` tiles the output: [0, n) without a gap or an overlap."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Subject, per_answer


def _spans(subject: Subject) -> Iterator[str]:
    spans = subject.answer.meta.get("weight_versions")
    if spans is None:
        return
    position = 0
    for span in spans:
        if span["start"] != position or (span["end"] <= span["start"] and subject.answer.ids):
            yield f"span {span} at {position}"
            return
        position = span["end"]
    if position != len(subject.answer.ids):
        yield f"weight_versions end at {position}, {len(subject.answer.ids)} tokens"


check = per_answer("spans", _spans)
