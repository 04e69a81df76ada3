"""What tests of the pump share: pairs of local sockets, and a transform that counts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import trio
from trio.testing import wait_all_tasks_blocked

from dyn_relay.pump import Pump
from dyn_relay.sockets import SocketConnection


class Copy:
    """Passes bytes through and counts them; done once it has seen `total`."""

    def __init__(self, total: int = 1 << 60, rest: float = 0.0) -> None:
        self.total = total
        self.rest = rest
        self.fed = 0
        self.sizes: list[int] = []
        #: Makes nothing of what it gets, and does not count it.
        self.silent = False

    @property
    def done(self) -> bool:
        return self.fed >= self.total

    def feed(self, data: bytes) -> bytes:
        if self.silent:
            return b""
        self.fed += len(data)
        self.sizes.append(len(data))
        return data


def local_pair(pump: Pump, buffer: int = 0) -> tuple[SocketConnection, SocketConnection]:
    """A pair of local sockets: what one side has written is there at once, and no timer is involved.

    The kernel holds about `buffer` bytes each way, 200 KB if not given. (TCP with so little waits for its timers.)
    """
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    return SocketConnection(pair[0], pump, "a"), SocketConnection(pair[1], pump, "b")


@contextmanager
def closing(*connections: SocketConnection) -> Iterator[None]:
    try:
        yield
    finally:
        for connection in connections:
            connection.close()


async def until_blocked(sink: SocketConnection) -> None:
    """Return once the relay holds bytes that the sink does not take."""
    with trio.fail_after(20):
        while not sink.unsent:
            await wait_all_tasks_blocked()
