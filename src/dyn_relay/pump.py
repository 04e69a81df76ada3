"""The pump: one trio task that moves the bytes of every live stream.

A token event that wakes a task of its own costs trio 31 us and more; here *one* task waits on a private epoll
descriptor (epoll descriptors can themselves be waited for) and serves each ready socket in a plain loop: recv and feed
for a few of them, then send for the same few, since what was run just now runs faster than what was not. The request's
task sleeps meanwhile and gets its pair of connections back when there is something to decide: the end, a cut, a client
that left, an error, or because the transform asks.

Fairness: a wake-up makes at most `BATCH` reads, looking again for ready sockets until there are none, then yields to
trio; fewer while the reads are large. epoll moves what it reported to the end of its queue, so the others come first
next time. A cut is a task's turn to work, and a worker that dies cuts all of its relays at once: only so many tasks are
woken before the sockets of the others are looked at again.

Rests: after a read that went on, a source is left alone for a while if the transform says so (`Transform.rest`).
Nothing is done about it until epoll reports the source too early: only then it is taken out, and read when the time has
come, together with all others that rest. One that has gathered something by then rests again, without epoll; one that
has not is given back to it. So a source slower than its rest costs a look at the clock, a faster one no epoll at all.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from typing import Protocol

import outcome
import trio

from dyn_relay.net import LARGE_RECEIVE_SIZE, RECEIVE_SIZE, Ended, Transform

BATCH = 256
#: Ready sockets that are read before what they gave is written. Paced streams, 64 in step, take 0.93 of the CPU time of
#: one by one; with more than twice as many, events wait longer for each other than that is worth.
GROUP = 8
#: Bytes that a wake-up should read at most: a batch is sized by the mean read of the one before, down to `MIN_BATCH`.
BATCH_BYTES = 1 << 20
MIN_BATCH = 4
#: Tasks whose relay was cut that are woken at a time.
CUTS = 8

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

    __slots__ = (
        *("feed", "over", "paused", "recv", "send", "sink", "sink_fd", "size", "source_fd", "task", "transform"),
        "until",
    )

    def __init__(self, source: Pumped, sink: Pumped, transform: Transform) -> None:
        self.task = trio.lowlevel.current_task()
        #: It was cut, which the task is still to be told.
        self.over = False
        self.sink = sink
        self.sink_fd = sink.sock.fileno()
        self.source_fd = source.sock.fileno()
        self.transform = transform
        # What each event needs, looked up once.
        self.recv = source.sock.recv
        self.feed = transform.feed
        self.send = sink.sock.send
        #: The source is not read: the sink has to take what is unsent first, or it rests.
        self.paused = bool(sink.unsent)
        #: Bytes to ask of the next read.
        self.size = RECEIVE_SIZE
        #: The source is not to be read again before; 0: at any time.
        self.until = 0.0


class _Watch:
    """A wait for the end of one connection."""

    __slots__ = ("over", "sink_fd", "task")

    def __init__(self, fd: int) -> None:
        self.task = trio.lowlevel.current_task()
        self.over = False
        self.sink_fd = fd


class Pump:
    """Serves relays between non-blocking sockets. Linux only (epoll)."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        #: By descriptor.
        self._sources: dict[int, _Pair] = {}
        self._sinks: dict[int, _Pair | _Watch] = {}
        self._batch = BATCH
        #: Whose `unsent` is new.
        self._fed: list[_Pair] = []
        #: Who rests, though the source may have more; it may have ended since. All are read at `_due`, the time of the
        #: first.
        self._resting: list[_Pair] = []
        self._due = 0.0
        self._lot = trio.lowlevel.ParkingLot()
        #: Whose relay was cut, and how, in that order.
        self._cut: deque[tuple[_Pair | _Watch, Ended]] = deque()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        wait, fd = trio.lowlevel.wait_readable, self._epoll.fileno()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._serve_rested)
                task_status.started()
                while True:
                    if self._cut:
                        await trio.lowlevel.checkpoint()
                    else:
                        await wait(fd)
                    self._serve()
                    self._tell(CUTS)
        finally:
            self._tell(len(self._cut))  # they cannot be cancelled

    def close(self) -> None:
        """Free the epoll descriptor; every relay must have ended."""
        self._epoll.close()

    async def relay(self, source: Pumped, sink: Pumped, transform: Transform) -> Ended:
        """See `Network.relay`."""
        pair = _Pair(source, sink, transform)
        self._register(pair.sink_fd, _BLOCKED if pair.paused else _WATCHED)
        self._sinks[pair.sink_fd] = pair
        try:
            self._register(pair.source_fd, _PAUSED if pair.paused else _IN)
        except BaseException:
            del self._sinks[pair.sink_fd]
            self._epoll.unregister(pair.sink_fd)
            raise
        self._sources[pair.source_fd] = pair
        return await self._sleep(pair)

    async def watch(self, fd: int) -> None:
        """Return when the peer of this socket has closed or reset its side, whatever is still to be read."""
        watch = _Watch(fd)
        self._register(fd, _WATCHED)
        self._sinks[fd] = watch
        await self._sleep(watch)

    def closing(self, fd: int) -> None:
        """This descriptor is about to be closed by us: whoever relays it gets told, since epoll will not."""
        if (pair := self._sources.get(fd)) is not None:
            self._wake(pair, outcome.Value(Ended.SOURCE_BROKEN))
        elif (waiting := self._sinks.get(fd)) is not None:
            self._wake(waiting, outcome.Value(Ended.SINK_GONE))

    async def _sleep(self, pair: _Pair | _Watch) -> Ended:
        def abort(_: object) -> trio.lowlevel.Abort:
            if pair.over:
                return trio.lowlevel.Abort.FAILED  # how it was cut shows once only
            self._release(pair)
            return trio.lowlevel.Abort.SUCCEEDED

        ended: Ended = await trio.lowlevel.wait_task_rescheduled(abort)
        return ended

    def _register(self, fd: int, events: int) -> None:
        if fd in self._sources or fd in self._sinks:
            raise trio.BusyResourceError("this connection is already being relayed")
        self._epoll.register(fd, events)

    def _release(self, pair: _Pair | _Watch) -> None:
        del self._sinks[pair.sink_fd]
        self._epoll.unregister(pair.sink_fd)
        if isinstance(pair, _Pair):
            del self._sources[pair.source_fd]
            self._epoll.unregister(pair.source_fd)

    def _end(self, pair: _Pair | _Watch, ended: Ended) -> None:
        """Neither side will be looked at again; the task is woken when it is its turn."""
        self._release(pair)
        pair.over = True
        self._cut.append((pair, ended))

    def _tell(self, most: int) -> None:
        """Wake the tasks of so many relays that were cut, or of all."""
        for _ in range(min(most, len(self._cut))):
            pair, ended = self._cut.popleft()
            trio.lowlevel.reschedule(pair.task, outcome.Value(ended))

    def _wake(self, pair: _Pair | _Watch, result: outcome.Outcome[Ended]) -> None:
        self._release(pair)
        trio.lowlevel.reschedule(pair.task, result)

    def _serve(self) -> None:
        """Whatever is ready, and becomes so meanwhile: to look again costs a tenth of another wake-up."""
        left, count, size = self._batch, 0, 0
        while left > 0 and size < BATCH_BYTES and (ready := self._epoll.poll(0, left)):
            left -= len(ready)
            count += len(ready)
            size += self._serve_all(ready)
        self._batch = min(BATCH, max(MIN_BATCH, BATCH_BYTES * count // size)) if size else BATCH

    def _serve_all(self, ready: list[tuple[int, int]]) -> int:
        """Gives the number of bytes read."""
        sources, sinks, read = self._sources, self._sinks, self._read
        size = 0
        for fd, events in ready:
            pair = sources.get(fd)
            if pair is None:
                waiting = sinks.get(fd)
                if waiting is None:
                    continue  # its pair ended earlier in this batch
                if events & _GONE:
                    self._end(waiting, Ended.SINK_GONE)
                elif isinstance(waiting, _Pair):
                    self._sink_ready(waiting)
            elif pair.paused:
                continue  # it hung up or broke; what it has sent before can wait, and then this shows again
            elif pair.until and pair.until > trio.current_time():
                self._epoll.modify(fd, _PAUSED)
                self._rest(pair)
            else:
                size += read(pair)
        self._send()
        return size

    def _rest(self, pair: _Pair) -> None:
        """Leave a source alone that epoll does not watch now."""
        pair.paused = True
        if not self._resting:
            self._due = pair.until
            self._lot.unpark()
        self._resting.append(pair)

    async def _serve_rested(self) -> None:
        while True:
            if not self._resting:
                await self._lot.park()
            await trio.sleep_until(self._due)
            rested, self._resting = self._resting, []
            left = BATCH_BYTES
            for pair in rested:
                # By identity: its descriptor may be another connection's by now.
                if self._sources.get(pair.source_fd) is pair:
                    left -= max(self._rested(pair), BATCH_BYTES // BATCH)
                if left <= 0 or len(self._cut) >= CUTS:
                    self._tell(CUTS)
                    await trio.lowlevel.checkpoint()
                    left = BATCH_BYTES
            self._tell(CUTS)

    def _rested(self, pair: _Pair) -> int:
        """Read what has gathered; gives the number of bytes."""
        pair.paused, pair.until = False, 0.0
        served = self._read(pair)
        self._send()
        if not pair.paused and self._sources.get(pair.source_fd) is pair:
            if pair.until:
                self._rest(pair)
            else:
                self._epoll.modify(pair.source_fd, _IN)
        return served

    def _read(self, pair: _Pair) -> int:
        """One read, and what is to be sent for it; gives the number of bytes read."""
        try:
            data = pair.recv(pair.size)
        except BlockingIOError:
            return 0
        except OSError:
            self._end(pair, Ended.SOURCE_BROKEN)
            return 0
        size = len(data)
        if not size:
            self._end(pair, Ended.EOF)
            return 0
        pair.size = LARGE_RECEIVE_SIZE if size >= RECEIVE_SIZE else RECEIVE_SIZE
        try:
            out = pair.feed(data)
        except Exception as exc:
            self._wake(pair, outcome.Error(exc))
            return size
        if out:
            # There from now on: whoever is cancelled before it is sent loses nothing.
            sink = pair.sink
            sink.unsent = b"".join((sink.unsent, out)) if sink.unsent else out
            self._fed.append(pair)
            if len(self._fed) >= GROUP:
                self._send()
        elif pair.transform.done:
            self._wake(pair, outcome.Value(Ended.DONE))
        return size

    def _send(self) -> None:
        """Hand over what was read."""
        fed, self._fed = self._fed, []
        for pair in fed:
            if self._sinks.get(pair.sink_fd) is not pair:
                continue  # taken out by what was read after it
            sink, transform = pair.sink, pair.transform
            try:
                sent = pair.send(sink.unsent)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._end(pair, Ended.SINK_GONE)
                continue
            if sent < len(sink.unsent):
                sink.unsent = memoryview(sink.unsent)[sent:]
                pair.paused = True
                self._epoll.modify(pair.source_fd, _PAUSED)
                self._epoll.modify(pair.sink_fd, _BLOCKED)
                continue
            sink.unsent = b""
            if transform.done:
                self._wake(pair, outcome.Value(Ended.DONE))
            elif transform.rest and pair.size == RECEIVE_SIZE:  # after a full read there is more already
                pair.until = trio.current_time() + transform.rest

    def _sink_ready(self, pair: _Pair) -> None:
        try:
            pair.sink.flush()
        except OSError:
            self._end(pair, Ended.SINK_GONE)
            return
        if pair.sink.unsent:
            return
        if pair.transform.done:
            self._wake(pair, outcome.Value(Ended.DONE))
            return
        pair.paused = False
        self._epoll.modify(pair.sink_fd, _WATCHED)
        self._epoll.modify(pair.source_fd, _IN)
