"""Reading one response. Sans-IO."""

from __future__ import annotations

import httptools

from dyn_relay.http11.errors import BadResponse
from dyn_relay.http11.headers import Headers, get, tokens

#: Bytes of response heads (interim ones included), and of framing without a body byte (trailers, chunk extensions),
#: before we stop believing that it is one.
MAX_HEAD = 262144


class ResponseReader:
    """The parse of one response: feed it what the connection gives, take the decoded body bytes it returns."""

    __slots__ = (
        "_bare_bytes",
        "_body",
        "_chunked",
        "_in_chunk",
        "_interim",
        "_no_body",
        "_parser",
        "bytes_seen",
        "close_delimited",
        "complete",
        "head_complete",
        "headers",
        "keep_alive",
        "status",
    )

    def __init__(self, *, no_body: bool = False) -> None:
        """`no_body`: the request was a HEAD, so that the head is all there is, whatever it announces."""
        #: 0 until `head_complete`; interim (1xx) responses are skipped.
        self.status = 0
        self.headers: Headers = []
        self.head_complete = False
        #: The response has ended by its own framing.
        self.complete = False
        #: The connection may carry another request. Settled once `complete`.
        self.keep_alive = False
        #: The peer has sent something, be it a part of an interim response.
        self.bytes_seen = False
        self._body: list[bytes] = []
        self._chunked = self._in_chunk = False
        self._bare_bytes = 0
        self._interim = False
        self._no_body = no_body
        #: The body ends when the peer closes; a cut looks the same.
        self.close_delimited = False
        #: None once the response is complete: the two name each other, and would be garbage for a collector.
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        """Take the bytes of one read; return the body bytes among them, decoded.

        Raises `BadResponse`; the connection is then of no further use. Bytes after the end of the response are not
        read: they make `keep_alive` False.
        """
        self.bytes_seen = True
        if self._parser is None:
            self.keep_alive = False
            return b""
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise BadResponse("the peer switched protocols unasked") from None
        except httptools.HttpParserError as exc:
            if not self.complete:
                context = exc.__context__
                raise context if isinstance(context, BadResponse) else BadResponse(f"malformed: {exc}") from None
            self.keep_alive = False
        if self.complete:
            self._parser = None
        body = self._body
        if body:
            self._bare_bytes = 0
        elif self._bare_bytes > MAX_HEAD and not self.complete:
            raise BadResponse(f"the response head, or the framing of its body, is larger than {MAX_HEAD} bytes")
        if len(body) == 1:
            return body.pop()
        out = b"".join(body)
        body.clear()
        return out

    def at_chunk(self, data: bytes) -> bool:
        """After `feed(data)`: does the next byte begin another chunk, or the end?"""
        # A chunk's size without its LF is the only other thing that can stand between two chunks.
        return self._chunked and not self._in_chunk and not self.complete and data.endswith(b"\n")

    def eof(self) -> bool:
        """The peer closed. True if that completes the response (or it was complete), False if it was cut."""
        if self.close_delimited and self.head_complete:
            self.complete = True
        self.keep_alive = False
        self._parser = None
        return self.complete

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_complete:
            self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        assert self._parser is not None
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200
        if self._interim:
            self.headers = []
            return
        if status < 100:
            raise BadResponse(f"{status:03d} is no status")
        if self._parser.get_http_version() not in ("1.1", "1.0"):
            raise BadResponse("neither HTTP/1.1 nor HTTP/1.0")
        codings = tokens(self.headers, b"transfer-encoding")
        if codings not in ([], [b"chunked"]):
            raise BadResponse("the only transfer coding understood is chunked")
        self.status = status
        self.head_complete = True
        self._chunked = bool(codings)
        if self._no_body:
            self._finish()
            return
        sized = get(self.headers, b"content-length") is not None
        self.close_delimited = not codings and not sized and status not in (204, 304)

    def on_chunk_header(self) -> None:
        self._in_chunk = True

    def on_chunk_complete(self) -> None:
        self._in_chunk = False

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if not self._interim and not self.complete:
            self._finish()

    def _finish(self) -> None:
        assert self._parser is not None
        self.complete = True
        self.keep_alive = self._parser.should_keep_alive()
