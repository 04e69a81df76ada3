"""The pump: one trio task that moves the bytes of every live stream.

A token event that wakes a task of its own costs trio 31 us and more; here *one* task waits on a private epoll
descriptor (epoll descriptors can themselves be waited for) and serves each ready socket in a plain loop: recv, feed,
send. The request's task sleeps meanwhile and gets its pair of connections back when there is something to decide:
the end, a cut, a client that left, an error, or because the transform asks.

Fairness: a wake-up serves at most `BATCH` ready sockets with one read each, then yields to trio.
"""

from __future__ import annotations

import select
import socket
from typing import Protocol

import outcome
import trio

from dyn_relay.net import RECEIVE_SIZE, Ended, Transform

BATCH = 256

_IN = select.EPOLLIN
_OUT = select.EPOLLOUT
#: The peer has closed its side, whether or not unread bytes (a pipelined request) stand before the end.
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Pumped(Protocol):
    """What the pump needs of a connection: `sockets.SocketConnection` has it."""

    sock: socket.socket
    unsent: bytes | memoryview

    def flush(self) -> None:
        """Write what the kernel takes of `unsent` now. Raises `OSError`."""


class _Pair:
    """One relay in progress; `source` and `transform` are None for a mere watch of the sink."""

    __slots__ = ("recv", "sink", "sink_fd", "source", "source_fd", "task", "transform")

    def __init__(self, sink: Pumped, source: Pumped | None, transform: Transform | None) -> None:
        self.task = trio.lowlevel.current_task()
        self.sink = sink
        self.sink_fd = sink.sock.fileno()
        self.source = source
        self.transform = transform
        self.source_fd = -1
        if source is not None:
            self.source_fd = source.sock.fileno()
            self.recv = source.sock.recv


class Pump:
    """Serves relays between non-blocking sockets. Linux only (epoll)."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pairs: dict[int, _Pair] = {}

    async def run(self) -> None:
        """Serve until cancelled."""
        wait, fd = trio.lowlevel.wait_readable, self._epoll.fileno()
        while True:
            await wait(fd)
            self._serve()

    def close(self) -> None:
        """Free the epoll descriptor; every relay must have ended."""
        self._epoll.close()

    async def relay(self, source: Pumped, sink: Pumped, transform: Transform) -> Ended:
        """See `Network.relay`."""
        pair = _Pair(sink, source, transform)
        blocked = bool(sink.unsent)
        self._register(pair.sink_fd, pair, _OUT | select.EPOLLRDHUP if blocked else select.EPOLLRDHUP)
        try:
            self._register(pair.source_fd, pair, 0 if blocked else _IN)
        except BaseException:
            self._unregister(pair.sink_fd)
            raise
        return await self._sleep(pair)

    async def watch(self, sink: Pumped) -> None:
        """Return when the sink's peer has closed."""
        pair = _Pair(sink, None, None)
        self._register(pair.sink_fd, pair, select.EPOLLRDHUP)
        await self._sleep(pair)

    async def _sleep(self, pair: _Pair) -> Ended:
        def abort(_: object) -> trio.lowlevel.Abort:
            self._release(pair)
            return trio.lowlevel.Abort.SUCCEEDED

        ended: Ended = await trio.lowlevel.wait_task_rescheduled(abort)
        return ended

    def _register(self, fd: int, pair: _Pair, events: int) -> None:
        if fd in self._pairs:
            raise trio.BusyResourceError("this connection is already being relayed")
        self._epoll.register(fd, events)
        self._pairs[fd] = pair

    def _unregister(self, fd: int) -> None:
        del self._pairs[fd]
        try:
            self._epoll.unregister(fd)
        except OSError:
            pass  # closed meanwhile: the kernel has already forgotten it

    def _release(self, pair: _Pair) -> None:
        self._unregister(pair.sink_fd)
        if pair.source is not None:
            self._unregister(pair.source_fd)

    def _wake(self, pair: _Pair, result: outcome.Outcome[Ended]) -> None:
        self._release(pair)
        trio.lowlevel.reschedule(pair.task, result)

    def _serve(self) -> None:
        pairs = self._pairs
        for fd, events in self._epoll.poll(0, BATCH):
            pair = pairs.get(fd)
            if pair is None:
                continue  # its pair ended earlier in this batch
            if fd == pair.source_fd:
                self._source_ready(pair)
            elif events & _GONE:
                self._wake(pair, outcome.Value(Ended.SINK_GONE))
            else:
                self._sink_ready(pair)

    def _source_ready(self, pair: _Pair) -> None:
        transform, sink = pair.transform, pair.sink
        assert transform is not None
        try:
            data = pair.recv(RECEIVE_SIZE)
        except BlockingIOError:
            return
        except OSError:
            self._wake(pair, outcome.Value(Ended.SOURCE_BROKEN))
            return
        if not data:
            self._wake(pair, outcome.Value(Ended.EOF))
            return
        try:
            out = transform.feed(data)
        except Exception as exc:
            self._wake(pair, outcome.Error(exc))
            return
        if out:
            sink.unsent = out
            try:
                sink.flush()
            except OSError:
                self._wake(pair, outcome.Value(Ended.SINK_GONE))
                return
            if sink.unsent:
                self._epoll.modify(pair.source_fd, 0)
                self._epoll.modify(pair.sink_fd, _OUT | select.EPOLLRDHUP)
                return
        if transform.done:
            self._wake(pair, outcome.Value(Ended.DONE))

    def _sink_ready(self, pair: _Pair) -> None:
        try:
            pair.sink.flush()
        except OSError:
            self._wake(pair, outcome.Value(Ended.SINK_GONE))
            return
        if pair.sink.unsent:
            return
        if pair.transform is not None and pair.transform.done:
            self._wake(pair, outcome.Value(Ended.DONE))
            return
        self._epoll.modify(pair.sink_fd, select.EPOLLRDHUP)
        self._epoll.modify(pair.source_fd, _IN)
