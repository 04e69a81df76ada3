"""Numbers that tie the two legs of an attempt at a pair together.

A room that two live requests have crashes the schedulers of both workers (SGLang's issue 40125), so none is drawn that
is in use; 0 is what an engine takes for "none yet" (SGLang 0.5.23, decode.py:2627). They are integers of 63 bits, which
must never pass through a float.
"""

from __future__ import annotations

import random

MOST = 2**63 - 1


class Rooms:
    """All that are in use."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._live: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def draw(self, rank: int = 0, ranks: int = 1) -> int:
        """One that nobody has, 1 to `MOST`; modulo `ranks` it is `rank`, which is where some engines look for it."""
        while True:
            drawn = self._rng.randint(1, MOST)
            drawn += rank - drawn % ranks
            if 1 <= drawn <= MOST and drawn not in self._live:
                self._live.add(drawn)
                return drawn

    def claim(self, room: int) -> bool:
        """Take this one, unless it is in use."""
        free = room not in self._live
        self._live.add(room)
        return free

    def give_back(self, room: int) -> None:
        """Nobody uses it any more."""
        self._live.discard(room)
