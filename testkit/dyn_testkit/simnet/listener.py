"""A listening address in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from dyn_relay.net import Connection
from dyn_testkit.simnet.bell import Bell
from dyn_testkit.simnet.connection import Address, SimConnection
from dyn_testkit.simnet.events import Trace


class SimListener:
    """A listening address; `dyn_relay.net.Listener` says what its methods promise."""

    def __init__(self, address: Address, closed: Callable[[], object], trace: Trace | None) -> None:
        """`closed` is called once, when it is."""
        self.host, self.port = address
        self._on_close = closed
        self._trace = trace
        self._backlog: deque[SimConnection] = deque()
        self._deaf = False
        self._changed = Bell()
        self._closed = False

    def set_deaf(self, deaf: bool) -> None:
        """Whether connections wait, though they were made."""
        self._deaf = deaf
        self._changed.ring()

    def arrive(self, connection: SimConnection) -> None:
        """A dial succeeded."""
        self._backlog.append(connection)
        self._changed.ring()

    async def accept(self) -> Connection:
        await trio.lowlevel.checkpoint()
        while self._deaf or not self._backlog:
            if self._closed:
                raise trio.ClosedResourceError
            await self._changed.wait()
        connection = self._backlog.popleft()
        if self._trace is not None:
            self._trace("accepted", connection.peer, connection.local)
        return connection

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_close()
            while self._backlog:
                self._backlog.popleft().abort()
            self._changed.ring()
