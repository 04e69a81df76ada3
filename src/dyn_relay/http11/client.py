"""The HTTP/1.1 client: a pool of connections, and one-shot requests for probes and aborts."""

from __future__ import annotations

import io
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from dyn_relay.http11.errors import BadResponse
from dyn_relay.http11.headers import HOP_BY_HOP, Headers, encode_head, get, message_parts
from dyn_relay.http11.origin import Origin
from dyn_relay.http11.response import ResponseReader
from dyn_relay.net import ConnectFailed, Connection, ConnectionBroken, Network

__all__ = ["BadResponse", "Origin", "Pool", "Response", "ResponseReader", "Upstream", "fetch", "request_parts"]

_TARGET = re.compile(rb"/[!-~]*")
_OURS = HOP_BY_HOP | {b"host", b"content-length"}


def request_parts(origin: Origin, method: str, path: str, headers: Headers, body: bytes) -> list[bytes]:
    """A request, to be sent part by part: one part, or head and body where the body is large.

    `path` begins with a slash and may have a query; the origin's prefix is put before it. `host` and `content-length`
    are ours, hop-by-hop headers are left out, `accept-encoding: identity` is added if `headers` has none.
    Raises `ValueError` for a line end or blank where it would change the request.
    """
    target = f"{origin.prefix}{path}".encode("ascii")
    if not _TARGET.fullmatch(target):
        raise ValueError(f"not a request target: {target!r}")
    fields = [(b"host", origin.authority.encode("ascii"))]
    fields += [field for field in headers if field[0] not in _OURS]
    if get(headers, b"accept-encoding") is None:
        fields.append((b"accept-encoding", b"identity"))
    if body or method in ("POST", "PUT", "PATCH"):
        fields.append((b"content-length", b"%d" % len(body)))
    head = encode_head(b"%b %b HTTP/1.1" % (method.encode("ascii"), target), fields)
    return message_parts(head, body)


class Upstream:
    """One connection to a worker, for one request. End with `release` or `discard`; the first of them counts."""

    __slots__ = ("_pool", "connection", "origin", "reused")

    def __init__(self, pool: Pool, origin: Origin, connection: Connection, reused: bool) -> None:
        self.connection = connection
        self.origin = origin
        #: It has served an earlier request: a break before any response byte may be its age, and says nothing yet.
        self.reused = reused
        self._pool: Pool | None = pool

    def release(self, reader: ResponseReader) -> None:
        """Done with the request: kept for another if its response is complete and allows it, else closed."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        if reader.complete and reader.keep_alive:
            pool.keep(self.origin, self.connection)
        else:
            self.connection.close()

    def discard(self) -> None:
        """Close it: its response was abandoned or broke, so that what comes on it next is not known."""
        if self._pool is not None:
            self._pool = None
            self.connection.close()


class Pool:
    """Connections to workers, reused newest first while they are young."""

    def __init__(
        self,
        network: Network,
        *,
        idle_secs: float = 3.0,
        connect_timeout: float = 5.0,
        tls: ssl.SSLContext | None = None,
        grpc: Callable[[Origin], Awaitable[Connection]] | None = None,
    ) -> None:
        """`idle_secs`: below the workers' keep-alive (5 s in SGLang 0.5.23), so that it is rarely they who close.

        `tls`: for https origins; the system's certificate authorities if None. `grpc`: dials an origin that is `grpc`.
        """
        self._grpc = grpc
        self._network = network
        self._idle_secs = idle_secs
        self._connect_timeout = connect_timeout
        self._tls = tls
        self._closed = False
        #: Idle connections of an origin, oldest first.
        self._idle: dict[Origin, deque[Connection]] = {}
        #: All idle connections, oldest first: since when, and whose.
        self._since: dict[Connection, tuple[float, Origin]] = {}

    async def acquire(self, origin: Origin, *, fresh: bool = False) -> Upstream:
        """A connection to `origin`: the newest idle one that still stands, else (or if `fresh`) a new one.

        Raises `ConnectFailed`, also when there is no connection within `connect_timeout`.
        """
        upstream = None if fresh else self.take(origin)
        return upstream or Upstream(self, origin, await self._dial(origin), reused=False)

    def take(self, origin: Origin) -> Upstream | None:
        """The newest idle connection to `origin` that still stands, if there is one."""
        self._sweep(trio.current_time())
        while (connection := self._take(origin)) is not None:
            if connection.quiet():
                return Upstream(self, origin, connection, reused=True)
            connection.close()
        return None

    def keep(self, origin: Origin, connection: Connection) -> None:
        """Take back an idle connection (see `Upstream.release`)."""
        now = trio.current_time()
        self._sweep(now)
        if self._closed:
            connection.close()
            return
        self._idle.setdefault(origin, deque()).append(connection)
        self._since[connection] = (now, origin)

    def close(self) -> None:
        """Close all idle connections; those in use are closed when released."""
        self._closed = True
        for connection in self._since:
            connection.close()
        self._since.clear()
        self._idle.clear()

    def _take(self, origin: Origin) -> Connection | None:
        idle = self._idle.get(origin)
        if not idle:
            return None
        connection = idle.pop()
        del self._since[connection]
        if not idle:
            del self._idle[origin]
        return connection

    def _sweep(self, now: float) -> None:
        """Close what has become too old; each connection is looked at once."""
        horizon = now - self._idle_secs
        while self._since:
            connection = next(iter(self._since))
            since, origin = self._since[connection]
            if since > horizon:
                return
            del self._since[connection]
            idle = self._idle[origin]
            idle.popleft()
            if not idle:
                del self._idle[origin]
            connection.close()

    async def _dial(self, origin: Origin) -> Connection:
        with trio.move_on_after(self._connect_timeout):
            if origin.grpc:
                if self._grpc is None:
                    raise ConnectFailed(f"{origin}: there is no gateway to gRPC here")
                return await self._grpc(origin)
            return await self._network.connect(origin.host, origin.port, self._context() if origin.tls else None)
        raise ConnectFailed(f"{origin.authority}: no connection within {self._connect_timeout:g} s")

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response."""

    status: int
    headers: Headers
    body: bytes


async def fetch(
    pool: Pool,
    origin: Origin,
    method: str,
    path: str,
    *,
    headers: Headers | None = None,
    body: bytes = b"",
    timeout: float,
    max_body: int = 64 * 1024 * 1024,
    fresh: bool = False,
) -> Response:
    """Make one request and read its whole response, within `timeout` seconds.

    A reused connection that breaks before any response byte is replaced by a fresh one, once: it had gone stale.
    `fresh`: none is reused, for what must not be done twice.
    Raises `ConnectFailed`, `ConnectionBroken` (also when the peer closes too early), `BadResponse` (also for a body of
    more than `max_body` bytes), `trio.TooSlowError`.
    """
    parts = request_parts(origin, method, path, headers or [], body)
    with trio.fail_after(timeout):
        upstream = await pool.acquire(origin, fresh=fresh)
        reader = ResponseReader(no_body=method == "HEAD")
        try:
            return await _exchange(upstream, reader, parts, max_body)
        except ConnectionBroken:
            if not upstream.reused or reader.bytes_seen:
                raise
        upstream = await pool.acquire(origin, fresh=True)
        return await _exchange(upstream, ResponseReader(no_body=method == "HEAD"), parts, max_body)


async def _exchange(upstream: Upstream, reader: ResponseReader, parts: list[bytes], max_body: int) -> Response:
    body = io.BytesIO()
    try:
        for part in parts:
            await upstream.connection.send(part)
        while not reader.complete:
            data = await upstream.connection.receive()
            if data:
                body.write(reader.feed(data))
            elif not reader.eof():
                raise ConnectionBroken(f"{upstream.connection.peer} closed before its response was complete")
            if body.tell() > max_body:
                raise BadResponse(f"the response body is larger than {max_body} bytes")
        upstream.release(reader)
        return Response(reader.status, reader.headers, body.getvalue())
    finally:
        upstream.discard()
