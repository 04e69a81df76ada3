"""Whatever the link, the cuts, the cancellations and the faults: every byte arrives, once, in order."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import trio
import trio.testing
from hypothesis import event, given, settings
from hypothesis import strategies as st
from simnet_kit import network_of, pair, scheduled

from dyn_testkit import strategies
from dyn_testkit.simnet import Fragmentation, Link, NetEvent, SimConnection, SimNetwork

#: s: how long somebody waits for what it has begun, or before it begins the next thing.
SPANS = st.sampled_from([0.0, 0.0005, 0.01, 0.3, 60.0])
#: Somebody who never waits gets nothing.
PATIENCE = st.lists(SPANS, max_size=8).map(lambda spans: [*spans, 60.0])
PIECES = st.lists(st.integers(0, 500), max_size=6)
FAULTS = st.lists(
    st.tuples(
        SPANS,
        st.one_of(
            st.tuples(st.just("partition"), st.booleans()),
            st.tuples(st.just("link"), strategies.links(3)),
        ),
    ),
    max_size=4,
)


class Side:
    """One end of the connection: what it sends, and what it has read."""

    def __init__(self, connection: SimConnection, pieces: list[int], patience: list[float]) -> None:
        self.connection = connection
        self.patience = cycle(patience)
        self.sent = b"".join(bytes([at % 251]) * size for at, size in enumerate(pieces, 1))
        self.pieces = pieces
        self.read = b""

    async def write(self, offers: bool) -> None:
        """Each piece is begun once, and the writing of it cancelled when patience is lost."""
        at = 0
        for size in self.pieces:
            piece, at = self.sent[at : at + size], at + size
            if offers and self.connection.offer(piece):
                continue
            with trio.move_on_after(next(self.patience)):
                await self.connection.send(piece)
        await self.connection.send(b"")
        self.connection.end_sending()

    async def reading(self, most: int) -> None:
        while True:
            span = next(self.patience)
            with trio.move_on_after(span) as scope:
                data = await self.connection.receive(most)
                self.read += data
                if not data:
                    return
            if scope.cancelled_caught:
                await trio.sleep(span)


async def disturb(network: SimNetwork, faults: list[tuple[float, tuple[str, Any]]]) -> None:
    for pause, (fault, how) in faults:
        await trio.sleep(pause)
        if fault == "link":
            network.link("a", "b", how)
        else:
            network.partition("a", "b", one_way=how)
            await trio.sleep(pause)
            network.heal("a", "b")


async def converse(network: SimNetwork, pieces, patience, faults, most: int, offers: bool) -> None:
    near, far = await pair(network)
    sides = [Side(near, pieces, patience), Side(far, pieces[::-1], patience[::-1])]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(disturb, network, faults)
        for side in sides:
            nursery.start_soon(side.write, offers)
            nursery.start_soon(side.reading, most)
    assert sides[0].read == sides[1].sent
    assert sides[1].read == sides[0].sent
    for side in sides:
        assert not side.connection.pending
        side.connection.close()
    assert not network.reset("a", "b")


def run(link: Link, *program: Any) -> list[NetEvent]:
    events: list[NetEvent] = []

    async def main() -> None:
        with trio.fail_after(1e9):
            await converse(network_of(link, observe=events.append), *program)

    with scheduled(0):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return events


@settings(max_examples=150)
@given(strategies.links(8), PIECES, PATIENCE, FAULTS, st.sampled_from([65536, 10]), st.booleans())
def test_the_stream_arrives_whole_and_the_same_seed_tells_the_same(link, pieces, patience, faults, most, offers):
    program = (pieces, patience, faults, most, offers)
    events = run(link, *program)
    event(f"partitions: {sum(one.kind == 'partition' for one in events) > 0}")
    assert run(link, *program) == events
    assert [one.time for one in events] == sorted(one.time for one in events)


@settings(max_examples=100)
@given(strategies.fragmentations())
def test_reads_are_as_small_as_they_are_cut(cuts: Fragmentation) -> None:
    reads: list[bytes] = []

    async def main() -> None:
        near, far = await pair(network_of(Link(fragmentation=cuts, buffer=100)))

        async def write() -> None:
            await near.send(bytes(700))
            near.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            while data := await far.receive():
                reads.append(data)

    trio.run(main)
    sizes = [len(data) for data in reads]
    assert sum(sizes) == 700
    assert all(size <= most for size, most in zip(sizes, cuts.sizes, strict=False))
    assert all(size <= (cuts.largest or 700) for size in sizes[len(cuts.sizes) :])
