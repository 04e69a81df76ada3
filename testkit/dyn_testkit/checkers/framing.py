"""Content type, nothing outside events, and a stream that never contradicts itself."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Subject, per_answer


def _framing(subject: Subject) -> Iterator[str]:
    expected = "text/event-stream" if subject.record.streaming else "application/json"
    content_type = subject.record.headers.get("content-type", "")
    if content_type.split(";")[0].strip() != expected:
        yield f"content-type {content_type!r}"
    for line in subject.record.stray:
        yield f"a line outside the events: {line[:80]!r}"
    yield from subject.answer.defects


check = per_answer("framing", _framing)
