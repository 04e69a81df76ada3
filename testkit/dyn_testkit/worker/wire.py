"""HTTP/1.1 on the server's side: requests are parsed with h11, answers are written byte by byte.

h11 never sees the answers, so that a fault can land inside a chunk-size line. Heads are spelled as uvicorn does for
SGLang 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus

import h11
import msgspec

from dyn_relay.net import Connection

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Request:
    """A request, whole. Header names in lower case."""

    method: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    def header(self, name: bytes) -> bytes | None:
        """The first header of this name."""
        return next((value for key, value in self.headers if key == name), None)


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer, to be sent with a content-length."""

    status: int
    body: bytes = b""
    content_type: bytes | None = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()
    #: These come after the content-length.
    late_headers: tuple[tuple[bytes, bytes], ...] = ()


def json_reply(value: object, status: int = 200) -> Reply:
    """An answer in compact JSON."""
    return Reply(status, msgspec.json.encode(value))


class BadRequest(Exception):
    """What came is not HTTP/1.1."""


async def read_request(connection: Connection, leftover: bytes) -> tuple[Request, bytes] | None:
    """The next request and the bytes that came after it; None if the peer closed before one began.

    Raises `BadRequest`, `dyn_relay.net.ConnectionBroken`.
    """
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=65536)
    if leftover:
        parser.receive_data(leftover)
    head: h11.Request | None = None
    body: list[bytes] = []
    try:
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                if parser.they_are_waiting_for_100_continue:
                    await connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
                    parser.send(h11.InformationalResponse(status_code=100, headers=[]))
                parser.receive_data(await connection.receive())
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                break
            else:
                return None
    except h11.RemoteProtocolError as exc:
        raise BadRequest(str(exc)) from exc
    request = Request(head.method.decode(), head.target.decode(), tuple(head.headers), b"".join(body))
    return request, parser.trailing_data[0]


def keeps_alive(request: Request) -> bool:
    """Does the client want the connection kept?"""
    return b"close" not in (request.header(b"connection") or b"").lower()


def head(
    status: int, wall: float, fields: tuple[tuple[bytes, bytes], ...], content_type: bytes | None, keep: bool
) -> bytes:
    """A response head; `fields` come before the content type, as uvicorn orders them (a stream's come after)."""
    chunked = content_type == EVENT_STREAM
    lines = [
        b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode()),
        b"date: " + formatdate(wall, usegmt=True).encode(),
        b"server: uvicorn",
        *(name + b": " + value for name, value in fields),
    ]
    if content_type is not None:
        lines.append(b"content-type: " + content_type)
    lines.append(b"vary: Origin")
    if chunked:
        lines.append(b"Transfer-Encoding: chunked")
    if not keep:
        lines.append(b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def reply_bytes(reply: Reply, wall: float, keep: bool, with_body: bool = True) -> bytes:
    """A whole answer; `with_body` is False for HEAD."""
    fields = (*reply.headers, (b"content-length", b"%d" % len(reply.body)), *reply.late_headers)
    return head(reply.status, wall, fields, reply.content_type, keep) + (reply.body if with_body else b"")


def stream_head(wall: float, keep: bool) -> bytes:
    """The head of a stream of server-sent events."""
    return head(200, wall, (), EVENT_STREAM, keep)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + payload + b"\n\n"
