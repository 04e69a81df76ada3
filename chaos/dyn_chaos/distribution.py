"""Numbers by a short text: `256`, `16-256` (evenly), `log:16-4096` (most are small, a few large, as rollouts are)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from random import Random

_NUMBER = r"(\d+(?:\.\d+)?)"
_SPELLED = re.compile(rf"(log:)?{_NUMBER}(?:-{_NUMBER})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Numbers in [low, high]; `skewed`: their logarithms are even, not they."""

    low: float
    high: float
    skewed: bool = False

    def draw(self, random: Random) -> float:
        """One of them."""
        if self.skewed:
            return math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        return random.uniform(self.low, self.high)

    def whole(self, random: Random) -> int:
        """One of them, rounded."""
        return round(self.draw(random))

    def __str__(self) -> str:
        ends = f"{self.low:g}" if self.low == self.high else f"{self.low:g}-{self.high:g}"
        return f"log:{ends}" if self.skewed else ends


def parse(text: str) -> Distribution:
    """Read the text. Raises `ValueError`."""
    spelled = _SPELLED.fullmatch(text)
    if spelled is None:
        raise ValueError(f"{text!r} is neither N, nor LOW-HIGH, nor log:LOW-HIGH")
    low = float(spelled[2])
    high = float(spelled[3] or spelled[2])
    if low > high:
        raise ValueError(f"{text!r}: {low:g} is more than {high:g}")
    if spelled[1] and low == 0:
        raise ValueError(f"{text!r}: zero has no logarithm")
    return Distribution(low, high, bool(spelled[1]))
