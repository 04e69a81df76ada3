"""The seam between the proxy and the network: everything that moves bytes goes through here.

`Network` is what the rest of the proxy is given; nothing else opens a socket. Real sockets (`sockets.py`) and the
testkit's in-memory hosts implement the same three protocols, so the whole proxy runs in virtual time without a change.
The clock is trio's own.
"""

from __future__ import annotations

import enum
import ssl
from typing import Protocol

import trio

#: Bytes asked of one read. Large enough for a batch of token events, small enough to allocate on each wake-up.
RECEIVE_SIZE = 65536

#: Bytes asked of one read while a large body is coming in.
LARGE_RECEIVE_SIZE = 262144

#: Seconds. Woken so much later than it wanted to be, this process stood still (SIGSTOP, a paused machine): what others
#: have sent meanwhile is not read yet, so nobody is late, and their time begins anew.
STOPPED = 1.0


class ConnectionBroken(Exception):
    """The peer reset the connection, or it was used after it broke."""


class ConnectFailed(Exception):
    """No connection could be made: refused, unreachable, unknown host, TLS handshake failed. The message says which."""


class Ended(enum.Enum):
    """Why `Network.relay` came back."""

    DONE = "done"  #: the transform asked for it; all its output has been handed to the sink
    EOF = "eof"  #: the source closed in good order
    SOURCE_BROKEN = "source broken"  #: the source was reset
    SINK_GONE = "sink gone"  #: the sink's peer closed or reset; nothing more can be delivered


class Transform(Protocol):
    """What `Network.relay` does to the bytes between a source and a sink. Plain code: no awaiting, no I/O."""

    #: Set by `feed` when the relay must stop once the returned bytes are written.
    done: bool
    #: Seconds for which the source is not read after bytes of it went on: what comes meanwhile gathers in the kernel,
    #: and one read serves it all. 0: it is read as it comes.
    rest: float

    def feed(self, data: bytes) -> bytes:
        """Take what one read gave (never empty); return what to write to the sink (may be empty).

        An exception propagates out of `Network.relay`.
        """


class Sink(Protocol):
    """Where bytes go, and whether anybody still wants them."""

    async def send(self, data: bytes) -> None:
        """Hand over all of `data`, waiting while the peer does not take it. Raises `ConnectionBroken`.

        If cancelled, what was not handed over yet is kept and goes before the next write: the byte stream has no hole.
        """

    @property
    def pending(self) -> bool:
        """True while written bytes wait for the peer to take what came before them."""

    async def wait_closed(self) -> None:
        """Return when the peer has closed or reset its side. Reads nothing."""


class Connection(Sink, Protocol):
    """One ordered byte stream in each direction."""

    #: The other side, as `host:port`, for logs.
    peer: str

    async def receive(self, max_bytes: int = RECEIVE_SIZE) -> bytes:
        """The next bytes, at least one; `b""` once the peer has closed. Raises `ConnectionBroken`."""

    def offer(self, data: bytes) -> bool:
        """Write `data` now if nothing is waiting to be written, without blocking; False if it was not taken at all.

        For keep-alive comments. A part that does not fit is kept and goes before the next write.
        """

    def quiet(self) -> bool:
        """True if an idle connection may be reused: no byte, no end and no error waits to be read."""

    def end_sending(self) -> None:
        """Half-close: the peer sees the end, we can still read. Never blocks, never raises."""

    def close(self) -> None:
        """Close in good order (FIN). Idempotent; never blocks, never raises."""

    def abort(self) -> None:
        """Close so that the peer sees an error (RST). Idempotent; never blocks, never raises."""


class Listener(Protocol):
    """A bound, listening address."""

    #: Where it listens, with the port that was chosen if 0 was asked for.
    host: str
    port: int

    async def accept(self) -> Connection:
        """The next connection. Raises `trio.ClosedResourceError` once closed."""

    def close(self) -> None:
        """Stop listening. Idempotent."""


class Network(Protocol):
    """How the proxy reaches the world."""

    async def connect(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> Connection:
        """Open a connection. No timeout of its own: cancel it. Raises `ConnectFailed`."""

    async def listen(self, host: str, port: int) -> Listener:
        """Bind and listen; port 0 lets the system choose. Raises `OSError`."""

    async def relay(self, source: Connection, sink: Sink, transform: Transform) -> Ended:
        """Move bytes from source through transform to sink until one of `Ended` is the case.

        A sink that does not take stops the reading of the source (backpressure). The end of the sink is seen while the
        source is silent, or rests. If cancelled, both connections stay usable and no byte is lost.
        """


async def relay_loop(source: Connection, sink: Sink, transform: Transform, *, rests: bool = True) -> Ended:
    """`Network.relay` for connections that the pump cannot wait for: TLS, in memory. Simple rather than fast.

    `rests`: one read of the source gives all that has gathered, so that the transform's `rest` has a use.
    """
    ended = Ended.SINK_GONE
    failure: Exception | None = None

    async def watch() -> None:
        await sink.wait_closed()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        try:
            ended = await _copy(source, sink, transform, rests=rests)
        except Exception as exc:
            failure = exc  # raised outside, where the nursery cannot wrap it into a group
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return ended


async def _copy(source: Connection, sink: Sink, transform: Transform, *, rests: bool) -> Ended:
    try:
        await sink.send(b"")  # what an earlier, cancelled relay has left goes first
        while not transform.done:
            try:
                data = await source.receive()
            except ConnectionBroken:
                return Ended.SOURCE_BROKEN
            if not data:
                return Ended.EOF
            out = transform.feed(data)
            # Also when there is nothing new: `offer` may have left a rest.
            await sink.send(out)
            if rests and out and transform.rest and not transform.done and source.quiet():
                await trio.sleep(transform.rest)
        return Ended.DONE
    except ConnectionBroken:
        return Ended.SINK_GONE
