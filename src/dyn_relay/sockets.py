"""Real TCP behind the `Network` seam: non-blocking sockets under `trio.lowlevel`, TLS through trio's `SSLStream`."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from dyn_relay.net import (
    RECEIVE_SIZE,
    ConnectFailed,
    Connection,
    ConnectionBroken,
    Ended,
    Listener,
    Sink,
    Transform,
    relay_loop,
)
from dyn_relay.pump import Pump

#: `struct linger`: on, zero seconds. close() then sends RST and drops what is unsent.
_NO_LINGER = struct.pack("ii", 1, 0)


class SocketConnection:
    """A connected non-blocking TCP socket."""

    __slots__ = ("_closed", "_pump", "peer", "sock", "unsent")

    def __init__(self, sock: socket.socket, pump: Pump, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        #: Taken by `send`, `offer` or the pump but not by the kernel yet.
        self.unsent: bytes | memoryview = b""
        self._pump = pump
        self._closed = False

    async def receive(self, max_bytes: int = RECEIVE_SIZE) -> bytes:
        # Try first: the next request, or its body, is often already there, and a wait costs ten times the read.
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if self._closed:
                raise ConnectionBroken("the connection is closed")
            try:
                data = self.sock.recv(max_bytes)
                if len(data) == max_bytes:
                    # There is probably more: a fast peer must not keep all others waiting.
                    await trio.lowlevel.cancel_shielded_checkpoint()
                return data
            except BlockingIOError:
                await _until(trio.lowlevel.wait_readable, self.sock)
            except OSError as exc:
                raise ConnectionBroken(describe(exc)) from exc

    async def send(self, data: bytes) -> None:
        # First of all, so that a cancellation finds the data in its place.
        self.unsent = b"".join((self.unsent, data)) if self.unsent else data
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.unsent:
            if self._closed:
                raise ConnectionBroken("the connection is closed")
            try:
                self.flush()
            except OSError as exc:
                raise ConnectionBroken(describe(exc)) from exc
            if self.unsent:
                await _until(trio.lowlevel.wait_writable, self.sock)

    def offer(self, data: bytes) -> bool:
        if self.unsent or self._closed:
            return False
        try:
            sent = self.sock.send(data)
        except OSError:
            return False
        self.unsent = memoryview(data)[sent:] if sent < len(data) else b""
        return True

    def flush(self) -> None:
        """Write what the kernel takes of `unsent` now. Raises `OSError` if the connection is broken."""
        try:
            sent = self.sock.send(self.unsent)
        except BlockingIOError:
            return
        self.unsent = memoryview(self.unsent)[sent:] if sent < len(self.unsent) else b""

    @property
    def pending(self) -> bool:
        return bool(self.unsent)

    async def wait_closed(self) -> None:
        if not self._closed:
            await self._pump.watch(self.sock.fileno())

    def quiet(self) -> bool:
        if self._closed:
            return False
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def end_sending(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    @property
    def closed(self) -> bool:
        """We have closed it."""
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pump.closing(self.sock.fileno())
            trio.lowlevel.notify_closing(self.sock)
            self.sock.close()

    def abort(self) -> None:
        if not self._closed:
            try:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            except OSError:
                pass
            self.close()


class TLSConnection:
    """A TLS client connection, over trio's `SSLStream`. Only ever a source: the proxy's own clients speak plain TCP."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream], pump: Pump, peer: str) -> None:
        self.peer = peer
        self._stream = stream
        self._sock = stream.transport_stream.socket
        self._pump = pump
        self._closed = False

    async def receive(self, max_bytes: int = RECEIVE_SIZE) -> bytes:
        try:
            return bytes(await self._stream.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError) as exc:
            raise ConnectionBroken(describe(exc)) from exc

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError) as exc:
            raise ConnectionBroken(describe(exc)) from exc
        except trio.Cancelled:
            # A TLS record may be half out: the stream cannot be used again.
            self.abort()
            raise

    def offer(self, data: bytes) -> bool:
        return False

    @property
    def pending(self) -> bool:
        return False  # `send` returns when all is written, and `offer` takes nothing

    async def wait_closed(self) -> None:
        if not self._closed:
            await self._pump.watch(self._sock.fileno())

    def quiet(self) -> bool:
        if self._closed or self._stream.pending():
            return False
        # trio's socket refuses a blocking peek; the descriptor is non-blocking, so ask it directly.
        try:
            probe = socket.socket(fileno=os.dup(self._sock.fileno()))
        except OSError:
            return False  # out of descriptors: one less is a help
        try:
            probe.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            probe.close()
        return False

    def end_sending(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pump.closing(self._sock.fileno())
            self._sock.close()

    def abort(self) -> None:
        if not self._closed:
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            except OSError:
                pass
            self.close()


class SocketListener:
    """A listening socket."""

    def __init__(self, sock: trio.socket.SocketType, pump: Pump, host: str, port: int) -> None:
        self._sock = sock
        self._pump = pump
        self.host = host
        self.port = port

    async def accept(self) -> Connection:
        while True:
            try:
                accepted, address = await self._sock.accept()
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    await trio.sleep(0.1)  # out of descriptors: let live requests end, keep listening
                    continue
                if exc.errno == errno.ECONNABORTED:
                    continue
                if exc.errno == errno.EBADF:
                    raise trio.ClosedResourceError("the listener is closed") from None
                raise
            return _adopt(accepted, self._pump, f"{address[0]}:{address[1]}" if address else self.host)

    def close(self) -> None:
        self._sock.close()


class SocketNetwork:
    """Real TCP, with one pump for all its relays. Make one with `open_network`."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump

    async def connect(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> Connection:
        peer = f"{host}:{port}"
        try:
            sock = await _dial(host, port)
        except (OSError, UnicodeError) as exc:  # the latter: a host name that cannot be encoded
            raise ConnectFailed(f"{peer}: {describe(exc)}") from exc
        if tls is None:
            return _adopt(sock, self._pump, peer)
        # An end without TLS's own goodbye may be a cut: it is an error, unless the response has ended by its framing.
        secure = trio.SSLStream(trio.SocketStream(sock), tls, server_hostname=host)
        try:
            await secure.do_handshake()
        except (trio.BrokenResourceError, ssl.SSLError) as exc:
            sock.close()
            raise ConnectFailed(f"{peer}: TLS handshake failed: {describe(exc)}") from exc
        except BaseException:
            sock.close()
            raise
        return TLSConnection(secure, self._pump, peer)

    async def listen(self, host: str, port: int, *, shared: bool = False) -> Listener:
        """`shared`: with other processes of this user that say so, too; Linux spreads the connections over them."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            await sock.bind((host, port))
            sock.listen(4096)
        except BaseException:
            sock.close()
            raise
        return SocketListener(sock, self._pump, *sock.getsockname()[:2])

    async def relay(self, source: Connection, sink: Sink, transform: Transform) -> Ended:
        if isinstance(source, SocketConnection) and isinstance(sink, SocketConnection):
            if sink.closed:
                return Ended.SINK_GONE
            if source.closed:
                return Ended.SOURCE_BROKEN
            return await self._pump.relay(source, sink, transform)
        # A read of TLS gives one record, which is one event: with a rest after each, a stream would fall behind.
        return await relay_loop(source, sink, transform, rests=not isinstance(source, TLSConnection))

    def unix(self, directory: Path) -> UnixNetwork:
        """The sockets of a directory."""
        return UnixNetwork(directory, self._pump)


class UnixNetwork:
    """Unix sockets in one directory: a host is a file's name, and ports mean nothing. Implements `net.Network`."""

    def __init__(self, directory: Path, pump: Pump) -> None:
        self._directory = directory
        self._pump = pump

    async def connect(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> Connection:
        sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            await sock.connect(str(self._directory / host))
        except OSError as exc:
            sock.close()
            raise ConnectFailed(f"{host}: {describe(exc)}") from exc
        except BaseException:
            sock.close()
            raise
        return _adopt(sock, self._pump, host)

    async def listen(self, host: str, port: int) -> Listener:
        """What listened there before must be dead: its file is replaced."""
        path = self._directory / host
        path.unlink(missing_ok=True)
        sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            await sock.bind(str(path))
            sock.listen(128)
        except BaseException:
            sock.close()
            raise
        return SocketListener(sock, self._pump, host, port)

    async def relay(self, source: Connection, sink: Sink, transform: Transform) -> Ended:
        return await relay_loop(source, sink, transform)


@asynccontextmanager
async def open_network() -> AsyncIterator[SocketNetwork]:
    """The real network; its pump runs as long as the block does."""
    pump = Pump()
    async with trio.open_nursery() as nursery:
        await nursery.start(pump.run)
        try:
            yield SocketNetwork(pump)
        finally:
            nursery.cancel_scope.cancel()
            pump.close()


def describe(exc: BaseException) -> str:
    """One line about an error, with the system's words for an errno."""
    cause = exc.__cause__
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {exc.verify_message}"
    if isinstance(exc, (ssl.SSLError, socket.gaierror)):
        return exc.strerror or str(exc)
    if isinstance(exc, OSError) and exc.errno:
        return os.strerror(exc.errno)
    if isinstance(exc, BaseExceptionGroup):
        return describe(exc.exceptions[0])
    if isinstance(exc, (OSError, trio.BrokenResourceError)) and cause is not None:
        return describe(cause)
    return str(exc) or type(exc).__name__


async def _until(wait: Callable[[socket.socket], Awaitable[None]], sock: socket.socket) -> None:
    """Wait for a socket of ours. Raises `ConnectionBroken` if another task closes it meanwhile."""
    try:
        await wait(sock)
    except trio.ClosedResourceError:
        raise ConnectionBroken("the connection is closed") from None


async def _dial(host: str, port: int) -> trio.socket.SocketType:
    """Connect. Raises `OSError`."""
    found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if len(found) > 1:
        return (await trio.open_tcp_stream(host, port)).socket
    # One address, as almost always: the race between addresses and its nursery would cost more than the connecting.
    family, kind, protocol, _, address = found[0]
    sock = trio.socket.socket(family, kind, protocol)
    try:
        await sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _adopt(sock: trio.socket.SocketType, pump: Pump, peer: str) -> SocketConnection:
    """Take a connected socket out of trio's wrapper: the pump does its own non-blocking calls."""
    raw = socket.socket(fileno=sock.detach())
    raw.setblocking(False)
    if raw.family != socket.AF_UNIX:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return SocketConnection(raw, pump, peer)
