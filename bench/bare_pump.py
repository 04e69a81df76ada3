"""A TCP relay on trio that reads nothing, in the shape of `dyn_relay.pump`: `python bench/bare_pump.py PORT WORKER`.

One task waits for a private epoll descriptor and moves what has come: what is left for a look at the bytes, before a
proxy costs more than another one, is the difference to this.
"""

from __future__ import annotations

import select
import socket
import sys
from functools import partial

import trio

BATCH = 256


class Side:
    """One of the two sockets of a client: what is read here goes to `peer`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.peer = self
        #: What the kernel did not take yet.
        self.unsent = b""


class Pump:
    """All clients' sockets."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._sides: dict[int, Side] = {}

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for fd, events in self._epoll.poll(0, BATCH):
                side = self._sides.get(fd)
                if side is not None:
                    self._serve(side, events)

    def join(self, client: socket.socket, worker: socket.socket) -> None:
        """Serve a client."""
        near, far = Side(client), Side(worker)
        near.peer, far.peer = far, near
        for side in (near, far):
            self._sides[side.sock.fileno()] = side
            self._epoll.register(side.sock, select.EPOLLIN)

    def _serve(self, side: Side, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._send(side, b"")
            if events & ~select.EPOLLOUT:
                data = side.sock.recv(1 << 16)
                if not data:
                    raise ConnectionError
                self._send(side.peer, data)
        except BlockingIOError:
            pass
        except OSError:
            for one in (side, side.peer):
                self._sides.pop(one.sock.fileno(), None)
                one.sock.close()

    def _send(self, side: Side, data: bytes) -> None:
        blocked = bool(side.unsent)
        side.unsent += data
        try:
            side.unsent = side.unsent[side.sock.send(side.unsent) :]
        except BlockingIOError:
            pass
        if bool(side.unsent) is not blocked:
            more = select.EPOLLOUT if side.unsent else 0
            self._epoll.modify(side.sock, select.EPOLLIN | more)
            self._epoll.modify(side.peer.sock, 0 if side.unsent else select.EPOLLIN)


def connected(port: int) -> socket.socket:
    """A connection on loopback that does not block any more."""
    sock = socket.create_connection(("127.0.0.1", port))
    return plain(sock)


def plain(sock: socket.socket) -> socket.socket:
    """As all sockets here are."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


async def main(port: int, worker: int) -> None:
    """Accept and serve until the process is ended."""
    listener = trio.socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    await listener.bind(("127.0.0.1", port))
    listener.listen(4096)
    pump = Pump()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump.run)
        while True:
            accepted, _ = await listener.accept()
            pump.join(plain(socket.socket(fileno=accepted.detach())), connected(worker))


if __name__ == "__main__":
    trio.run(partial(main, int(sys.argv[1]), int(sys.argv[2])))
