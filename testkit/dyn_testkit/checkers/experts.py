"""The expert rows, to the byte: who else computed them must not show."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Subject, per_answer


def _experts(subject: Subject) -> Iterator[str]:
    got, want = (answer.meta.get("routed_experts") for answer in (subject.answer, subject.reference))
    if got != want:
        yield f"{len(got or '')} characters of base64 against {len(want or '')}" if got and want else "lost or added"


check = per_answer("experts", _experts)
