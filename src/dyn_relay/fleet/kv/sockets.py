"""ZeroMQ sockets on trio.

A ZeroMQ socket has one descriptor, which tells only that *something* has happened since one last looked: it may stay
silent while messages wait. So: take messages without blocking until there is none, and only then wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio
import zmq

Context = zmq.Context[zmq.Socket[bytes]]

#: Queued messages of one subscription; as many as SGLang's publisher queues for it.
HIGH_WATER = 100_000


class Socket:
    """A socket that is waited for by at most one task."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None = None) -> None:
        """`monitor` gets a message whenever the socket has connected."""
        self._socket = socket
        self._monitor = monitor
        self._held: list[bytes] = []
        self._descriptor: int = socket.FD

    async def receive(self) -> list[bytes]:
        """The next message, in frames; none of them before the first message of each connection, if that is watched."""
        await trio.lowlevel.checkpoint()
        while not self._held:
            try:
                self._held = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await trio.lowlevel.wait_readable(self._descriptor)
        if self._connected():
            return []
        frames, self._held = self._held, []
        return frames

    def _connected(self) -> bool:
        """A connection is there that was not when this was asked before."""
        new = False
        while self._monitor is not None:
            try:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                new = True
            except zmq.Again:
                break
        return new

    def send(self, frames: list[bytes]) -> None:
        """Queue a message. Raises `zmq.Again` if the queue is full."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)


@contextmanager
def open_context() -> Iterator[Context]:
    """A context for any number of sockets, which must all be closed before it."""
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
        yield context


@contextmanager
def subscribed(context: Context, address: str, topic: bytes) -> Iterator[Socket]:
    """A subscription, which connects again by itself whenever the publisher comes back. Raises `zmq.ZMQError`."""
    with context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.ipv6 = True
        socket.rcvhwm = HIGH_WATER
        socket.subscribe(topic)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(address)
        try:
            yield Socket(socket, monitor)
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)


@contextmanager
def dealing(context: Context, address: str) -> Iterator[Socket]:
    """A connection for one question: what comes late, after it was closed, reaches nobody. Raises `zmq.ZMQError`."""
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.ipv6 = True
        socket.rcvhwm = HIGH_WATER
        socket.connect(address)
        yield Socket(socket)
