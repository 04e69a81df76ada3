"""A network before another one, as a base: whatever is not overridden goes through as it is."""

from __future__ import annotations

import ssl

from dyn_relay.net import RECEIVE_SIZE, Connection, Ended, Listener, Network, Sink, Transform, relay_loop


class ConnectionBetween:
    """A `Connection` before another one."""

    def __init__(self, connection: Connection) -> None:
        self.peer = connection.peer
        self.inner = connection
        self.wait_closed = connection.wait_closed
        self.quiet = connection.quiet
        self.end_sending = connection.end_sending
        self.close = connection.close
        self.abort = connection.abort

    async def receive(self, max_bytes: int = RECEIVE_SIZE) -> bytes:
        return await self.inner.receive(max_bytes)

    async def send(self, data: bytes) -> None:
        await self.inner.send(data)

    def offer(self, data: bytes) -> bool:
        return self.inner.offer(data)

    @property
    def pending(self) -> bool:
        return self.inner.pending


class ListenerBetween:
    """A `Listener` before another one."""

    def __init__(self, listener: Listener, network: NetworkBetween) -> None:
        self.host, self.port = listener.host, listener.port
        self.close = listener.close
        self._listener = listener
        self._network = network

    async def accept(self) -> Connection:
        return await self._network.accepted(await self._listener.accept())


class NetworkBetween:
    """A `Network` before another one."""

    def __init__(self, network: Network) -> None:
        self.inner = network

    async def connect(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> Connection:
        return await self.inner.connect(host, port, tls)

    async def listen(self, host: str, port: int) -> Listener:
        return ListenerBetween(await self.inner.listen(host, port), self)

    async def accepted(self, connection: Connection) -> Connection:
        """What stands before a connection that has come in."""
        return connection

    async def relay(self, source: Connection, sink: Sink, transform: Transform) -> Ended:
        return await relay_loop(source, sink, transform)
