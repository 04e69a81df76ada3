"""`meta_info.id`: one, and the client's own where it named one."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Subject, per_answer


def _identity(subject: Subject) -> Iterator[str]:
    ids = {meta.get("id") for meta in subject.answer.metas}
    own = subject.record.body.get("rid")
    if len(ids) != 1:
        yield f"{len(ids)} different ids"
    elif own is None and None in ids:
        yield "no id"
    elif own is not None and ids != {own}:
        yield f"id {ids.pop()!r}, the client said {own!r}"


check = per_answer("identity", _identity)
