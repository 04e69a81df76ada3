"""A network in memory: hosts by name, bounded buffers, bytes cut anywhere, and failures on demand.

It implements `dyn_relay.net.Network`, so that a whole proxy and its workers run in one process, under
`trio.testing.MockClock` in no real time. Nothing here is random but the cuts, and these come from the seed.
"""

from __future__ import annotations

import ssl
from collections import deque
from dataclasses import dataclass, field
from random import Random

import trio

from dyn_relay.net import (
    RECEIVE_SIZE,
    ConnectFailed,
    Connection,
    ConnectionBroken,
    Ended,
    Listener,
    Transform,
    relay_loop,
)

#: What one direction of a connection holds before the writer has to wait.
DEFAULT_BUFFER = 65536
_FIRST_PORT = 40000

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """How a read cuts what is there: it gives 1 to `largest` bytes (None: all), drawn from the network's seed.

    `sizes` are used first, in order; that is what a shrinking property test wants.
    """

    largest: int | None = None
    sizes: tuple[int, ...] = ()


WHOLE = Fragmentation()


@dataclass(slots=True)
class _Cutter:
    fragmentation: Fragmentation
    random: Random
    taken: int = 0

    def take(self, available: int) -> int:
        sizes = self.fragmentation.sizes
        if self.taken < len(sizes):
            self.taken += 1
            return max(1, min(available, sizes[self.taken - 1]))
        largest = self.fragmentation.largest
        return available if largest is None else self.random.randint(1, min(available, largest))


@dataclass(slots=True)
class _Pipe:
    """One direction: bytes on their way, and what became of its ends."""

    capacity: int
    cutter: _Cutter
    data: bytearray = field(default_factory=bytearray)
    #: The writer has closed: the reader gets the rest, then the end.
    ended: bool = False
    #: The writer has reset, or the reader is gone: both sides get an error.
    broken: bool = False
    _changed: trio.Event = field(default_factory=trio.Event)

    def changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait(self) -> None:
        await self._changed.wait()

    def put(self, data: memoryview) -> int:
        count = min(len(data), self.capacity - len(self.data))
        self.data += data[:count]
        self.changed()
        return count

    def get(self, most: int) -> bytes:
        count = min(most, self.cutter.take(len(self.data)))
        taken = bytes(self.data[:count])
        del self.data[:count]
        self.changed()
        return taken

    def end(self) -> None:
        self.ended = True
        self.changed()

    def break_off(self, *, lose: bool) -> None:
        self.broken = True
        if lose:
            self.data.clear()
        self.changed()


class SimConnection:
    """One end of a connection in memory."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, peer: str) -> None:
        self.peer = peer
        self._in = incoming
        self._out = outgoing
        self._unsent = b""
        self._closed = False

    async def receive(self, max_bytes: int = RECEIVE_SIZE) -> bytes:
        await trio.lowlevel.checkpoint()
        while True:
            if self._in.data and not self._closed:
                return self._in.get(max_bytes)
            self._check(self._in)
            if self._in.ended:
                return b""
            await self._in.wait()

    async def send(self, data: bytes) -> None:
        self._unsent += data
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._unsent:
            self._check(self._out)
            self._flush()
            if self._unsent:
                await self._out.wait()
        await trio.lowlevel.cancel_shielded_checkpoint()

    def offer(self, data: bytes) -> bool:
        if self._unsent or self._closed or self._out.broken or len(self._out.data) >= self._out.capacity:
            return False
        self._unsent = data
        self._flush()
        return True

    def _flush(self) -> None:
        self._unsent = self._unsent[self._out.put(memoryview(self._unsent)) :]

    def _check(self, pipe: _Pipe) -> None:
        if self._closed:
            raise ConnectionBroken("the connection is closed")
        if pipe.broken:
            raise ConnectionBroken("Connection reset by peer")

    @property
    def pending(self) -> bool:
        return bool(self._unsent)

    async def wait_closed(self) -> None:
        await trio.lowlevel.checkpoint()
        while not (self._in.ended or self._in.broken or self._closed):
            await self._in.wait()

    def quiet(self) -> bool:
        pipe = self._in
        return not (self._closed or pipe.data or pipe.ended or pipe.broken)

    def end_sending(self) -> None:
        self._out.end()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._out.end()
            # What the peer still writes finds nobody: as with TCP, it learns so by a reset.
            self._in.break_off(lose=True)

    def abort(self) -> None:
        if not self._closed:
            self._closed = True
            # As on Linux, the peer still reads what had reached it before it gets the error.
            self._out.break_off(lose=False)
            self._in.break_off(lose=True)


class SimListener:
    """A listening address in memory."""

    def __init__(self, network: SimNetwork, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._network = network
        self._backlog: deque[SimConnection] = deque()
        self._changed = trio.Event()
        self._closed = False

    def arrive(self, connection: SimConnection) -> None:
        """A dial succeeded."""
        self._backlog.append(connection)
        self._changed.set()

    async def accept(self) -> Connection:
        await trio.lowlevel.checkpoint()
        while not self._backlog:
            if self._closed:
                raise trio.ClosedResourceError
            self._changed = trio.Event()
            await self._changed.wait()
        return self._backlog.popleft()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.forget(self)
            while self._backlog:
                self._backlog.popleft().abort()
            self._changed.set()


class SimNetwork:
    """A world of hosts. TLS is accepted and means nothing."""

    def __init__(self, seed: int = 0, fragmentation: Fragmentation = WHOLE, buffer: int = DEFAULT_BUFFER) -> None:
        self.fragmentation = fragmentation
        self.buffer = buffer
        #: Addresses whose dials hang, as behind a firewall that drops packets.
        self.hanging: set[Address] = set()
        #: Successful dials, in order.
        self.dials: list[Address] = []
        self._random = Random(seed)
        self._listeners: dict[Address, SimListener] = {}
        self._next_port = _FIRST_PORT

    async def connect(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> Connection:
        await trio.lowlevel.checkpoint()
        address = (host, port)
        if address in self.hanging:
            await trio.sleep_forever()
        listener = self._listeners.get(address)
        if listener is None:
            raise ConnectFailed(f"{host}:{port}: Connection refused")
        there, back = self._pipe(), self._pipe()
        local = f"client:{self._port()}"
        listener.arrive(SimConnection(there, back, local))
        self.dials.append(address)
        return SimConnection(back, there, f"{host}:{port}")

    async def listen(self, host: str, port: int) -> Listener:
        await trio.lowlevel.checkpoint()
        address = (host, port or self._port())
        if address in self._listeners:
            raise OSError(98, "Address already in use")
        listener = self._listeners[address] = SimListener(self, *address)
        return listener

    async def relay(self, source: Connection, sink: Connection, transform: Transform) -> Ended:
        return await relay_loop(source, sink, transform)

    @property
    def listening(self) -> frozenset[Address]:
        """The addresses that take dials now."""
        return frozenset(self._listeners)

    def forget(self, listener: SimListener) -> None:
        """A listener has closed: its address refuses from now on."""
        self._listeners.pop((listener.host, listener.port), None)

    def _pipe(self) -> _Pipe:
        return _Pipe(self.buffer, _Cutter(self.fragmentation, self._random))

    def _port(self) -> int:
        self._next_port += 1
        return self._next_port
