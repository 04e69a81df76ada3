"""The HTTP/1.1 server: one task a connection, requests in order, strict about framing.

Bodies are complete before a handler sees the request. Answers are either whole (`respond`) or streamed: the handler
sends `head`, `frame`s and `last` itself, or lets `Network.relay` do so, straight into `connection`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from dyn_relay.http11.errors import Refusal, error_body
from dyn_relay.http11.headers import HOP_BY_HOP, Headers, get, message_parts, status_head
from dyn_relay.http11.requests import ChunkedBody, Head, parse_head, too_large
from dyn_relay.net import LARGE_RECEIVE_SIZE, RECEIVE_SIZE, Connection, ConnectionBroken, Listener

#: How long a refused client may go on sending. It reads our answer only then, and a reset would destroy it unread.
LINGER_SECS = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may ask of the server. Sizes in bytes, times in seconds."""

    max_head: int = 65536
    max_body: int = 512 * 1024 * 1024
    #: From the first byte of a head to its end.
    head_timeout: float = 30.0
    #: Between two requests. Longer than the idle time of any client's pool, so that it is the client who closes.
    idle_timeout: float = 90.0
    #: Between two reads of a body.
    body_idle_timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request, body complete."""

    method: str
    #: As it stood in the request line.
    target: bytes
    #: Without query; neither percent-decoded nor normalized.
    path: str
    #: Without the question mark; "" if there is none.
    query: str
    headers: Headers
    body: bytes
    http10: bool
    keep_alive: bool
    #: The peer's `host:port`.
    client: str


class Drain(Protocol):
    """What tells the server to stop: a `trio.Event` does."""

    def is_set(self) -> bool: ...

    async def wait(self) -> None: ...


Handler = Callable[["ServerConnection", Request], Awaitable[None]]


class ServerConnection:
    """One client's connection: its requests, one after the other, and the framing of the answer to the current one."""

    __slots__ = (
        "_bodiless",
        "_buffer",
        "_chunked",
        "_close_delimited",
        "_draining",
        "_idle",
        "_limits",
        "_remaining",
        "_request",
        "complete",
        "connection",
        "reusable",
        "started",
        "waiting",
    )

    def __init__(self, connection: Connection, limits: Limits) -> None:
        self.connection = connection
        #: May another request follow? False for good once it is.
        self.reusable = True
        #: The head of the current answer has been made.
        self.started = False
        #: The end of the current answer has been made.
        self.complete = False
        self._limits = limits
        #: Received beyond the current request: the next ones, pipelined.
        self._buffer = bytearray()
        self._request: Head | None = None
        self._draining = False
        #: To be entered around all of `receive`; it has a deadline only while a request is awaited.
        self.waiting = trio.CancelScope()
        self._idle = False
        self._chunked = self._close_delimited = self._bodiless = False
        #: Bytes that a sized, streamed body still lacks.
        self._remaining = 0

    def drain(self) -> None:
        """Serve no further request: the current answer says `connection: close`; an idle connection ends at once."""
        self._draining = True
        self.reusable = False
        if self._idle:
            self.waiting.cancel()

    async def receive(self) -> Request | None:
        """The next request, within the deadlines; `waiting` is cancelled after them. None: the peer is done.

        One that was there when `waiting` was cancelled is the last, and has to be answered outside of it.
        Raises `Refusal`, `ConnectionBroken`. After any of these the connection is of no further use.
        """
        if not self.reusable:
            return None
        self.started = self.complete = False
        self._request = None
        self._idle = not self._buffer
        if self._buffer:
            await trio.lowlevel.checkpoint()  # a client that pipelines must not keep all others waiting
        # Until a request is there, it is this connection's last.
        self.reusable = False
        self._within(self._limits.idle_timeout)
        raw = await self._receive_head()
        if raw is None:
            return None
        head = self._request = parse_head(raw)
        if head.length > self._limits.max_body:
            raise too_large(self._limits.max_body)
        if head.expects_continue and (head.chunked or head.length) and not self._buffer:
            await self.connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await (self._receive_chunked() if head.chunked else self._receive_sized(head.length))
        if body is None:
            return None
        self.waiting.deadline = math.inf
        self.reusable = head.keep_alive and not (self._draining or self.waiting.cancel_called)
        return Request(
            method=head.method,
            target=head.target,
            path=head.path,
            query=head.query,
            headers=head.headers,
            body=body,
            http10=head.http10,
            keep_alive=head.keep_alive,
            client=self.connection.peer,
        )

    @property
    def overdue(self) -> Refusal | None:
        """What to say when `waiting` was cancelled: nothing to who has not begun a request."""
        return None if self._idle else Refusal(408, "the request did not arrive in time")

    def _within(self, seconds: float) -> None:
        self.waiting.deadline = trio.current_time() + seconds

    async def _receive_head(self) -> bytes | None:
        buffer, limit = self._buffer, self._limits.max_head
        searched = 0
        begun = bool(buffer)
        while True:
            while buffer.startswith(b"\r\n"):
                del buffer[:2]  # some clients end a body with one line end too many
                searched = 0
            end = buffer.find(b"\r\n\r\n", max(0, searched - 3))
            if (end + 4 if end >= 0 else len(buffer)) > limit:
                raise Refusal(431, f"the request head is larger than the limit of {limit} bytes")
            if end >= 0:
                raw = bytes(buffer[: end + 4])
                del buffer[: end + 4]
                return raw
            if _bare_lf(buffer, searched):
                # Such a head may never end by our rules; do not wait for it.
                raise Refusal(400, "a bare LF in the request head")
            searched = len(buffer)
            if begun:
                self._within(self._limits.head_timeout)
            data = await self.connection.receive(RECEIVE_SIZE)
            if not data:
                return None
            begun, self._idle = self._idle, False
            buffer += data

    async def _receive_sized(self, length: int) -> bytes | None:
        buffer = self._buffer
        if length <= len(buffer):
            body = bytes(buffer[:length])
            del buffer[:length]
            return body
        # BytesIO gives its bytes away without a copy, and grows with what comes, not with what was announced.
        parts = io.BytesIO()
        parts.write(buffer)
        buffer.clear()
        while (missing := length - parts.tell()) > 0:
            self._within(self._limits.body_idle_timeout)
            data = await self.connection.receive(min(missing, LARGE_RECEIVE_SIZE))
            if not data:
                return None
            parts.write(data)
        return parts.getvalue()

    async def _receive_chunked(self) -> bytes | None:
        decoder = ChunkedBody(self._limits.max_body, self._limits.max_head)
        data = bytes(self._buffer)
        self._buffer.clear()
        while True:
            if data:
                used = decoder.feed(data)
                if decoder.complete:
                    self._buffer += data[used:]
                    return decoder.body()
            self._within(self._limits.body_idle_timeout)
            data = await self.connection.receive(RECEIVE_SIZE)
            if not data:
                return None

    async def refuse(self, refusal: Refusal) -> None:
        """Answer what is no request (400, 408, 413, 417, 431, 501, 505), for as long as its client listens."""
        body = error_body(refusal.status, refusal.message)
        with trio.move_on_after(LINGER_SECS):
            try:
                await self.respond(refusal.status, [(b"content-type", b"application/json")], body)
                await self._linger()
            except ConnectionBroken:
                pass

    async def finish(self) -> None:
        """Close after the last answer. Raises `ConnectionBroken`."""
        if not self.connection.quiet():
            with trio.move_on_after(LINGER_SECS):
                await self._linger()
        self.connection.close()

    async def _linger(self) -> None:
        """Half-close and wait for the client's end: closing on unread bytes would reset, and destroy the answer."""
        self.connection.end_sending()
        while await self.connection.receive(LARGE_RECEIVE_SIZE):
            pass

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer, sized; for HEAD, 204 and 304 without the body. Raises `ConnectionBroken`."""
        fields = [field for field in headers if field[0] != b"content-length"]
        if not (status == 204 or status < 200):
            fields.append((b"content-length", b"%d" % len(body)))
        head = self.head(status, fields)
        content = b"" if self._bodiless else body
        self.complete = True
        for part in message_parts(head, content):
            await self.connection.send(part)

    def head(self, status: int, headers: Headers, *, delimited: bool = False) -> bytes:
        """The head of a streamed answer.

        Framed by `content-length` if `headers` has it, else in chunks; for an HTTP/1.0 client, or if `delimited`, by
        the end of the connection. Hop-by-hop headers in `headers` are left out. Raises `ValueError` for a line end
        inside a field.
        """
        request = self._request
        self.started = True
        fields = [field for field in headers if field[0] not in HOP_BY_HOP]
        if status < 200 or status == 204:
            fields = [field for field in fields if field[0] != b"content-length"]  # RFC 9110, 8.6
        length = get(fields, b"content-length")
        http10 = request is not None and request.http10
        self._bodiless = status < 200 or status in (204, 304) or (request is not None and request.method == "HEAD")
        self._chunked = self._close_delimited = False
        self._remaining = 0
        if self._bodiless:
            pass
        elif length is not None:
            self._remaining = int(length)
        elif http10 or delimited:
            self._close_delimited = True
            self.reusable = False
        else:
            self._chunked = True
            fields.append((b"transfer-encoding", b"chunked"))
        if not self.reusable:
            fields.append((b"connection", b"close"))
        elif http10:
            fields.append((b"connection", b"keep-alive"))
        return status_head(status, fields)

    def frame(self, data: bytes, head: bytes = b"", *, last: bool = False) -> bytes:
        """Body bytes of the streamed answer as they go on the wire, after its head, before its end: one copy of all."""
        if self._chunked:
            end = self.last() if last else b""
            return b"".join((head, b"%x\r\n" % len(data), data, b"\r\n", end)) if data else head + end
        if self._bodiless:
            data = b""
        elif not self._close_delimited:
            data = data[: self._remaining]  # a byte more would be read as the start of the next answer
            self._remaining -= len(data)
        return head + data + (self.last() if last else b"")

    @property
    def in_chunks(self) -> bool:
        """The streamed answer is framed by chunks: one that has another's size and bytes is its frame."""
        return self._chunked

    def last(self) -> bytes:
        """The end of the streamed answer. A sized body that lacks bytes stays incomplete: `serve` will break it off."""
        self.complete = not self._remaining
        return b"0\r\n\r\n" if self._chunked else b""

    def break_off(self) -> None:
        """Close, so that the client cannot take the current answer for complete.

        What was written is still delivered, then the end comes before the body's own end. Only where the end of the
        connection *is* the body's end (HTTP/1.0) the connection is reset.
        """
        self.reusable = False
        if self._close_delimited and self.started:
            self.connection.abort()
        else:
            self.connection.close()


def _bare_lf(buffer: bytearray, start: int) -> bool:
    """Does an LF without its CR stand at or after `start`?"""
    at = buffer.find(b"\n", start)
    while at >= 0:
        if at == 0 or buffer[at - 1] != 13:
            return True
        at = buffer.find(b"\n", at + 1)
    return False


async def serve(
    listener: Listener,
    handler: Handler,
    limits: Limits,
    *,
    draining: Drain,
    on_error: Callable[[Exception], None] | None = None,
) -> None:
    """Serve `listener` until `draining` is set and the last request that was live then has been answered.

    From then on nothing is accepted, answers say `connection: close`, idle connections are closed. An exception of the
    handler goes to `on_error`; its client gets a 500, or a broken answer if that had begun; others do not notice.
    `ConnectionBroken` from a handler means that its client has left, and is no error.
    """
    live: set[ServerConnection] = set()

    async def run(served: ServerConnection) -> None:
        try:
            await _converse(served, handler, on_error)
        finally:
            live.discard(served)

    async with trio.open_nursery() as connections:

        async def accept() -> None:
            while True:
                served = ServerConnection(await listener.accept(), limits)
                live.add(served)
                connections.start_soon(run, served)

        async with trio.open_nursery() as accepting:
            accepting.start_soon(accept)
            await draining.wait()
            accepting.cancel_scope.cancel()
        listener.close()
        for served in live:
            served.drain()


async def _converse(served: ServerConnection, handler: Handler, on_error: Callable[[Exception], None] | None) -> None:
    """All requests of one connection; leaves it closed."""
    try:
        refusal: Refusal | None = None
        last: Request | None = None
        with served.waiting:
            try:
                last = await _answer_all(served, handler, on_error)
            except Refusal as exc:
                refusal = exc
        if last is not None:
            await _answer(served, last, handler, on_error)
        elif served.waiting.cancelled_caught:
            refusal = served.overdue
        if refusal is not None:
            await served.refuse(refusal)
        await served.finish()
    except ConnectionBroken:
        pass
    finally:
        served.break_off()


async def _answer_all(
    served: ServerConnection, handler: Handler, on_error: Callable[[Exception], None] | None
) -> Request | None:
    """Requests until there are no more, or one that is to be answered outside of `served.waiting`: that one.

    Raises `Refusal`, and as `_answer`.
    """
    while (request := await served.receive()) is not None:
        if served.waiting.cancel_called:
            return request
        await _answer(served, request, handler, on_error)
    return None


async def _answer(
    served: ServerConnection, request: Request, handler: Handler, on_error: Callable[[Exception], None] | None
) -> None:
    """One request. Raises `ConnectionBroken`, also if the answer has no good end."""
    try:
        await handler(served, request)
    except ConnectionBroken:
        raise
    except Exception as exc:
        if on_error is not None:
            on_error(exc)
        if served.started:
            raise ConnectionBroken("the answer has no good end") from exc
        served.reusable = False
        body = error_body(500, "internal error")
        await served.respond(500, [(b"content-type", b"application/json")], body)
    if not served.complete:
        raise ConnectionBroken("the answer has no good end")
