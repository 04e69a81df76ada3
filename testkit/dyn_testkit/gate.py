"""A process that is stopped (SIGSTOP): its machine still takes connections and bytes, and it does nothing itself."""

from __future__ import annotations

import ssl

import trio

from dyn_relay.net import RECEIVE_SIZE, Connection, Network
from dyn_testkit.between import ConnectionBetween, NetworkBetween


class GatedNetwork(NetworkBetween):
    """All that a process does on a network waits while the gate is shut."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._opened = trio.Event()
        self._opened.set()

    def shut(self) -> None:
        """Nothing passes any more."""
        if self._opened.is_set():
            self._opened = trio.Event()

    def open(self) -> None:
        """What has waited passes."""
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def passed(self) -> None:
        """Return once it is open."""
        while not self._opened.is_set():
            await self._opened.wait()

    async def connect(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> Connection:
        await self.passed()
        return _Gated(await self.inner.connect(host, port, tls), self)

    async def accepted(self, connection: Connection) -> Connection:
        try:
            await self.passed()
        except trio.Cancelled:
            connection.abort()
            raise
        return _Gated(connection, self)


class _Gated(ConnectionBetween):
    def __init__(self, connection: Connection, gate: GatedNetwork) -> None:
        super().__init__(connection)
        self._gate = gate
        #: Read when the gate shut, and not given to anybody yet.
        self._kept: bytes | None = None
        self.wait_closed = self._closed
        self.quiet = self._quiet

    async def receive(self, max_bytes: int = RECEIVE_SIZE) -> bytes:
        await self._gate.passed()
        if self._kept is None:
            self._kept = await self.inner.receive(max_bytes)
            await self._gate.passed()
        data, self._kept = self._kept, None
        return data

    def _quiet(self) -> bool:
        return self._kept is None and self.inner.quiet()

    async def send(self, data: bytes) -> None:
        await self._gate.passed()
        await self.inner.send(data)

    def offer(self, data: bytes) -> bool:
        return self._gate.is_open and self.inner.offer(data)

    async def _closed(self) -> None:
        await self.inner.wait_closed()
        await self._gate.passed()
