"""What was sent where a moment ago, and that no event tells of yet.

An engine announces blocks when it has computed them. Until then the seven other samples of a prompt would see a fleet
in which nobody has it. So for a short time a target is taken to have what it was sent. Of a long prompt only some
lengths are remembered, each twice the one before, and the whole: a few entries instead of thousands, right for the
samples of one prompt, and at least half right for prompts that begin alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


def lengths(blocks: int) -> list[int]:
    """The lengths that are remembered of so many blocks, the longest first."""
    powers = (1 << power for power in reversed(range(blocks.bit_length())))
    return list(dict.fromkeys((blocks, *powers))) if blocks else []


class Assumed:
    """Chains (see `PrefixIndex.chain`) by the targets that they were sent to; times in seconds."""

    def __init__(self, lasts: float) -> None:
        self._lasts = lasts
        self._until: dict[int, dict[str, float]] = {}
        self._order: deque[tuple[float, int, str]] = deque()

    def note(self, target: str, chain: Sequence[int], now: float) -> None:
        """The target was sent this."""
        until = now + self._lasts
        for length in lengths(len(chain)):
            self._until.setdefault(chain[length - 1], {})[target] = until
            self._order.append((until, chain[length - 1], target))

    def overlap(self, chain: Sequence[int], now: float) -> dict[str, int]:
        """How many blocks each target is taken to have."""
        self._expire(now)
        found: dict[str, int] = {}
        for length in lengths(len(chain)):
            for target in self._until.get(chain[length - 1], ()):
                found.setdefault(target, length)
        return found

    def forget(self, worker: str) -> None:
        """Its targets have nothing any more."""
        for key in list(self._until):
            left = {name: until for name, until in self._until[key].items() if name.partition("@")[0] != worker}
            if left:
                self._until[key] = left
            else:
                del self._until[key]

    def __len__(self) -> int:
        return len(self._until)

    def _expire(self, now: float) -> None:
        while self._order and self._order[0][0] <= now:
            until, key, target = self._order.popleft()
            if self._until.get(key, {}).get(target) == until:
                del self._until[key][target]
                if not self._until[key]:
                    del self._until[key]
