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

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._descriptor: int = socket.FD

    async def receive(self) -> list[bytes]:
        """The next message, in frames."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await trio.lowlevel.wait_readable(self._descriptor)
            else:
                await trio.lowlevel.checkpoint()
                return frames

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
        socket.connect(address)
        yield Socket(socket)


@contextmanager
def dealing(context: Context, address: str) -> Iterator[Socket]:
    """A connection for one question: what comes late, after it was closed, reaches nobody. Raises `zmq.ZMQError`."""
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.ipv6 = True
        socket.rcvhwm = HIGH_WATER
        socket.connect(address)
        yield Socket(socket)
