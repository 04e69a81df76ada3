"""Which blocks are where; `properties/test_prefix_index.py` has the rest."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from dyn_relay.fleet.kv.events import Cleared, Removed, Stored, Tier
from dyn_relay.fleet.kv.index import PrefixIndex, Rank, RankId

A, B = RankId("a"), RankId("b")


def made(limit: int = 1000) -> tuple[PrefixIndex, Rank, Rank, Counter[str]]:
    counts: Counter[str] = Counter()
    index = PrefixIndex(limit, random.Random(1), lambda what: counts.update([what]))
    return index, index.join(A), index.join(B), counts


def stored(tokens: str, parent: str | None = None, medium: str | None = "GPU", **fields: object) -> Stored:
    """Blocks of one token; a block is called by the letters up to it, `parent` first."""
    before = parent or ""
    names = [hash_of(before + tokens[: length + 1]) for length in range(len(tokens))]
    return Stored(names, hash_of(parent) if parent else None, ids(tokens), 1, medium=medium, **fields)  # type: ignore[arg-type]


def removed(*paths: str, medium: str = "GPU") -> Removed:
    return Removed([hash_of(path) for path in paths], medium)


def hash_of(path: str) -> int:
    return int.from_bytes(path.encode().rjust(7, b"\0"))


def ids(tokens: str) -> list[int | tuple[int, int]]:
    return list(map(ord, tokens))


def has(index: PrefixIndex, tokens: str) -> dict[RankId, int]:
    return {rank: sum(blocks) for rank, blocks in index.match(index.chain(list(map(ord, tokens)), 1)).items()}


def test_the_longest_prefix_of_each_rank() -> None:
    index, a, b, _ = made()
    index.apply(a, [stored("abc"), stored("xy", parent="ab")])
    index.apply(b, [stored("ab")])
    assert has(index, "abc") == {A: 3, B: 2}
    assert has(index, "abxyz") == {A: 4, B: 2}
    assert has(index, "b") == {}
    index.apply(a, [removed("ab")])
    assert has(index, "abc") == {A: 1, B: 2}


def test_a_block_may_be_on_several_tiers_and_counts_on_the_nearest() -> None:
    """Removal is by tier."""
    index, a, _, _ = made()
    index.apply(a, [stored("ab"), stored("abc", medium="CPU_PINNED"), stored("d", parent="abc", medium="DISK")])
    chain = index.chain(list(b"abcd"), 1)
    assert index.match(chain) == {A: [2, 1, 1, 0]}
    index.apply(a, [removed("ab")])
    assert index.match(chain) == {A: [1, 2, 1, 0]}
    index.apply(a, [removed("ab", medium="CPU_PINNED")])
    assert index.match(chain) == {A: [1, 0, 0, 0]}
    assert list(Tier) == [0, 1, 2, 3]


def test_what_is_cleared_and_who_leaves_costs_the_others_nothing() -> None:
    index, a, b, _ = made()
    for rank in (a, b):
        index.apply(rank, [stored("abc")])
    index.apply(a, [Cleared()])
    assert has(index, "abc") == {B: 3}
    index.apply(a, [stored("ab")])
    assert has(index, "abc") == {A: 2, B: 3}
    index.leave(b)
    index.apply(b, [stored("abc")])
    assert has(index, "abc") == {A: 2}
    index.tidy(100)
    assert len(index) == 2
    index.leave(a)
    index.tidy(100)
    assert len(index) == 0


def test_a_slot_that_is_taken_again_has_nothing_of_the_one_before() -> None:
    index, a, _, _ = made()
    index.apply(a, [stored("abc")])
    index.leave(a)
    again = index.join(RankId("c"))
    assert has(index, "abc") == {}
    index.apply(again, [stored("a")])
    assert has(index, "abc") == {RankId("c"): 1}


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (stored("x", parent="unknown"[:3]), "orphan"),
        (stored("x", lora_id=3), "foreign"),
        (stored("x", lora_name="adapter"), "foreign"),
        (stored("x", cache_salt="s"), "foreign"),
        (stored("x", medium="TAPE"), "medium"),
        (Removed([1], "TAPE"), "medium"),
        (Stored([1, 2], None, [1, 2, 3], 2), "malformed"),
        (Stored([1], None, [], 0), "malformed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_changes_nothing_is_counted(event: Stored | Removed, what: str) -> None:
    index, a, _, counts = made()
    index.apply(a, [stored("ab"), event, stored("c", parent="ab")])
    assert has(index, "abc") == {A: 3}
    assert (len(index), counts) == (3, Counter({what: 1}))


def test_pairs_of_tokens_count_by_their_first() -> None:
    """Speculative decoding names a position by the token there and the next one."""
    index, a, _, _ = made()
    index.apply(a, [Stored([1, 2], None, [(97, 98), (98, 99)], 1)])
    assert has(index, "abc") == {A: 2}


def test_blocks_of_different_sizes_are_different() -> None:
    index, a, b, _ = made()
    index.apply(a, [Stored([1, 2], None, ids("abcd"), 2)])
    index.apply(b, [stored("abcd")])
    assert index.match(index.chain(list(b"abcde"), 2)) == {A: [2, 0, 0, 0]}
    assert has(index, "abcde") == {B: 4}


def test_the_oldest_leaf_goes_first() -> None:
    """A parent whose last child went takes the child's place in the line."""
    index, a, _, _ = made(limit=5)
    index.apply(a, [stored("ab"), stored("xy"), stored("k")])
    index.apply(a, [stored("ab")])  # the youngest again
    index.apply(a, [stored("1")])
    assert [has(index, path).get(A, 0) for path in ("ab", "xy", "k", "1")] == [2, 1, 1, 1]
    index.apply(a, [stored("2")])
    assert [has(index, path).get(A, 0) for path in ("ab", "xy", "k", "1", "2")] == [2, 0, 1, 1, 1]
    index.apply(a, [stored("3")])
    assert [has(index, path).get(A, 0) for path in ("ab", "k", "1", "2", "3")] == [2, 0, 1, 1, 1]
    index.apply(a, [removed("k", "xy", "ab", "a")])  # some of it is no longer known
    assert [has(index, path).get(A, 0) for path in ("ab", "1", "2", "3")] == [0, 1, 1, 1]


def test_a_sequence_longer_than_there_is_room_for_is_known_up_to_there() -> None:
    index, a, _, counts = made(limit=3)
    index.apply(a, [stored("abcdef")])
    assert has(index, "abcdef") == {A: 3}
    assert (len(index), counts) == (3, Counter({"full": 1}))


def test_ranks_may_call_the_same_block_otherwise() -> None:
    """Hashes are opaque: what one rank calls a block says nothing of another's."""
    index, a, b, _ = made()
    index.apply(a, [stored("ab")])
    index.apply(b, [Stored([77, 78], None, ids("ab"), 1)])
    index.apply(b, [Removed([hash_of("ab")], None)])  # not its name
    assert has(index, "ab") == {A: 2, B: 2}
    index.apply(b, [Removed([78], None), Stored([79], 77, ids("c"), 1)])
    assert has(index, "ab") == {A: 2, B: 1}
    assert has(index, "ac") == {A: 1, B: 2}


def test_tables_grow_and_shrink_without_losing_anything() -> None:
    """Thousands of sequences, half of them removed again in another order."""
    index, a, _, _ = made(limit=100_000)
    dice = random.Random(5)
    sequences: list[Sequence[int]] = [[dice.randrange(50) for _ in range(6)] for _ in range(3000)]
    names = {}
    for sequence in sequences:
        for length in range(1, 7):
            path = tuple(sequence[:length])
            if path not in names:
                names[path] = dice.getrandbits(63)
                index.apply(a, [Stored([names[path]], names.get(path[:-1]), [path[-1]], 1)])
    assert len(index) == len(names)
    gone = set(dice.sample(sorted(names), len(names) // 2))
    for path in sorted(gone, key=len, reverse=True):
        index.apply(a, [Removed([names[path]])])
    for sequence in sequences:
        want = next((n for n in range(6) if tuple(sequence[: n + 1]) in gone), 6)
        assert sum(index.match(index.chain(sequence, 1)).get(A, [])) == want
