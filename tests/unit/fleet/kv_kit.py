"""Publishers and subscribers of KV events in tests: a real socket, or a wire that does as it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import trio

from dyn_relay.fleet.kv.subscriber import Follower, Source, Subscriber

END = 2**64 - 1


class Publisher:
    """One publisher on wires in memory, and what it does to its subscriber."""

    def __init__(self, first: int = 0) -> None:
        self.next = first
        self.kept: list[tuple[int, bytes]] = []
        #: Answer replays with these frames instead, one list a question; then as usual.
        self.instead: list[list[list[bytes]]] = []
        #: Numbers that replays were asked from.
        self.asked: list[int] = []
        self.silent = False
        self._live, self._incoming = trio.open_memory_channel[list[bytes]](1000)

    def publish(self, payload: bytes, *, sent: bool = True, kept: bool = True) -> None:
        """One more batch."""
        number, self.next = self.next, self.next + 1
        if kept:
            self.kept.append((number, payload))
        if sent:
            self.send(number, payload)

    def send(self, number: int, payload: bytes, topic: bytes = b"t") -> None:
        """Bring this to the subscriber."""
        self.raw([topic, number.to_bytes(8), payload])

    def raw(self, frames: list[bytes]) -> None:
        self._live.send_nowait(frames)

    def restart(self, first: int = 0) -> None:
        """Another process."""
        self.next = first
        self.kept.clear()

    def source(self, *, replays: bool = True) -> Source:
        @contextmanager
        def subscribe() -> Iterator[_Wire]:
            yield _Wire(self._incoming.receive, self._ignore)

        @contextmanager
        def ask() -> Iterator[_Wire]:
            out, into = trio.open_memory_channel[list[bytes]](1000)
            yield _Wire(into.receive, lambda frames: self._answer(frames, out))

        return Source(subscribe, ask if replays else None, b"t")

    def _ignore(self, frames: list[bytes]) -> None:
        raise AssertionError("a subscription sends nothing")

    def _answer(self, frames: list[bytes], out: trio.MemorySendChannel[list[bytes]]) -> None:
        assert frames[0] == b""
        since = int.from_bytes(frames[1])
        self.asked.append(since)
        if self.silent:
            return
        told = [[b"", b"t", number.to_bytes(8), payload] for number, payload in self.kept if number >= since]
        for one in self.instead.pop(0) if self.instead else [*told, [b"", b"", END.to_bytes(8), b""]]:
            out.send_nowait(one)


class _Wire:
    def __init__(self, receive: Callable[[], object], send: Callable[[list[bytes]], None]) -> None:
        self.receive = receive
        self.send = send


class Followed:
    """What a subscriber has made of it."""

    def __init__(self) -> None:
        #: Payloads in the order of being taken in; emptied when all was dropped.
        self.has: list[bytes] = []
        self.counts: Counter[str] = Counter()
        self.restarts = 0

    def follower(self) -> Follower:
        def restarted() -> None:
            self.restarts += 1

        return Follower(self.has.append, self.has.clear, restarted, lambda what: self.counts.update([what]))


@asynccontextmanager
async def following(publisher: Publisher, *, replays: bool = True) -> AsyncIterator[Followed]:
    """A subscriber, in virtual time, that has settled."""
    followed = Followed()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Subscriber(publisher.source(replays=replays), followed.follower()).run)
        await trio.testing.wait_all_tasks_blocked()
        yield followed
        nursery.cancel_scope.cancel()


def batch(*events: object, ts: float = 1.0, rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), rank])
