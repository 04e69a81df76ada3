"""The law of prefill/decode pairs: what two workers answer together is what one would have answered.

`Observed.attempts` are what decode workers saw, `Observed.prefills` what prefill workers did.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from dyn_testkit.laws.laws import equivalence
from dyn_testkit.laws.observed import Attempt, Observed
from dyn_testkit.laws.tokens import require
from dyn_testkit.oracle import Oracle

#: The last room that fits into an int64; 0 is what an engine takes for none (SGLang 0.5.23, decode.py:2627).
LAST_ROOM = 2**63 - 1
#: What ties the legs of an attempt together. The ranks are each leg's own.
_PLACE = frozenset({"bootstrap_host", "bootstrap_port", "bootstrap_room"})
_RANKS = frozenset({"routed_dp_rank", "disagg_prefill_dp_rank"})
_LAW = "join"


@dataclass(frozen=True, slots=True)
class _Without(Oracle):
    """Says nothing of some fields of `meta_info`."""

    omitted: Collection[str] = ()

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        whole = Oracle.answer(self, body)
        meta = {name: value for name, value in whole["meta_info"].items() if name not in self.omitted}
        return {**whole, "meta_info": meta}


def join(seen: Observed, oracle: Oracle, omitted: Collection[str] = ()) -> None:
    """The client's answer is the aggregated one, row by row, and the legs of each attempt belong together.

    `oracle` says what one worker answers. `omitted`: fields of `meta_info` of which a part was missing or corrupt;
    they are in no event, and all others are as if nothing had been wrong with these.
    """
    meeting(seen)
    known = {field.name: getattr(oracle, field.name) for field in fields(oracle)}
    equivalence(seen, _Without(**known, omitted=omitted))


def meeting(seen: Observed) -> None:
    """The part of `join` about the requests: both legs got the same one, but for ranks, in a room of their own.

    A room is an integer of 1 to 2^63-1 that no other attempt has; a batch has one for each of its prompts.
    """
    hosts: dict[tuple[int, ...], Attempt] = {}
    for leg in seen.prefills:
        rooms = _rooms(leg, seen)
        require(rooms not in hosts, _LAW, seen, f"room {rooms} came to prefill workers twice")
        hosts[rooms] = leg
    taken: set[int] = set()
    for number, attempt in enumerate(seen.attempts):
        rooms = _rooms(attempt, seen)
        require(not taken & {*rooms}, _LAW, seen, f"attempt {number} has a room of an earlier one, {rooms}")
        taken |= {*rooms}
        if rooms not in hosts:
            continue  # the attempt ended before the prefill worker had read its part
        first, second = (_shared(each) for each in (hosts[rooms], attempt))
        wrong = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
        require(not wrong, _LAW, seen, f"the legs of attempt {number} differ in {wrong}")


def _rooms(attempt: Attempt, seen: Observed) -> tuple[int, ...]:
    told = attempt.sent.get("bootstrap_room")
    rooms = told if isinstance(told, list) else [told]
    good = [type(room) is int and 1 <= room <= LAST_ROOM for room in rooms]
    require(all(good) and len({*rooms}) == len(rooms), _LAW, seen, f"{told!r} is no room, or no rooms")
    return tuple(rooms)


def _shared(attempt: Attempt) -> dict[str, Any]:
    return {name: value for name, value in attempt.sent.items() if name not in _RANKS}


def aggregated(seen: Observed) -> Observed:
    """The same without what makes it a pair, for the laws that know of one worker an attempt.

    What the legs are told of each other is left out of bodies: one that says the client's own request is the client's
    own again. What only a prefill worker said of the prompt is not put into the decode worker's answers.
    """
    return replace(seen, attempts=[_alone(attempt, seen) for attempt in seen.attempts], prefills=[])


def _alone(attempt: Attempt, seen: Observed) -> Attempt:
    rest = {name: value for name, value in attempt.sent.items() if name not in _PLACE | _RANKS}
    body = seen.case.body if rest == seen.request else msgspec.json.encode(rest)
    return replace(attempt, body=body)
