"""A hash table of node numbers, four bytes a slot: the keys stay in an array that the nodes have anyway.

A `dict` of two integers costs about 100 bytes an entry, this one 6 to 12. It is cut into shards that grow one by one: a
table of ten million that grew at once would hold up the event loop for seconds. They are not equally patient, lest all
of them grow at the same time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

#: Slots of a fresh shard.
_LEAST = 8


class Slots:
    """Open addressing with linear probing. Node 0 is no node: it marks what is free."""

    __slots__ = ("_bits", "_keys", "_shards", "_used")

    def __init__(self, keys: array[int], bits: int) -> None:
        """`keys[node]` is the key of a node; there are `2 ** bits` shards."""
        self._keys = keys
        self._bits = bits
        self._shards = [array("I", bytes(4 * _LEAST)) for _ in range(1 << bits)]
        self._used = array("I", bytes(4 << bits))

    def __len__(self) -> int:
        return sum(self._used)

    def find(self, key: int) -> int:
        """The node with this key, or 0."""
        slots = self._shards[key & (1 << self._bits) - 1]
        mask = len(slots) - 1
        at = key >> self._bits & mask
        keys = self._keys
        while node := slots[at]:
            if keys[node] == key:
                return node
            at = at + 1 & mask
        return 0

    def path(self, keys: Iterable[int]) -> list[int]:
        """The nodes with these keys, up to the first that is missing. A loop of its own, since lookups are hot."""
        shards, last, bits, known = self._shards, (1 << self._bits) - 1, self._bits, self._keys
        found: list[int] = []
        for key in keys:
            slots = shards[key & last]
            mask = len(slots) - 1
            at = key >> bits & mask
            while (node := slots[at]) and known[node] != key:
                at = at + 1 & mask
            if not node:
                break
            found.append(node)
        return found

    def add(self, node: int) -> None:
        """Put in a node, whose key must not be there yet."""
        shard = self._keys[node] & (1 << self._bits) - 1
        slots = self._shards[shard]
        self._used[shard] += 1
        if self._used[shard] * 256 > len(slots) * (128 + shard % 64):
            grown = array("I", bytes(8 * len(slots)))
            for one in slots:
                if one:
                    self._place(grown, one)
            slots = self._shards[shard] = grown
        self._place(slots, node)

    def remove(self, key: int) -> None:
        """Take out the node with this key, which must be there; those behind it move up."""
        keys, bits, shard = self._keys, self._bits, key & (1 << self._bits) - 1
        slots = self._shards[shard]
        mask = len(slots) - 1
        hole = key >> bits & mask
        while keys[slots[hole]] != key or not slots[hole]:
            hole = hole + 1 & mask
        self._used[shard] -= 1
        at = hole
        while node := slots[at := at + 1 & mask]:
            # It may only move up to where its search begins, not past it.
            if (at - (keys[node] >> bits) & mask) >= (at - hole & mask):
                slots[hole] = node
                hole = at
        slots[hole] = 0

    def _place(self, slots: array[int], node: int) -> None:
        mask = len(slots) - 1
        at = self._keys[node] >> self._bits & mask
        while slots[at]:
            at = at + 1 & mask
        slots[at] = node
