"""The keys that the engine sends: none lost, none added; in the first event, the last, and those between."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit import fold
from dyn_testkit.checkers.base import VOLATILE, Subject, per_answer
from dyn_testkit.oracle import MEASURED


def _keys(subject: Subject) -> Iterator[str]:
    # An oracle's answer has neither an id nor what is measured; an engine's has both.
    engine = "e2e_latency" in subject.reference.meta
    ignored = set() if engine else {f"meta_info.{name}" for name in (*MEASURED, "id")}
    for place, got, want in zip(
        ("first", "inner", "last"), _named(subject.answer), _named(subject.reference), strict=True
    ):
        if got and want and got - ignored != want - ignored:
            missing, added = sorted(want - got - ignored), sorted(got - want - ignored)
            yield f"{place} event: missing {missing}, added {added}"


def _named(answer: fold.Answer) -> tuple[set[str], set[str], set[str]]:
    """Keys of the first event, of all inner events together, and of the last one; a lone event is only a last one."""
    named = [
        {*event, *(f"meta_info.{key}" for key in event["meta_info"])} - {f"meta_info.{key}" for key in VOLATILE}
        for event in answer.events
    ]
    first = named[0] if len(named) > 1 else set()
    return first, set().union(*named[1:-1]), named[-1]


check = per_answer("keys", _keys)
