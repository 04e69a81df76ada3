"""The text, all of it, if answers carry text."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Subject, per_answer


def _texts(subject: Subject) -> Iterator[str]:
    got, want = subject.answer.text, subject.reference.text
    if got == want:
        return
    if got is None or want is None:
        yield "no text" if got is None else "text where the engine gives none"
        return
    same = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    parts = f"{got[same : same + 20]!r} after {same}, not {want[same : same + 20]!r}"
    yield f"{len(got)} characters against {len(want)}; {parts}"


check = per_answer("texts", _texts)
