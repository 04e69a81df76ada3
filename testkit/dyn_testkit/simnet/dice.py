"""Random numbers from the seed."""

from __future__ import annotations

from random import Random


class Dice:
    """Random numbers, for each purpose a function of the key. Made when first asked for: most never are."""

    __slots__ = ("_key", "_made")

    def __init__(self, *key: str | int) -> None:
        self._key = key
        self._made: dict[str, Random] = {}

    def random(self, purpose: str) -> Random:
        made = self._made.get(purpose)
        if made is None:
            made = self._made[purpose] = Random(repr((*self._key, purpose)))
        return made
