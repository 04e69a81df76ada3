"""The index of prompts against one that remembers everything, and what it costs."""

from __future__ import annotations

import tracemalloc
from array import array

from hypothesis import given
from hypothesis import strategies as st

from dyn_relay.fleet.policies.sent import BLOCK, BLOCK_TEXT, BYTES_A_BLOCK, SentPrefixes, chain

IDS = st.lists(st.integers(0, 1), min_size=0, max_size=5)


def names(blocks: list[int], space: bytes = b"") -> list[int]:
    return chain(space, array("I", [token for block in blocks for token in [block] * BLOCK]))


def test_a_name_stands_for_its_block_and_all_before() -> None:
    assert names([1, 2, 3])[:2] == names([1, 2])
    assert not set(names([1, 2, 3])) & set(names([2, 2, 3]))
    assert not set(names([1], b"a")) & set(names([1], b"b"))
    assert chain(b"", [7] * BLOCK) == chain(b"", array("I", [7] * BLOCK))


def test_a_rest_counts_as_not_there() -> None:
    assert len(chain(b"", range(2 * BLOCK - 1))) == 1
    assert len(chain(b"", "x" * (2 * BLOCK_TEXT + 1))) == 2
    assert chain(b"", range(BLOCK - 1)) == chain(b"", "") == []


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), IDS, st.integers(0, 2)),
            st.tuples(st.just("forget"), st.just([]), st.integers(0, 2)),
            st.tuples(st.just("drop"), IDS, st.integers(0, 2)),
        ),
        max_size=20,
    ),
    IDS,
)
def test_it_finds_what_was_sent(steps: list[tuple[str, list[int], int]], wanted: list[int]) -> None:
    index = SentPrefixes(1 << 30)
    numbers = [index.number() for _ in range(3)]
    had: list[set[int]] = [set(), set(), set()]
    for what, blocks, at in steps:
        chained = names(blocks)
        if what == "add":
            index.add(chained, numbers[at])
            had[at] |= set(chained)
        elif what == "forget":
            index.forget(numbers[at])
            numbers[at], had[at] = index.number(), set()
        elif chained:
            index.drop(chained[-1], numbers[at])
            had[at].discard(chained[-1])
    expected = {}
    for at, number in enumerate(numbers):
        depth = 0
        for name in names(wanted):
            if name not in had[at]:
                break
            depth += 1
        if depth:
            expected[number] = depth
    assert index.match(names(wanted)) == expected


def test_numbers_are_given_again_once_nothing_can_have_them() -> None:
    """Workers that restart for years do not widen the sets for ever; and nobody inherits a cache."""
    index = SentPrefixes(BYTES_A_BLOCK * 40)
    given_ = []
    cold = names([8, 8])
    gone = index.number()
    index.add(cold, gone)
    index.forget(gone)
    for round_ in range(200):
        number = index.number()
        given_.append(number)
        chained = names([7, 1, 2])
        assert number not in index.match(chained)
        assert number not in index.match(cold)
        index.drop(cold[0], number)
        index.add(chained, number)
        index.add(names([1000 + round_, 5]), number)
        assert index.match(chained)[number] == 3
        index.forget(number)
        assert number not in index.match(chained)
    assert max(given_) < 60


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    limit = BYTES_A_BLOCK * 1000
    index = SentPrefixes(limit)
    number = index.number()
    hot = names([1, 2, 3])
    for round_ in range(5000):
        index.add(names([10 + round_, 1]), number)
        if round_ % 100 == 0:
            index.add(hot, number)
        assert len(index) <= 1002
    assert index.match(hot) == {number: 3}
    assert index.match(names([10, 1])) == {}
    assert index.match(names([10 + 4999, 1])) == {number: 2}


def test_it_keeps_to_its_bytes() -> None:
    """While it grows, and with sets of 256 targets."""
    index = SentPrefixes(1 << 40)
    numbers = [index.number() for _ in range(256)]
    tracemalloc.start()
    try:
        for round_ in range(60):
            chained = [hash((round_, at, b"x")) for at in range(2000)]
            index.add(chained, numbers[0])
            index.add(chained, numbers[255])
            del chained
            size = tracemalloc.get_traced_memory()[0]
            if len(index) > 20_000:
                assert size / len(index) <= BYTES_A_BLOCK, len(index)
    finally:
        tracemalloc.stop()
