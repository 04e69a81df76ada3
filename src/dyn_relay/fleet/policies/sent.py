"""What was sent where: an index of blocks of prompts.

A prompt is cut into blocks of `BLOCK` tokens (`BLOCK_TEXT` characters of a text); a block's name is a hash over it and
all before it. To each name belongs the set of targets that were sent it, an integer with a bit for each target. So a
lookup walks a prompt's names as long as anybody has them, whoever that is.

The blocks that were not sent for longest go first, in two generations: what is sent gets into the young one, and when
that is half of all, the old one is dropped and the young one becomes old. A prompt's beginning is as young as its end,
so that no end is kept whose beginning is gone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from dyn_relay.fleet.policies.base import Prefix

#: Tokens and characters a block; SGLang's own pages may be smaller, and a rest that fills no block counts as not there.
BLOCK, BLOCK_TEXT = 32, 128
#: What an entry takes at most: its name, its place in a dict, a set of some hundred targets (measured, CPython 3.11).
BYTES_A_BLOCK = 192


def chain(space: bytes, prefix: Prefix) -> list[int]:
    """The names of a prompt's whole blocks, from its beginning; different in each cache space, and in each process."""
    size = BLOCK_TEXT if isinstance(prefix, str) else BLOCK
    if isinstance(prefix, str):
        data, step = prefix.encode("utf-32-le", "surrogatepass"), 4 * size
    else:
        ids = prefix if isinstance(prefix, array) else array("I", prefix)
        data, step = ids.tobytes(), ids.itemsize * size
    names = []
    name = hash((space, size))
    for at in range(step, len(data) + 1, step):
        name = hash((name, data[at - step : at]))
        names.append(name)
    return names


class SentPrefixes:
    """Targets, by number, of blocks, by name. `forget` a target's number before another one gets it."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes that it takes, about."""
        self._half = max(limit // BYTES_A_BLOCK // 2, 1)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._live = 0
        #: Numbers that are free, with the generation from which on no block can have them any more.
        self._free: list[tuple[int, int]] = []
        self._numbers = 0
        self._generation = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def number(self) -> int:
        """A number for a target that has nothing yet."""
        if self._free and self._free[0][0] <= self._generation:
            number = self._free.pop(0)[1]
        else:
            number, self._numbers = self._numbers, self._numbers + 1
        self._live |= 1 << number
        return number

    def forget(self, number: int) -> None:
        """Whatever the target had is gone, and its number with it."""
        self._live &= ~(1 << number)
        self._free.append((self._generation + 2, number))

    def match(self, names: Iterable[int]) -> dict[int, int]:
        """How many of the first blocks each target was sent, by number; who has none is missing."""
        held, depth = self._live, 0
        found: dict[int, int] = {}
        for name in names:
            kept = self._get(name) & held
            if kept != held:
                if depth:
                    found.update(dict.fromkeys(_bits(held & ~kept), depth))
                held = kept
                if not held:
                    return found
            depth += 1
        if depth:
            found.update(dict.fromkeys(_bits(held), depth))
        return found

    def add(self, names: Iterable[int], number: int) -> None:
        """A prompt has been sent to a target."""
        bit = 1 << number
        young, live = self._young, self._live
        for name in names:
            young[name] = self._get(name) & live | bit
        if len(young) >= self._half:
            self._old, self._young = young, {}
            self._generation += 1

    def drop(self, name: int, number: int) -> None:
        """The block is not to be looked for at a target any more, nor are those after it."""
        self._young[name] = self._get(name) & self._live & ~(1 << number)

    def _get(self, name: int) -> int:
        held = self._young.get(name)
        return self._old.get(name, 0) if held is None else held


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
