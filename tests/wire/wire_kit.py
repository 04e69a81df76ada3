"""The network seam in memory: no kernel, so that a MockClock may jump while bytes are under way."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Callable, Iterable

import trio

from dyn_relay.net import RECEIVE_SIZE, ConnectFailed, Connection, ConnectionBroken, Ended, Sink, Transform, relay_loop


class Pipe:
    """One direction of a connection."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.data = bytearray()
        self.ended = False
        self.broken = False
        self.abandoned = False
        self.changed = trio.lowlevel.ParkingLot()


class MemoryConnection:
    """One end of an in-memory connection; reads give at most `fragment` bytes."""

    def __init__(self, inbound: Pipe, outbound: Pipe, peer: str) -> None:
        self.peer = peer
        self.inbound = inbound
        self.outbound = outbound
        self.fragment = 1 << 30
        self.unsent = b""
        self.closed = False

    async def receive(self, max_bytes: int = RECEIVE_SIZE) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        pipe = self.inbound
        while not pipe.data:
            if self.closed or pipe.broken:
                raise ConnectionBroken("reset")
            if pipe.ended:
                return b""
            await pipe.changed.park()
        size = min(max_bytes, self.fragment)
        data = bytes(pipe.data[:size])
        del pipe.data[:size]
        pipe.changed.unpark_all()
        return data

    async def send(self, data: bytes) -> None:
        self.unsent += data
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.unsent:
            self._flush()
            if self.unsent:
                await self.outbound.changed.park()

    def _flush(self) -> None:
        pipe = self.outbound
        if self.closed or pipe.abandoned or pipe.ended:
            raise ConnectionBroken("the peer is gone")
        room = pipe.capacity - len(pipe.data)
        pipe.data += self.unsent[:room]
        self.unsent = self.unsent[room:]
        pipe.changed.unpark_all()

    def offer(self, data: bytes) -> bool:
        if self.unsent or self.closed:
            return False
        self.unsent = data
        self._flush()
        return True

    async def wait_closed(self) -> None:
        while not (self.closed or self.inbound.ended or self.inbound.broken):
            await self.inbound.changed.park()

    def quiet(self) -> bool:
        return not (self.closed or self.inbound.data or self.inbound.ended or self.inbound.broken)

    def end_sending(self) -> None:
        self.outbound.ended = True
        self.outbound.changed.unpark_all()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.inbound.abandoned = True
            self.inbound.changed.unpark_all()
            self.end_sending()

    def abort(self) -> None:
        if not self.closed:
            self.outbound.broken = True
            self.outbound.data.clear()
            self.close()


def connection_pair(capacity: int = 1 << 30) -> tuple[MemoryConnection, MemoryConnection]:
    """Two ends of one connection: client's and server's."""
    up, down = Pipe(capacity), Pipe(capacity)
    return MemoryConnection(down, up, "server:1"), MemoryConnection(up, down, "client:1")


class MemoryListener:
    """Accepts what `MemoryNetwork.connect` dials."""

    def __init__(self, network: MemoryNetwork, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._network = network
        self.arrivals, self._accepts = trio.open_memory_channel[MemoryConnection](1000)

    async def accept(self) -> Connection:
        return await self._accepts.receive()

    def close(self) -> None:
        self._network.listeners.pop((self.host, self.port), None)
        self._accepts.close()


class MemoryNetwork:
    """Hosts without a kernel. `dialed` keeps the server's end of each connection."""

    def __init__(self) -> None:
        self.listeners: dict[tuple[str, int], MemoryListener] = {}
        self.dialed: list[MemoryConnection] = []
        self.capacity = 1 << 30
        #: Called with each new pair (client's end, server's end) before either side sees it.
        self.on_connect: Callable[[MemoryConnection, MemoryConnection], None] = lambda client, server: None
        #: Addresses that never answer.
        self.black_holes: set[tuple[str, int]] = set()
        self._ports = itertools.count(1)

    async def connect(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> MemoryConnection:
        await trio.lowlevel.checkpoint()
        if (host, port) in self.black_holes:
            await trio.sleep_forever()
        listener = self.listeners.get((host, port))
        if listener is None:
            raise ConnectFailed(f"{host}:{port}: Connection refused")
        client, server = connection_pair(self.capacity)
        self.on_connect(client, server)
        self.dialed.append(server)
        listener.arrivals.send_nowait(server)
        return client

    async def listen(self, host: str, port: int) -> MemoryListener:
        listener = MemoryListener(self, host, port or next(self._ports))
        self.listeners[host, listener.port] = listener
        return listener

    async def relay(self, source: Connection, sink: Sink, transform: Transform) -> Ended:
        return await relay_loop(source, sink, transform)


async def read_all(connection: Connection) -> bytes:
    """All bytes until the end."""
    data = b""
    while more := await connection.receive():
        data += more
    return data


async def read_until(connection: Connection, end: bytes) -> bytes:
    """Bytes until they end with `end`."""
    data = b""
    while not data.endswith(end):
        more = await connection.receive()
        assert more, data
        data += more
    return data


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """`data` cut at these offsets; no piece is empty."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


def feed_all(feed: Callable[[bytes], object], wire: bytes, step: int) -> None:
    """Feed `wire` in pieces of `step` bytes."""
    for at in range(0, len(wire), step):
        feed(wire[at : at + step])
