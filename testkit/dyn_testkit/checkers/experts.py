"""The rows of experts and indexer, to the byte: who else computed them must not show."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Subject, per_answer


def _experts(subject: Subject) -> Iterator[str]:
    for name in ("routed_experts", "indexer_topk"):
        got, want = (answer.meta.get(name) for answer in (subject.answer, subject.reference))
        if got != want:
            words = f"{len(got or '')} characters of base64 against {len(want or '')}"
            yield f"{name}: {words if got and want else 'lost or added'}"


check = per_answer("experts", _experts)
