"""Header lists: lower-case names, in the order of the wire."""

from __future__ import annotations

from http import HTTPStatus

#: (name in lower case, value without surrounding blanks), in the order of the wire.
Headers = list[tuple[bytes, bytes]]

#: About one connection, not about the message: never forwarded (RFC 9110 section 7.6.1, and older ones still in use).
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"trailers",
        b"transfer-encoding",
        b"upgrade",
    )
)

#: Largest body, in bytes, that is copied to share a write with its head.
JOIN_LIMIT = 65536

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


def get(headers: Headers, name: bytes) -> bytes | None:
    """The first value of `name` (lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def get_all(headers: Headers, name: bytes) -> list[bytes]:
    """The values of all fields called `name` (lower case)."""
    return [value for key, value in headers if key == name]


def tokens(headers: Headers, name: bytes) -> list[bytes]:
    """The members of a comma-separated list field, over all its lines, in lower case; empty ones left out."""
    values = [value for key, value in headers if key == name]
    return [member for value in values for part in value.split(b",") if (member := part.strip().lower())]


def end_to_end(headers: Headers) -> Headers:
    """The headers that may be forwarded: without hop-by-hop ones and those that `Connection` names.

    `content-length` and `host` stay; `status_head` and `request_parts` write their own.
    """
    drop = HOP_BY_HOP
    if get(headers, b"connection") is not None:
        drop = drop.union(tokens(headers, b"connection"))
    return [field for field in headers if field[0] not in drop]


def encode_head(start_line: bytes, headers: Headers) -> bytes:
    """A message head, with its blank line. Raises `ValueError` if a field would smuggle in a line of its own."""
    lines = [start_line]
    lines += [b"%b: %b" % field for field in headers]
    lines.append(b"\r\n")
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
        raise ValueError("a line end inside a header field")
    return head


def message_parts(head: bytes, body: bytes) -> list[bytes]:
    """What to write one after the other: one part, or two where copying the body costs more than a second write."""
    return [head, body] if len(body) > JOIN_LIMIT else [head + body]


def status_head(status: int, headers: Headers) -> bytes:
    """The head of an answer."""
    return encode_head(b"HTTP/1.1 %d %b" % (status, reason(status)), headers)


def reason(status: int) -> bytes:
    """The usual words for a status; empty if it has none."""
    return _REASONS.get(status, b"")
