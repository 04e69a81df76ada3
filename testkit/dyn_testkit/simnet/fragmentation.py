"""How reads cut what has arrived."""

from __future__ import annotations

from dataclasses import dataclass

from dyn_testkit.simnet.dice import Dice


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """How a read cuts what is there: it gives 1 to `largest` bytes (None: all), drawn from the network's seed.

    `sizes` are used first, in order; that is what a shrinking property test wants.
    """

    largest: int | None = None
    sizes: tuple[int, ...] = ()


WHOLE = Fragmentation()


class Cutter:
    """The reads of one direction of a connection."""

    __slots__ = ("_dice", "_how", "_used")

    def __init__(self, dice: Dice) -> None:
        self._dice = dice
        self._how = WHOLE
        #: How many of its `sizes` were used.
        self._used = 0

    def take(self, how: Fragmentation, available: int) -> int:
        """How many of the available bytes (at least one) a read gives. Another `how` begins with its first size."""
        if how is not self._how and how != self._how:
            self._how, self._used = how, 0
        if self._used < len(how.sizes):
            self._used += 1
            return max(1, min(available, how.sizes[self._used - 1]))
        return available if how.largest is None else self._dice.random("cuts").randint(1, min(available, how.largest))
