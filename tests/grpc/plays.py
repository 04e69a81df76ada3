"""What a server does with a call, and what the call gave: for tests of one call each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from dyn_relay.grpc.status import CallFailed
from dyn_testkit.simnet import Fragmentation, Link
from tests.grpc.hand import HEAD, Hand, Outcome, message, world

TRICKLED = Link(fragmentation=Fragmentation(largest=1))
#: What comes is read as it was written, and byte by byte.
LINKS = pytest.mark.parametrize("link", [Link(), TRICKLED], ids=["whole", "trickled"])

#: Does something with a connection, and the stream on it that waits for an answer.
Play = Callable[[Hand, int], Awaitable[None]]


async def played(play: Play, link: Link | None = None) -> Outcome:
    """One call, answered by `play`."""
    async with world(link) as w:
        outcome = w.start()
        hand = await w.accept()
        await play(hand, await hand.request())
        return await outcome.wait()


async def failed(play: Play, link: Link | None = None) -> tuple[list[int], CallFailed]:
    """What one call has given, and how it failed."""
    outcome = await played(play, link)
    assert isinstance(outcome.failure, CallFailed), repr(outcome.failure)
    return outcome.numbers, outcome.failure


def ends_with(*fields: tuple[str, str], head: list[tuple[str, str]] = HEAD) -> Play:
    """One message, then these trailers."""

    async def play(hand: Hand, stream_id: int) -> None:
        await hand.head(stream_id, head)
        await hand.data(stream_id, message(7))
        await hand.end(stream_id, [*fields])

    return play


def only(*fields: tuple[str, str]) -> Play:
    """A head that is also the end."""

    async def play(hand: Hand, stream_id: int) -> None:
        await hand.head(stream_id, [*fields], end=True)

    return play


def sends(data: bytes, then: list[tuple[str, str]] | None = None) -> Play:
    """A head, these bytes, and (if given) trailers."""

    async def play(hand: Hand, stream_id: int) -> None:
        await hand.head(stream_id)
        await hand.data(stream_id, data)
        if then is not None:
            await hand.end(stream_id, then)

    return play
