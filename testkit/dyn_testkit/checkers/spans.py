"""`weight_versions` tiles the output, [0, n) without a gap or an overlap, and is the reference's."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Finding, Subject, per_answer
from dyn_testkit.history import History


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
    elif subject.answer.meta.get("weight_version") != spans[-1]["version"]:
        yield f"weight_version {subject.answer.meta.get('weight_version')!r} after {spans[-1]}"


def _reference(subject: Subject) -> Iterator[str]:
    for name in ("weight_version", "weight_versions"):
        got, want = subject.answer.meta.get(name), subject.reference.meta.get(name)
        if got != want:
            yield f"{name} {got} against {want}"


_tiles, _the_same = per_answer("spans", _spans), per_answer("spans", _reference)


def check(history: History) -> Iterator[Finding]:
    """Where workers told what they were asked, their weights may have been changed: `versions` knows which it was."""
    yield from _tiles(history)
    if not history.run.tapped:
        yield from _the_same(history)
