"""Which blocks of tokens are in which engine's cache.

A block is known by a chain: the hash of its own token ids and of the chain before it, so that the same tokens after the
same beginning are one node, whoever has them and whatever the engines call them. The first key is drawn by chance:
nobody outside can make blocks that fall on the same slots. Keys have 64 bits (61 of the one before count): among ten
million blocks a prompt's block is taken for another one with a chance of 1 in 10^11, and then a request goes where less
is cached.

A node costs 36 bytes in arrays, 6 to 12 in the table by key, and 6 to 12 for each rank that has it, in a table by the
engine's own hash, which removals and parents are named by. Memory is bounded: beyond `limit` nodes the block that has
been last of its sequence for longest goes; its parent, if it is the last then, takes its place in the line.

To forget a rank costs no look at its blocks: their sets lose it (`masks.py`), and what nobody has is cleared away
little by little (`tidy`), also whenever new blocks come.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from dyn_relay.fleet.kv import masks
from dyn_relay.fleet.kv.events import Cleared, KvEvent, Removed, Stored, Tier, tier_of
from dyn_relay.fleet.kv.slots import Slots

#: Nodes that are looked at, whether anybody has them, for each new one.
_TIDY = 2
#: In `parents`: the node is free.
_FREE = 2**32 - 1
#: Shards of the tables, as powers of two: of all nodes, of those of one rank.
_SHARDS, _RANK_SHARDS = 10, 6


class RankId(NamedTuple):
    """A publisher: a data-parallel rank of a worker."""

    worker: str
    rank: int = 0


class Rank:
    """One publisher's part of the index. Made by `PrefixIndex.join`."""

    __slots__ = ("_aliases", "_names", "_own", "_slots", "hashes", "id", "slot")

    def __init__(self, id_: RankId, slot: int, hashes: array[int]) -> None:
        self.id = id_
        #: Its number in sets; -1 once it has left.
        self.slot = slot
        self.hashes = hashes
        self.reset()

    def reset(self) -> None:
        """It has nothing."""
        self._slots = Slots(self.hashes, _RANK_SHARDS)
        #: Nodes that it calls otherwise than the rank that had them first: by its hash, and back.
        self._aliases: dict[int, int] = {}
        self._names: dict[int, int] = {}

    def find(self, hash_: int) -> int:
        """The node that it calls so, or 0."""
        return self._slots.find(hash_) or self._aliases.get(hash_, 0)

    def name(self, node: int, hash_: int) -> None:
        """It calls the node so; it has no other name for it, and no other node of this name."""
        if self.hashes[node] == hash_:
            self._slots.add(node)
        else:
            self._aliases[hash_] = node
            self._names[node] = hash_

    def unname(self, node: int) -> None:
        """It has the node no more."""
        alias = self._names.pop(node, None)
        if alias is None:
            self._slots.remove(self.hashes[node])
        else:
            del self._aliases[alias]

    def __len__(self) -> int:
        return len(self._slots) + len(self._aliases)


class PrefixIndex:
    """All blocks of all ranks."""

    def __init__(self, limit: int, rng: random.Random, count: Callable[[str], object] = lambda what: None) -> None:
        """At most `limit` nodes. `count` is told of events that change nothing: "orphan" (the parent is not known),
        "foreign" (blocks of an adapter or under a salt, which no plain prompt may use), "malformed", "medium", "full".
        """
        self.limit = limit
        self._count = count
        self._seed = rng.getrandbits(60)
        self._keys, self._hashes = array("q", [0]), array("q", [0])
        self._parents, self._children, self._sets = array("I", [0]), array("I", [0]), array("I", [0])
        #: The line of nodes without children, oldest first; node 0 is its end.
        self._before, self._after = array("I", [0]), array("I", [0])
        self._table = Slots(self._keys, _SHARDS)
        self._masks = masks.Masks()
        self._ranks: list[Rank | None] = []
        self._nodes = 0
        self._free = 0  # the first of the free nodes; `after` leads to the next
        self._hand = 0  # where `tidy` is

    def __len__(self) -> int:
        """Nodes, also those that nobody has any more and that are not cleared away yet."""
        return self._nodes

    # -- who

    def join(self, id_: RankId) -> Rank:
        """A rank that has nothing yet. `id_` is what `match` calls it."""
        slot = self._ranks.index(None) if None in self._ranks else len(self._ranks)
        rank = Rank(id_, slot, self._hashes)
        self._ranks[slot : slot + 1] = [rank]
        return rank

    def clear(self, rank: Rank) -> None:
        """Its cache is empty."""
        rank.reset()
        self._masks.strike(masks.bits(rank.slot))

    def leave(self, rank: Rank) -> None:
        """It is gone; further events of it change nothing."""
        if rank.slot >= 0:
            self.clear(rank)
            self._ranks[rank.slot] = None
            rank.slot = -1

    # -- what it has

    def apply(self, rank: Rank, events: Iterable[KvEvent]) -> None:
        """Take in what a rank says, in its order."""
        for event in events:
            if rank.slot < 0:
                return
            if isinstance(event, Cleared):
                self.clear(rank)
                continue
            tier = tier_of(event.medium)
            if tier is None:
                self._count("medium")
            elif isinstance(event, Stored):
                self._store(rank, event, tier)
            else:
                self._remove(rank, event, tier)

    def _store(self, rank: Rank, event: Stored, tier: Tier) -> None:
        size, tokens = event.block_size, event.token_ids
        if size < 1 or len(tokens) != size * len(event.block_hashes):
            self._count("malformed")
            return
        if event.lora_id is not None or event.lora_name is not None or event.cache_salt is not None:
            self._count("foreign")
            return
        parent, key = 0, self._root(size)
        if event.parent_block_hash is not None:
            parent = rank.find(event.parent_block_hash)
            if not parent:
                self._count("orphan")
                return
            key = self._keys[parent]
        if tokens and isinstance(tokens[0], tuple):
            tokens = [pair[0] if isinstance(pair, tuple) else pair for pair in tokens]
        bit, find = masks.bit(rank.slot, tier), self._table.find
        for at, hash_ in enumerate(event.block_hashes):
            key = hash((key, *tokens[at * size : (at + 1) * size]))
            node = find(key)
            if not node:
                node = self._new(key, hash_, parent)
                if not node:
                    self._count("full")
                    return
            elif not self._children[node]:  # it is the youngest again
                self._unlink(node)
                self._link(node)
            self._hold(rank, node, hash_, bit)
            parent = node
        self.tidy(_TIDY * len(event.block_hashes))

    def _hold(self, rank: Rank, node: int, hash_: int, bit: int) -> None:
        known = rank.find(hash_)
        mask = self._masks[self._sets[node]]
        if known != node:
            if known:  # the name is another block's now
                self._release(rank, known, masks.bits(rank.slot))
            if mask & masks.bits(rank.slot):
                rank.unname(node)  # the block has another name now
            rank.name(node, hash_)
        if not mask & bit:
            self._sets[node] = self._masks.swap(self._sets[node], mask | bit)

    def _remove(self, rank: Rank, event: Removed, tier: Tier) -> None:
        for hash_ in event.block_hashes:
            node = rank.find(hash_)
            if node:
                self._release(rank, node, masks.bit(rank.slot, tier))
                self._prune(node)

    def _release(self, rank: Rank, node: int, bits: int) -> None:
        mask = self._masks[self._sets[node]] & ~bits
        if not mask & masks.bits(rank.slot):
            rank.unname(node)
        self._sets[node] = self._masks.swap(self._sets[node], mask)

    # -- what is asked

    def chain(self, tokens: Sequence[int], size: int) -> list[int]:
        """The keys of all whole blocks of a sequence."""
        key, keys = self._root(size), []
        for at in range(0, len(tokens) - size + 1, size):
            key = hash((key, *tokens[at : at + size]))
            keys.append(key)
        return keys

    def match(self, chain: Iterable[int]) -> dict[RankId, list[int]]:
        """For each rank that has the first block: how many blocks in a row, by the tier (`Tier`) that they are on."""
        found: dict[int, list[int]] = {}
        alive: set[int] | None = None
        for number, run in groupby(map(self._sets.__getitem__, self._table.path(chain))):
            here = masks.holders(self._masks[number])
            alive = set(here) if alive is None else alive & here.keys()
            if not alive:
                break
            length = sum(1 for _ in run)
            for slot in alive:
                found.setdefault(slot, [0] * len(Tier))[here[slot]] += length
        ranks = self._ranks
        return {rank.id: blocks for slot, blocks in found.items() if (rank := ranks[slot]) is not None}

    def tidy(self, steps: int) -> None:
        """Look at so many nodes, in turn, and clear away what nobody has; a leaving rank leaves it behind."""
        parents, children, sets, end = self._parents, self._children, self._sets, len(self._parents)
        for _ in range(steps):
            hand = self._hand = self._hand + 1 if self._hand + 1 < end else 0
            if hand and not children[hand] and parents[hand] != _FREE and not self._masks[sets[hand]]:
                self._prune(hand)

    def _root(self, size: int) -> int:
        return hash((self._seed, size))

    # -- nodes

    def _new(self, key: int, hash_: int, parent: int) -> int:
        """A new last node of a sequence, which nobody has yet; 0 if there is no room for it."""
        node = self._free
        if node:
            self._free = self._after[node]
            self._keys[node], self._hashes[node] = key, hash_
        else:
            node = len(self._keys)
            self._keys.append(key)
            self._hashes.append(hash_)
            for numbers in (self._parents, self._children, self._sets, self._before, self._after):
                numbers.append(0)
        self._parents[node] = parent
        self._nodes += 1
        self._table.add(node)
        if parent:
            if not self._children[parent]:
                self._unlink(parent)
            self._children[parent] += 1
        self._link(node)
        while self._nodes > self.limit:
            oldest = self._after[0]
            self._evict(oldest)
            if oldest == node:
                return 0
        return node

    def _evict(self, node: int) -> None:
        for slot in masks.holders(self._masks[self._sets[node]]):
            rank = self._ranks[slot]
            assert rank is not None
            rank.unname(node)
        self._sets[node] = self._masks.swap(self._sets[node], 0)
        self._prune(node)

    def _prune(self, node: int) -> None:
        """Free a node that nobody has and that nothing follows, and then its parent, if that is such a one."""
        while node and not self._children[node] and not self._masks[self._sets[node]]:
            parent = self._parents[node]
            place = self._before[node]
            self._unlink(node)
            self._sets[node] = self._masks.swap(self._sets[node], 0)
            self._table.remove(self._keys[node])
            self._parents[node] = _FREE
            self._after[node], self._free = self._free, node
            self._nodes -= 1
            if parent:
                self._children[parent] -= 1
                if not self._children[parent]:
                    self._link(parent, place)
            node = parent

    def _link(self, node: int, place: int | None = None) -> None:
        """Put a node into the line behind `place`, or at its young end."""
        before = self._before[0] if place is None else place
        after = self._after[before]
        self._before[node], self._after[node] = before, after
        self._after[before] = self._before[after] = node

    def _unlink(self, node: int) -> None:
        before, after = self._before[node], self._after[node]
        self._after[before], self._before[after] = after, before
