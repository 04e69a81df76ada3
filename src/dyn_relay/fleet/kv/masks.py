"""Sets of holders, each kept once: a node has a number instead of a set.

A set is an integer, one bit for each tier of each rank. There are few different ones, since blocks come and go in runs;
so a rank is taken out of all of them at once without a look at the nodes.
"""

from __future__ import annotations

from functools import lru_cache

from dyn_relay.fleet.kv.events import Tier

_TIERS = len(Tier)
_ALL_TIERS = (1 << _TIERS) - 1


def bit(slot: int, tier: Tier) -> int:
    """The bit of a rank's tier."""
    return 1 << slot * _TIERS + tier


def bits(slot: int) -> int:
    """The bits of all tiers of a rank."""
    return _ALL_TIERS << slot * _TIERS


@lru_cache(maxsize=4096)
def holders(mask: int) -> dict[int, Tier]:
    """The ranks in a set, by slot, each with its nearest tier. Not to be changed."""
    found: dict[int, Tier] = {}
    while mask:
        slot, tier = divmod((mask & -mask).bit_length() - 1, _TIERS)
        found[slot] = Tier(tier)
        mask &= ~bits(slot)
    return found


class Masks:
    """The different sets, by number; number 0 is the empty one."""

    __slots__ = ("_free", "_ids", "_masks", "_uses")

    def __init__(self) -> None:
        self._masks = [0]
        self._ids = {0: 0}
        self._uses = [0]
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._masks) - len(self._free)

    def __getitem__(self, number: int) -> int:
        return self._masks[number]

    def swap(self, number: int, mask: int) -> int:
        """A node had the set `number`, and now has `mask`: the new number."""
        if number:
            self._uses[number] -= 1
            if not self._uses[number]:
                self._release(number)
        if not mask:
            return 0
        new = self._ids.get(mask)
        if new is None:
            new = self._ids[mask] = self._free.pop() if self._free else len(self._masks)
            if new == len(self._masks):
                self._masks.append(0)
                self._uses.append(0)
            self._masks[new] = mask
        self._uses[new] += 1
        return new

    def strike(self, away: int) -> None:
        """Take these bits out of every set. Two numbers may then mean the same set: no harm."""
        self._masks = [mask & ~away for mask in self._masks]
        self._ids = {mask: number for number, mask in enumerate(self._masks) if mask or not number}

    def _release(self, number: int) -> None:
        mask = self._masks[number]
        if mask and self._ids.get(mask) == number:
            del self._ids[mask]
        self._masks[number] = 0
        self._free.append(number)
