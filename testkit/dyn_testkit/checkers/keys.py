"""The keys that the engine sends: none lost, none added; in the first event, the last, and those between."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit import fold
from dyn_testkit.checkers.base import VOLATILE, Subject, per_answer
from dyn_testkit.oracle import MEASURED

#: Keys of `meta_info` that only the last event has (SGLang 0.5.23).
FINISHED = frozenset({"e2e_latency", "weight_versions", "routed_experts", "indexer_topk"})


def _keys(subject: Subject) -> Iterator[str]:
    # An oracle's answer has neither an id nor what is measured, and is always unary; an engine's has both.
    engine = "e2e_latency" in subject.reference.meta
    ignored = set() if engine else {f"meta_info.{name}" for name in (*MEASURED, "id")}
    wanted = _named(subject.reference)
    if not engine:
        early = wanted["last"][0] - {f"meta_info.{name}" for name in FINISHED}
        wanted |= {"first": [early], "inner": [early]}
    for place, found in _named(subject.answer).items():
        if place not in wanted:
            continue
        always, ever = set.intersection(*wanted[place]), set.union(*wanted[place])
        for got in found:
            missing, added = sorted(always - got - ignored), sorted(got - ever - ignored)
            if missing or added:
                yield f"{place} event: missing {missing}, added {added}"
                break


def _named(answer: fold.Answer) -> dict[str, list[set[str]]]:
    """Keys of the first event, of each inner one, and of the last one; a lone event is only a last one."""
    named = [
        {*event, *(f"meta_info.{key}" for key in event["meta_info"])} - {f"meta_info.{key}" for key in VOLATILE}
        for event in answer.events
    ]
    places = {"first": named[:-1][:1], "inner": named[1:-1], "last": named[-1:]}
    return {place: found for place, found in places.items() if found}


check = per_answer("keys", _keys)
