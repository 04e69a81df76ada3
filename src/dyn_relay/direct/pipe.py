"""A connection inside one process: two ends, a bounded buffer each way. Implements `net.Connection`."""

from __future__ import annotations

from collections import deque

import trio

from dyn_relay.net import RECEIVE_SIZE, ConnectionBroken

#: Bytes on their way in one direction above which a writer waits. What it has given by then lies here all the same,
#: uncut and uncopied: of an answer that nobody reads this is one event more.
CAPACITY = 16384


class _Lane:
    """One direction."""

    __slots__ = ("abandoned", "changed", "data", "ended", "reset", "size")

    def __init__(self) -> None:
        self.data: deque[bytes | memoryview] = deque()
        #: Bytes of `data`.
        self.size = 0
        #: The writer writes no more.
        self.ended = False
        #: And wants that to be seen as an error.
        self.reset = False
        #: The reader reads no more: what is written finds nobody.
        self.abandoned = False
        self.changed = trio.lowlevel.ParkingLot()

    def put(self, data: bytes) -> None:
        self.data.append(data)
        self.size += len(data)
        self.changed.unpark_all()

    def take(self, most: int) -> bytes:
        """Up to `most` bytes of what is there."""
        parts: list[bytes | memoryview] = []
        while self.data and most:
            part = self.data.popleft()
            if len(part) > most:
                self.data.appendleft(memoryview(part)[most:])
                part = memoryview(part)[:most]
            parts.append(part)
            most -= len(part)
            self.size -= len(part)
        self.changed.unpark_all()
        return b"".join(parts)


class Pipe:
    """One end."""

    __slots__ = ("_closed", "_in", "_out", "peer")

    def __init__(self, incoming: _Lane, outgoing: _Lane, peer: str) -> None:
        self.peer = peer
        self._in = incoming
        self._out = outgoing
        self._closed = False

    async def receive(self, max_bytes: int = RECEIVE_SIZE) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        lane = self._in
        while not lane.data or self._closed or lane.reset:
            if self._closed or lane.reset:
                raise ConnectionBroken("the connection is closed" if self._closed else "the connection was reset")
            if lane.ended:
                return b""
            await lane.changed.park()
        data = lane.take(max_bytes)
        # A writer that is always ready must not keep all others waiting.
        await trio.lowlevel.cancel_shielded_checkpoint()
        return data

    async def send(self, data: bytes) -> None:
        # First of all, so that a cancellation finds the data in its place.
        if not self._put(data):
            raise ConnectionBroken("the connection is closed")
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.pending:
            await self._out.changed.park()
            if self._deaf:
                raise ConnectionBroken("the connection is closed")

    def offer(self, data: bytes) -> bool:
        return not self.pending and self._put(data)

    def _put(self, data: bytes) -> bool:
        if self._deaf:
            return False
        if data:
            self._out.put(data)
        return True

    @property
    def _deaf(self) -> bool:
        """What is written finds nobody."""
        return self._closed or self._out.ended or self._out.abandoned

    @property
    def pending(self) -> bool:
        return self._out.size > CAPACITY

    async def wait_closed(self) -> None:
        await trio.lowlevel.checkpoint()
        while not (self._closed or self._in.ended):
            await self._in.changed.park()

    def quiet(self) -> bool:
        return not (self._closed or self._in.data or self._in.ended)

    def end_sending(self) -> None:
        self._out.ended = True
        self._out.changed.unpark_all()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._in.abandoned = True
            self._in.data.clear()
            self._in.size = 0
            self._in.changed.unpark_all()
            self.end_sending()

    def abort(self) -> None:
        if not self._closed:
            self._out.reset = True
            self.close()


def pipe(near: str, far: str) -> tuple[Pipe, Pipe]:
    """Both ends of a new connection, each with the other's name for its peer: the one that dialled, and the other."""
    there, back = _Lane(), _Lane()
    return Pipe(back, there, far), Pipe(there, back, near)
