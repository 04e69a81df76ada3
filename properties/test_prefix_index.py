"""The prefix index is a set of blocks for each rank and tier, whatever the engines say, in whatever order."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import product

from hypothesis import strategies as st

from dyn_relay.fleet.kv.events import Cleared, Removed, Stored, Tier, tier_of
from dyn_relay.fleet.kv.index import PrefixIndex, Rank, RankId
from properties.prove import for_all

RANKS, HASHES, TOKENS, DEPTH = "abc", 6, 2, 4

Path = tuple[int, ...]
#: What a rank says, or (None) that it goes and comes back with nothing.
History = list[tuple[str, Stored | Removed | Cleared | None]]


class Model:
    """The same, said as plainly as can be."""

    def __init__(self) -> None:
        self.names: dict[int, Path] = {}
        self.tiers: defaultdict[Path, set[Tier]] = defaultdict(set)

    def store(self, event: Stored) -> None:
        if event.parent_block_hash is None:
            path: Path = ()
        elif event.parent_block_hash in self.names:
            path = self.names[event.parent_block_hash]
        else:
            return
        tier = tier_of(event.medium)
        assert tier is not None
        for name, token in zip(event.block_hashes, event.token_ids, strict=True):
            assert isinstance(token, int)
            path = (*path, token)
            if self.names.get(name, path) != path:
                self.tiers.pop(self.names[name])
            self.names = {other: its for other, its in self.names.items() if its != path} | {name: path}
            self.tiers[path].add(tier)

    def remove(self, event: Removed) -> None:
        tier = tier_of(event.medium)
        for name in event.block_hashes:
            if name in self.names:
                path = self.names[name]
                self.tiers[path].discard(tier)
                if not self.tiers[path]:
                    del self.names[name], self.tiers[path]

    def match(self, path: Path) -> list[int]:
        blocks = [0] * len(Tier)
        for length in range(1, len(path) + 1):
            tiers = self.tiers.get(path[:length])
            if not tiers:
                break
            blocks[min(tiers)] += 1
        return blocks


hashes = st.integers(0, HASHES - 1)
media = st.sampled_from([None, *(tier.name for tier in Tier)])


@st.composite
def stores(draw: st.DrawFn) -> Stored:
    names = draw(st.lists(hashes, min_size=1, max_size=3, unique=True))
    tokens = draw(st.lists(st.integers(0, TOKENS - 1), min_size=len(names), max_size=len(names)))
    return Stored(names, draw(st.none() | hashes), list(tokens), 1, medium=draw(media))


events = stores() | st.builds(Removed, st.lists(hashes, min_size=1, max_size=3), media) | st.just(Cleared())
histories = st.lists(st.tuples(st.sampled_from(RANKS), st.none() | events), max_size=40)


def name_of(path: Path) -> int:
    return int("1" + "".join(map(str, path)), 3)


@st.composite
def honest_events(draw: st.DrawFn) -> Stored | Removed | Cleared:
    """As an engine says it that calls a block by its content, as they do."""
    path = tuple(draw(st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=DEPTH)))
    if draw(st.integers(0, 3)) == 0:
        return draw(st.just(Removed([name_of(path)], draw(media))) | st.just(Cleared()))
    begin = draw(st.integers(0, len(path) - 1))
    names = [name_of(path[:length]) for length in range(begin + 1, len(path) + 1)]
    return Stored(names, name_of(path[:begin]) if begin else None, list(path[begin:]), 1, medium=draw(media))


honest_histories = st.lists(st.tuples(st.sampled_from(RANKS), st.none() | honest_events()), max_size=40)


def all_paths() -> Iterator[Path]:
    for depth in range(1, DEPTH + 1):
        yield from product(range(TOKENS), repeat=depth)


def play(index: PrefixIndex, history: History) -> dict[str, Model]:
    ranks: dict[str, Rank] = {name: index.join(RankId(name)) for name in RANKS}
    models = {name: Model() for name in RANKS}
    for name, event in history:
        if event is None:
            index.leave(ranks[name])
            ranks[name] = index.join(RankId(name))
        else:
            index.apply(ranks[name], [event])
        if event is None or isinstance(event, Cleared):
            models[name] = Model()
        elif isinstance(event, Stored):
            models[name].store(event)
        else:
            models[name].remove(event)
    for name in RANKS:
        assert len(ranks[name]) <= sum(1 for tiers in models[name].tiers.values() if tiers)
    return models


def check_sets(history: History) -> None:
    index = PrefixIndex(1000, random.Random(1))
    models = play(index, history)
    for path in all_paths():
        told = index.match(index.chain(path, 1))
        want = {name: model.match(path) for name, model in models.items()}
        assert told == {RankId(name): blocks for name, blocks in want.items() if any(blocks)}


def check_room(history: History, limit: int) -> None:
    index = PrefixIndex(limit, random.Random(1))
    models = play(index, history)
    assert len(index) <= limit
    for path in all_paths():
        for name, blocks in index.match(index.chain(path, 1)).items():
            assert sum(blocks) <= sum(models[name.worker].match(path))


def test_it_is_a_set_for_each_rank_and_tier():
    for_all(check_sets, histories, times=2)


def test_what_it_forgets_for_want_of_room_it_never_makes_up():
    for_all(check_room, honest_histories, st.integers(1, 6), times=2)
