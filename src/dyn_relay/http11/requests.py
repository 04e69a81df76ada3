"""Reading a request: judging its head, decoding its chunked body. Sans-IO and strict.

llhttp does the parsing. What it lets pass although RFC 9112 or common sense does not, and what older releases of it let
pass, is refused here: two readers of one byte stream must never disagree on where a message ends.
"""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import dataclass

import httptools

from dyn_relay.http11.errors import Refusal
from dyn_relay.http11.headers import Headers, get, get_all, tokens

_REQUEST_LINE = re.compile(rb"([A-Z][A-Z-]*) ([!\"$-~]+) HTTP/1\.([01])")
_OTHER_VERSION = re.compile(rb"[A-Z]+ [!-~]+ HTTP/(?!1\.[01]\b)[0-9](?:\.[0-9])?")
_ABSOLUTE = re.compile(rb"https?://[^/?]+", re.IGNORECASE)
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+;=:%\[\]-]*")
_PREFACE = b"PRI * HTTP/2.0"
#: Bytes that have no place in a head, NUL above all.
_CONTROLS = bytes(set(range(32)) - {9, 10, 13}) + b"\x7f"


@dataclass(frozen=True, slots=True)
class Head:
    """A request's head, found to be in order."""

    method: str
    target: bytes
    path: str
    query: str
    headers: Headers
    http10: bool
    keep_alive: bool
    #: Declared bytes of the body; 0 also when it is chunked.
    length: int
    chunked: bool
    #: The client waits for `100 Continue` before it sends the body.
    expects_continue: bool


class _Fields:
    """llhttp's callbacks for a head. It and its parser name each other: `parse` undoes that, for there is no collector
    of garbage that would be as quick.
    """

    __slots__ = ("headers", "keep_alive", "parser")

    def __init__(self) -> None:
        self.headers: Headers = []
        self.keep_alive = False
        self.parser: httptools.HttpRequestParser | None = None

    def parse(self, raw: bytes) -> None:
        """Raises `httptools.HttpParserError`."""
        self.parser = httptools.HttpRequestParser(self)
        try:
            self.parser.feed_data(raw)
        finally:
            self.parser = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        # Asked here, since llhttp forgets it when a message is complete.
        assert self.parser is not None
        self.keep_alive = self.parser.should_keep_alive()


def parse_head(raw: bytes) -> Head:
    """Judge a whole head, from the request line to the blank line. Raises `Refusal`."""
    line = raw[: raw.index(b"\r\n")]
    matched = _REQUEST_LINE.fullmatch(line)
    if matched is None:
        raise _bad_request_line(line)
    _check_bytes(raw)
    fields = _Fields()
    problem = ""
    try:
        fields.parse(raw)
    except httptools.HttpParserUpgrade:
        pass  # we do not upgrade, and read the body ourselves
    except httptools.HttpParserError as exc:
        problem = str(exc) or "malformed request"
    headers = fields.headers
    chunked = _transfer_coding(headers, problem)
    if problem:
        raise Refusal(400, problem)
    method, target, http10 = matched[1].decode(), matched[2], matched[3] == b"0"
    if method == "CONNECT":
        raise Refusal(501, "CONNECT is not supported")
    if chunked and http10:
        raise Refusal(400, "Transfer-Encoding in an HTTP/1.0 request")
    _check_host(headers, http10)
    path, query = _split_target(method, target)
    lengths = get_all(headers, b"content-length")
    return Head(
        method=method,
        target=target,
        path=path,
        query=query,
        headers=headers,
        http10=http10,
        keep_alive=fields.keep_alive,
        length=int(lengths[0]) if lengths else 0,
        chunked=chunked,
        expects_continue=_expectation(headers, http10),
    )


def _bad_request_line(line: bytes) -> Refusal:
    if line == _PREFACE:
        return Refusal(400, "HTTP/2 is not spoken here")
    if _OTHER_VERSION.fullmatch(line):
        return Refusal(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    return Refusal(400, "malformed request line")


def _check_bytes(raw: bytes) -> None:
    ends = raw.count(b"\r\n")
    if raw.count(b"\n") != ends or raw.count(b"\r") != ends:
        raise Refusal(400, "a bare CR or LF in the request head")
    if b"\r\n " in raw or b"\r\n\t" in raw:
        raise Refusal(400, "a folded header line")
    if len(raw.translate(None, _CONTROLS)) != len(raw):
        raise Refusal(400, "a control character in the request head")


def _transfer_coding(headers: Headers, problem: str) -> bool:
    """Is the body chunked? Refuses codings that we do not know, which llhttp may have refused for its own reason."""
    values = get_all(headers, b"transfer-encoding")
    if not values:
        return False
    if get(headers, b"content-length") is not None:
        raise Refusal(400, problem or "both Content-Length and Transfer-Encoding")
    if any(coding != b"chunked" for coding in tokens(headers, b"transfer-encoding")):
        raise Refusal(501, "the only transfer coding understood is chunked")
    if [value.lower() for value in values] != [b"chunked"]:
        raise Refusal(400, problem or "malformed Transfer-Encoding")
    return True


def _check_host(headers: Headers, http10: bool) -> None:
    hosts = get_all(headers, b"host")
    if len(hosts) > 1 or (not hosts and not http10):
        raise Refusal(400, "exactly one Host header is required")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise Refusal(400, "malformed Host header")


def _split_target(method: str, target: bytes) -> tuple[str, str]:
    if target == b"*":
        if method != "OPTIONS":
            raise Refusal(400, "only OPTIONS may ask about *")
        return "*", ""
    if absolute := _ABSOLUTE.match(target):
        target = target[absolute.end() :]
        if not target.startswith(b"/"):
            target = b"/" + target
    if not target.startswith(b"/"):
        raise Refusal(400, "malformed request target")
    path, _, query = target.decode("ascii").partition("?")
    return path, query


def _expectation(headers: Headers, http10: bool) -> bool:
    expected = get_all(headers, b"expect")
    if not expected or http10:
        return False
    if [value.lower() for value in expected] != [b"100-continue"]:
        raise Refusal(417, "the only expectation understood is 100-continue")
    return True


class ChunkedBody:
    """Decodes one chunked request body and finds where it ends, so that a pipelined request after it is kept whole."""

    __slots__ = ("_body", "_max_body", "_max_overhead", "_parser", "_wire", "complete")

    def __init__(self, max_body: int, max_overhead: int) -> None:
        """`max_overhead`: bytes of extensions and trailers granted on top of a chunk header's usual size."""
        self.complete = False
        self._body = io.BytesIO()
        self._max_body = max_body
        self._max_overhead = max_overhead
        self._wire = 0
        #: None once the body is complete: the two name each other.
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        # llhttp reads a body only after a head; this one says what we have already judged.
        self._parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body.write(data)

    def on_message_complete(self) -> None:
        self.complete = True

    def feed(self, data: bytes) -> int:
        """Take bytes; return how many belong to this body: all, unless it is complete. Raises `Refusal`.

        llhttp does not say where a message ended, so it never gets bytes beyond: a chunked body ends with CRLF CRLF,
        and after each place that could be its end we ask.
        """
        ends = itertools.chain((1, 2, 3), (found.end() for found in re.finditer(rb"\r\n\r\n", data)), (len(data),))
        used = 0
        for end in ends:
            if self._parser is None or not used < end <= len(data):
                continue
            try:
                self._parser.feed_data(data[used:end])
            except httptools.HttpParserError as exc:
                raise Refusal(400, str(exc) or "malformed chunked body") from None
            used = end
            if self.complete:
                self._parser = None
        self._wire += used
        size = self._body.tell()
        if size > self._max_body:
            raise too_large(self._max_body)
        if self._wire - size > self._max_overhead + 16 * size:
            raise Refusal(400, "too many bytes of chunk extensions or trailers")
        return used

    def body(self) -> bytes:
        """The body so far, without a copy."""
        return self._body.getvalue()


def too_large(max_body: int) -> Refusal:
    """The refusal of a body over the limit, which it names."""
    return Refusal(413, f"the request body is larger than the limit of {max_body} bytes")
