"""Which workers are struck: a target (whom first) and a mode (how many), chosen by a seed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

#: Whom first; anything else is a worker's name or URL.
BUSIEST, IDLEST, RANDOM = "busiest", "idlest", "random"

_SPELLED = re.compile(r"one|all|all-but-one|[1-9]\d*|([1-9]\d?|100)%", re.ASCII)


@dataclass(frozen=True, slots=True)
class Mode:
    """How many: `one`, `all`, `all-but-one`, a number, or a share as `50%`, rounded up."""

    text: str

    def __post_init__(self) -> None:
        """Raises `ValueError`."""
        if not _SPELLED.fullmatch(self.text):
            raise ValueError(f"{self.text!r} is none of one, all, all-but-one, N, N%")

    def count(self, workers: int) -> int:
        """Of so many workers. Raises `ValueError` if there are not as many."""
        if self.text in ("one", "all", "all-but-one"):
            return {"one": 1, "all": workers, "all-but-one": workers - 1}[self.text]
        if self.text.endswith("%"):
            return -(-workers * int(self.text[:-1]) // 100)
        if int(self.text) > workers:
            raise ValueError(f"{self.text} of {workers} workers")
        return int(self.text)


def choose(names: Sequence[str], loads: Mapping[str, float], target: str, mode: Mode, random: Random) -> list[str]:
    """The names of those to strike, in this order. Equal loads are told apart by chance.

    Raises `LookupError` if `target` is a name that none has.
    """
    order = list(names)
    random.shuffle(order)
    if target in (BUSIEST, IDLEST):
        order.sort(key=lambda name: loads.get(name, 0), reverse=target == BUSIEST)
    elif target != RANDOM:
        if target not in order:
            raise LookupError(f"{target!r} is none of {', '.join(names)}")
        order.sort(key=lambda name: name != target)
    return order[: mode.count(len(order))]
