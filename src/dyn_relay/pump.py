"""The pump: one trio task that moves the bytes of every live stream.

A token event that wakes a task of its own costs trio 31 us and more; here *one* task waits on a private epoll
descriptor (epoll descriptors can themselves be waited for) and serves each ready socket in a plain loop: recv, feed,
send. The request's task sleeps meanwhile and gets its pair of connections back when there is something to decide:
the end, a cut, a client that left, an error, or because the transform asks.

Fairness: a wake-up serves at most `BATCH` ready sockets with one read each, then yields to trio; fewer while the reads
are large. epoll moves what it reported to the end of its queue, so the others come first next time.
"""

from __future__ import annotations

import select
import socket
from typing import Protocol

import outcome
import trio

from dyn_relay.net import LARGE_RECEIVE_SIZE, RECEIVE_SIZE, Ended, Transform

BATCH = 256
#: Bytes that a wake-up should read at most: a batch is sized by the mean read of the one before, down to `MIN_BATCH`.
BATCH_BYTES = 1 << 20
MIN_BATCH = 4

_IN = select.EPOLLIN
#: A source whose sink does not take. epoll reports a hang-up or error whatever it was asked for, and level-triggered it
#: would do so without pause: this way it does so once, and again when the source is armed.
_PAUSED = select.EPOLLONESHOT
#: A sink that takes, and one that does not.
_WATCHED = select.EPOLLRDHUP
_BLOCKED = select.EPOLLOUT | select.EPOLLRDHUP
#: The peer has closed its side, whether or not unread bytes (a pipelined request) stand before the end.
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Pumped(Protocol):
    """What the pump needs of a connection: `sockets.SocketConnection` has it."""

    sock: socket.socket
    unsent: bytes | memoryview

    def flush(self) -> None:
        """Write what the kernel takes of `unsent` now. Raises `OSError`."""


class _Pair:
    """One relay in progress."""

    __slots__ = ("paused", "recv", "sink", "sink_fd", "size", "source_fd", "task", "transform")

    def __init__(self, source: Pumped, sink: Pumped, transform: Transform) -> None:
        self.task = trio.lowlevel.current_task()
        self.sink = sink
        self.sink_fd = sink.sock.fileno()
        self.source_fd = source.sock.fileno()
        self.recv = source.sock.recv
        self.transform = transform
        #: The source is not read: the sink has to take what is unsent first.
        self.paused = bool(sink.unsent)
        #: Bytes to ask of the next read.
        self.size = RECEIVE_SIZE


class _Watch:
    """A wait for the end of one connection."""

    __slots__ = ("sink_fd", "task")

    def __init__(self, fd: int) -> None:
        self.task = trio.lowlevel.current_task()
        self.sink_fd = fd


class Pump:
    """Serves relays between non-blocking sockets. Linux only (epoll)."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._pairs: dict[int, _Pair | _Watch] = {}
        self._batch = BATCH

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        wait, fd = trio.lowlevel.wait_readable, self._epoll.fileno()
        task_status.started()
        while True:
            await wait(fd)
            self._serve()

    def close(self) -> None:
        """Free the epoll descriptor; every relay must have ended."""
        self._epoll.close()

    async def relay(self, source: Pumped, sink: Pumped, transform: Transform) -> Ended:
        """See `Network.relay`."""
        pair = _Pair(source, sink, transform)
        self._register(pair.sink_fd, pair, _BLOCKED if pair.paused else _WATCHED)
        try:
            self._register(pair.source_fd, pair, _PAUSED if pair.paused else _IN)
        except BaseException:
            self._unregister(pair.sink_fd)
            raise
        return await self._sleep(pair)

    async def watch(self, fd: int) -> None:
        """Return when the peer of this socket has closed or reset its side, whatever is still to be read."""
        watch = _Watch(fd)
        self._register(fd, watch, _WATCHED)
        await self._sleep(watch)

    def closing(self, fd: int) -> None:
        """This descriptor is about to be closed by us: whoever relays it gets told, since epoll will not."""
        pair = self._pairs.get(fd)
        if pair is not None:
            self._wake(pair, outcome.Value(Ended.SINK_GONE if fd == pair.sink_fd else Ended.SOURCE_BROKEN))

    async def _sleep(self, pair: _Pair | _Watch) -> Ended:
        def abort(_: object) -> trio.lowlevel.Abort:
            self._release(pair)
            return trio.lowlevel.Abort.SUCCEEDED

        ended: Ended = await trio.lowlevel.wait_task_rescheduled(abort)
        return ended

    def _register(self, fd: int, pair: _Pair | _Watch, events: int) -> None:
        if fd in self._pairs:
            raise trio.BusyResourceError("this connection is already being relayed")
        self._epoll.register(fd, events)
        self._pairs[fd] = pair

    def _unregister(self, fd: int) -> None:
        del self._pairs[fd]
        self._epoll.unregister(fd)

    def _release(self, pair: _Pair | _Watch) -> None:
        self._unregister(pair.sink_fd)
        if isinstance(pair, _Pair):
            self._unregister(pair.source_fd)

    def _wake(self, pair: _Pair | _Watch, result: outcome.Outcome[Ended]) -> None:
        self._release(pair)
        trio.lowlevel.reschedule(pair.task, result)

    def _serve(self) -> None:
        pairs = self._pairs
        ready = self._epoll.poll(0, self._batch)
        served = 0
        for fd, events in ready:
            pair = pairs.get(fd)
            if pair is None:
                continue  # its pair ended earlier in this batch
            if fd == pair.sink_fd and events & _GONE:
                self._wake(pair, outcome.Value(Ended.SINK_GONE))
            elif isinstance(pair, _Watch):
                continue
            elif fd == pair.sink_fd:
                self._sink_ready(pair)
            else:
                served += self._source_ready(pair)
        self._batch = min(BATCH, max(MIN_BATCH, BATCH_BYTES * len(ready) // served)) if served else BATCH

    def _source_ready(self, pair: _Pair) -> int:
        """One read and what follows from it; gives the number of bytes read."""
        if pair.paused:
            return 0  # it hung up or broke; what it has sent before can wait, and then this shows again
        try:
            data = pair.recv(pair.size)
        except BlockingIOError:
            return 0
        except OSError:
            self._wake(pair, outcome.Value(Ended.SOURCE_BROKEN))
            return 0
        if not data:
            self._wake(pair, outcome.Value(Ended.EOF))
            return 0
        pair.size = LARGE_RECEIVE_SIZE if len(data) >= RECEIVE_SIZE else RECEIVE_SIZE
        self._forward(pair, data)
        return len(data)

    def _forward(self, pair: _Pair, data: bytes) -> None:
        transform, sink = pair.transform, pair.sink
        try:
            out = transform.feed(data)
        except Exception as exc:
            self._wake(pair, outcome.Error(exc))
            return
        if out:
            # Something is unsent here only if `offer` has left a rest.
            sink.unsent = b"".join((sink.unsent, out)) if sink.unsent else out
            try:
                sink.flush()
            except OSError:
                self._wake(pair, outcome.Value(Ended.SINK_GONE))
                return
            if sink.unsent:
                pair.paused = True
                self._epoll.modify(pair.source_fd, _PAUSED)
                self._epoll.modify(pair.sink_fd, _BLOCKED)
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
        if pair.transform.done:
            self._wake(pair, outcome.Value(Ended.DONE))
            return
        pair.paused = False
        self._epoll.modify(pair.sink_fd, _WATCHED)
        self._epoll.modify(pair.source_fd, _IN)
