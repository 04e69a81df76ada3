"""What a router is told of leases, overheard where it listens: who says so, when it was read, for how long."""

from __future__ import annotations

import json

import trio

from dyn_relay.net import RECEIVE_SIZE, Connection, Network
from dyn_testkit.between import ConnectionBetween, NetworkBetween
from dyn_testkit.history import Lease

_BEGINNING = b"POST /workers HTTP/"


class Overhearing(NetworkBetween):
    """The router's network. Each lease is told on a connection of its own, as sidecars do."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        #: In the order in which they were read.
        self.leases: list[Lease] = []

    async def accepted(self, connection: Connection) -> Connection:
        return _Overheard(connection, self.leases)


class _Overheard(ConnectionBetween):
    def __init__(self, connection: Connection, leases: list[Lease]) -> None:
        super().__init__(connection)
        self._leases = leases
        #: None: it is about something else, or has been told.
        self._read: bytes | None = b""

    async def receive(self, max_bytes: int = RECEIVE_SIZE) -> bytes:
        data = await self.inner.receive(max_bytes)
        if self._read is not None:
            self._read += data
            self._hear(self._read)
        return data

    def _hear(self, read: bytes) -> None:
        begun = read[: len(_BEGINNING)]
        if begun != _BEGINNING[: len(begun)]:
            self._read = None
            return
        head, whole, body = read.partition(b"\r\n\r\n")
        if whole and len(body) == _length(head):
            said = json.loads(body)
            self._leases.append(Lease(said["url"], trio.current_time(), said["lease_secs"]))
            self._read = None


def _length(head: bytes) -> int:
    fields = (line.lower().partition(b":") for line in head.split(b"\r\n")[1:])
    return next(int(value) for name, _, value in fields if name == b"content-length")
