"""A connection inside one process: two ends, a bounded buffer each way. Implements `net.Connection`."""

from __future__ import annotations

import trio

from dyn_relay.net import RECEIVE_SIZE, ConnectionBroken

#: Bytes on their way in one direction. A writer that is further ahead waits, as at a full socket.
CAPACITY = 65536


class _Lane:
    """One direction."""

    __slots__ = ("abandoned", "changed", "data", "ended", "reset")

    def __init__(self) -> None:
        self.data = bytearray()
        #: The writer writes no more.
        self.ended = False
        #: And wants that to be seen as an error.
        self.reset = False
        #: The reader reads no more: what is written finds nobody.
        self.abandoned = False
        self.changed = trio.lowlevel.ParkingLot()


class Pipe:
    """One end."""

    __slots__ = ("_closed", "_in", "_out", "_unsent", "peer")

    def __init__(self, incoming: _Lane, outgoing: _Lane, peer: str) -> None:
        self.peer = peer
        self._in = incoming
        self._out = outgoing
        self._unsent: bytes | memoryview = b""
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
        data = bytes(lane.data[:max_bytes])
        del lane.data[:max_bytes]
        lane.changed.unpark_all()
        # A writer that is always ready must not keep all others waiting.
        await trio.lowlevel.cancel_shielded_checkpoint()
        return data

    async def send(self, data: bytes) -> None:
        # First of all, so that a cancellation finds the data in its place.
        self._unsent = b"".join((self._unsent, data)) if self._unsent else data
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._unsent:
            self._flush()
            if self._unsent:
                await self._out.changed.park()

    def offer(self, data: bytes) -> bool:
        if self._unsent or self._closed or self._out.ended or self._out.abandoned:
            return False
        self._unsent = data
        self._flush()
        return True

    def _flush(self) -> None:
        lane = self._out
        if self._closed or lane.ended or lane.abandoned:
            raise ConnectionBroken("the connection is closed")
        room = CAPACITY - len(lane.data)
        if room > 0:
            lane.data += self._unsent[:room]
            self._unsent = memoryview(self._unsent)[room:] if room < len(self._unsent) else b""
            lane.changed.unpark_all()

    @property
    def pending(self) -> bool:
        return bool(self._unsent)

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
