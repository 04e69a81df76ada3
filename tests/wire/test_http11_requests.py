"""Request heads and chunked bodies: what is refused, and that what is taken means to us what it means to h11."""

from __future__ import annotations

import h11
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from wire_kit import feed_all, pieces

from dyn_relay.http11.errors import Refusal
from dyn_relay.http11.requests import ChunkedBody, parse_head

POST = b"POST /generate HTTP/1.1\r\nHost: x\r\n"

REFUSED = {
    "both lengths": (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "both lengths, turned round": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400),
    "both lengths, unknown coding": (POST + b"Content-Length: 3\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
    "differing lengths": (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
    "repeated length": (POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\n", 400),
    "list of lengths": (POST + b"Content-Length: 3, 3\r\n\r\n", 400),
    "signed length": (POST + b"Content-Length: +3\r\n\r\n", 400),
    "negative length": (POST + b"Content-Length: -3\r\n\r\n", 400),
    "hexadecimal length": (POST + b"Content-Length: 0x3\r\n\r\n", 400),
    "empty length": (POST + b"Content-Length:\r\n\r\n", 400),
    "length with an underscore": (POST + b"Content-Length: 1_0\r\n\r\n", 400),
    "length of many digits": (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
    "unknown coding": (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501),
    "unknown coding before chunked": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
    "misspelt coding": (POST + b"Transfer-Encoding: xchunked\r\n\r\n", 501),
    "identity": (POST + b"Transfer-Encoding: identity\r\n\r\n", 501),
    "chunked twice": (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n", 400),
    "chunked in two lines": (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "empty coding": (POST + b"Transfer-Encoding:\r\n\r\n", 400),
    "chunked in 1.0": (b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "folded line": (POST + b"A: b\r\n c\r\n\r\n", 400),
    "folded line with a tab": (POST + b"A: b\r\n\tc\r\n\r\n", 400),
    "fold before the first field": (b"GET / HTTP/1.1\r\n Host: x\r\n\r\n", 400),
    "bare LF after a field": (POST + b"A: b\nC: d\r\n\r\n", 400),
    "bare LF after the request line": (b"GET / HTTP/1.1\nHost: x\r\n\r\n", 400),
    "bare LF before the request line": (b"\nGET / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "bare CR in a value": (POST + b"A: b\rc\r\n\r\n", 400),
    "NUL in a value": (POST + b"A: b\0c\r\n\r\n", 400),
    "NUL in a name": (POST + b"A\0: b\r\n\r\n", 400),
    "NUL in the target": (b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "control character in a value": (POST + b"A: \x1b[0m\r\n\r\n", 400),
    "DEL in a value": (POST + b"A: \x7f\r\n\r\n", 400),
    "blank before the colon": (POST + b"Content-Length : 3\r\n\r\n", 400),
    "tab before the colon": (POST + b"A\t: 3\r\n\r\n", 400),
    "no colon": (POST + b"A\r\n\r\n", 400),
    "no name": (POST + b": b\r\n\r\n", 400),
    "non-ASCII name": (POST + b"\xe4: b\r\n\r\n", 400),
    "parenthesis in a name": (POST + b"A(b): c\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400),
    "host with a path": (b"GET / HTTP/1.1\r\nHost: x/y\r\n\r\n", 400),
    "host with credentials": (b"GET / HTTP/1.1\r\nHost: a@x\r\n\r\n", 400),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\n", 400),
    "HTTP/2 request": (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    "HTTP/0.9 version": (b"GET / HTTP/0.9\r\nHost: x\r\n\r\n", 505),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nHost: x\r\n\r\n", 505),
    "no version": (b"GET /\r\nHost: x\r\n\r\n", 400),
    "another protocol": (b"GET / RTSP/1.0\r\nHost: x\r\n\r\n", 400),
    "lower-case protocol": (b"GET / http/1.1\r\nHost: x\r\n\r\n", 400),
    "two blanks": (b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "tab in the request line": (b"GET\t/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "blank at the end": (b"GET / HTTP/1.1 \r\nHost: x\r\n\r\n", 400),
    "blank in the target": (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "fragment": (b"GET /a#b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "non-ASCII target": (b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "relative target": (b"GET generate HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "star for GET": (b"GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "another scheme": (b"GET ftp://x/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "tunnel": (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 501),
    "lower-case method": (b"get / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "unknown method": (b"FROB / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "TLS client hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "empty head": (b"\r\n\r\n", 400),
    "unknown expectation": (POST + b"Expect: 200-ok\r\n\r\n", 417),
    "two expectations": (POST + b"Expect: 100-continue\r\nExpect: x\r\n\r\n", 417),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    raw, status = REFUSED[name]
    with pytest.raises(Refusal) as caught:
        parse_head(raw)
    assert caught.value.status == status, caught.value.message
    assert caught.value.message


TARGETS = {
    b"/generate": ("/generate", ""),
    b"/generate/": ("/generate/", ""),
    b"/a%20b//c?x=1&y=?/": ("/a%20b//c", "x=1&y=?/"),
    b"/?": ("/", ""),
    b"http://other:1/v1/models?a": ("/v1/models", "a"),
    b"HTTP://other": ("/", ""),
    b"http://other?a=b": ("/", "a=b"),
    b"//double": ("//double", ""),
}


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target: bytes) -> None:
    head = parse_head(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target)
    assert (head.path, head.query) == TARGETS[target]
    assert head.target == target


def test_star() -> None:
    assert parse_head(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n").path == "*"


def test_what_a_head_says() -> None:
    head = parse_head(
        b"PUT /generate HTTP/1.1\r\nHOST: [::1]:80\r\nX-A:  b \t\r\nX-A: \xe4\r\ncontent-length: 07\r\n"
        b"Expect: 100-Continue\r\n\r\n"
    )
    assert head.headers == [
        (b"host", b"[::1]:80"),
        (b"x-a", b"b"),
        (b"x-a", b"\xe4"),
        (b"content-length", b"07"),
        (b"expect", b"100-Continue"),
    ]
    assert (head.method, head.length, head.chunked, head.expects_continue) == ("PUT", 7, False, True)
    assert parse_head(POST + b"Transfer-Encoding: Chunked\r\n\r\n").chunked


@pytest.mark.parametrize(
    ("version", "connection", "kept"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: close\r\n", False),
        (b"1.1", b"Connection: keep-alive, Close\r\n", False),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: Keep-Alive\r\n", True),
        (b"1.1", b"Connection: upgrade\r\nUpgrade: h2c\r\n", True),
    ],
)
def test_keep_alive(version: bytes, connection: bytes, kept: bool) -> None:
    head = parse_head(b"GET / HTTP/%b\r\nHost: x\r\n%b\r\n" % (version, connection))
    assert head.keep_alive is kept
    assert head.http10 is (version == b"1.0")


def test_an_expectation_of_http_1_0_is_ignored() -> None:
    assert not parse_head(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\n\r\n").expects_continue


name = st.from_regex(rb"\A[A-Za-z0-9!#$%&'*+.^_`|~-]{1,12}\Z").filter(
    lambda raw: (
        raw.lower() not in (b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade")
    )
)
value = st.from_regex(rb"\A(?:[!-~\x80-\xff](?:[\t !-~\x80-\xff]{0,20}[!-~\x80-\xff])?)?\Z")


@settings(max_examples=300)
@given(fields=st.lists(st.tuples(name, value), max_size=8), target=st.from_regex(rb"\A/[a-zA-Z0-9/?&=%._~-]{0,30}\Z"))
def test_a_head_means_what_it_means_to_h11(fields: list[tuple[bytes, bytes]], target: bytes) -> None:
    raw = b"POST %b HTTP/1.1\r\nHost: x\r\n" % target + b"".join(b"%b: %b\r\n" % field for field in fields) + b"\r\n"
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(raw)
    event = peer.next_event()
    assert isinstance(event, h11.Request)
    head = parse_head(raw)
    assert head.headers == [(bytes(key), bytes(text)) for key, text in event.headers]
    assert head.target == event.target


@settings(max_examples=500)
@given(data=st.data())
def test_whatever_we_take_h11_takes_too_with_the_same_framing(data: st.DataObject) -> None:
    """Mutate good heads: we may refuse more than h11 does, but never read another body out of the same bytes."""
    raw = bytearray(
        data.draw(
            st.sampled_from(
                [POST + b"Content-Length: 5\r\nA: b\r\n\r\n", POST + b"Transfer-Encoding: chunked\r\nA: b\r\n\r\n"]
            )
        )
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 5))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from(
                [b"", b" ", b"\t", b"\n", b"\r", b"\0", b":", b",", b"\x0b", b"0", b"\xff", b"\r\n", b"\r\n "]
            )
        )
    whole = bytes(raw)
    assume(b"\r\n\r\n" in whole)
    end = whole.index(b"\r\n\r\n")
    try:
        head = parse_head(whole[: end + 4])
    except Refusal:
        return
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(whole[: end + 4])
    try:
        event, dispute = peer.next_event(), ""
    except h11.RemoteProtocolError as exc:
        # h11's table of methods and targets is not ours; on framing there must be no dispute.
        event, dispute = None, str(exc).lower()
    assert not any(word in dispute for word in ("length", "encoding", "host")), (whole, dispute)
    if event is None:
        return
    assert isinstance(event, h11.Request), whole
    fields = dict(event.headers)
    assert head.chunked == (b"transfer-encoding" in fields), whole
    assert head.length == int(fields.get(b"content-length", b"0")), whole


def chunked(parts: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts if part)
    return body + b"0%b\r\n%b\r\n" % (extension, trailers)


@settings(max_examples=512)
@given(
    parts=st.lists(
        st.one_of(st.binary(max_size=40), st.sampled_from([b"\r\n\r\n", b"0\r\n\r\n", b"a\r\n\r\n\r\n"])), max_size=6
    ),
    extension=st.sampled_from([b"", b";a", b";a=b", b';a="b;c"']),
    trailers=st.sampled_from([b"", b"X: y\r\n", b"X: y\r\nZ: w\r\n"]),
    rest=st.sampled_from([b"", b"G", b"GET / HTTP/1.1\r\n\r\n", b"\r\n\r\n", b"0\r\n\r\n"]),
    cuts=st.lists(st.integers(0, 400), max_size=10),
)
def test_a_chunked_body_ends_where_it_ends(
    parts: list[bytes], extension: bytes, trailers: bytes, rest: bytes, cuts: list[int]
) -> None:
    wire = chunked(parts, extension, trailers)
    decoder = ChunkedBody(1 << 20, 1 << 16)
    used = 0
    for piece in pieces(wire + rest, cuts):
        assert not decoder.complete
        used += decoder.feed(piece)
        if decoder.complete:
            break
    assert decoder.complete
    assert used == len(wire)
    assert decoder.body() == b"".join(parts)


BAD_CHUNKS = {
    "bare LF after the size": b"5\nhello\r\n0\r\n\r\n",
    "bare LF after the data": b"5\r\nhello\n0\r\n\r\n",
    "nothing after the data": b"5\r\nhello0\r\n\r\n",
    "too little data": b"6\r\nhello\r\n0\r\n\r\n",
    "blank before the size": b" 5\r\nhello\r\n0\r\n\r\n",
    "blank after the size": b"5 \r\nhello\r\n0\r\n\r\n",
    "hexadecimal prefix": b"0x5\r\nhello\r\n0\r\n\r\n",
    "sign": b"-5\r\nhello\r\n0\r\n\r\n",
    "plus": b"+5\r\nhello\r\n0\r\n\r\n",
    "no size": b"\r\nhello\r\n0\r\n\r\n",
    "overflow": b"fffffffffffffffff\r\n",
    "LF in an extension": b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "NUL in an extension": b"5;a=\0\r\nhello\r\n0\r\n\r\n",
    "length as a trailer": b"0\r\nContent-Length: 5\r\n\r\n",
    "folded trailer": b"0\r\nA: b\r\n c\r\n\r\n",
    "bare LF as the end": b"0\r\n\n",
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
@pytest.mark.parametrize("step", [1, 1000])
def test_bad_chunks_are_refused(name: str, step: int) -> None:
    wire = BAD_CHUNKS[name]
    decoder = ChunkedBody(1 << 20, 1 << 16)
    with pytest.raises(Refusal) as caught:
        feed_all(decoder.feed, wire, step)
    assert caught.value.status == 400


def test_a_chunked_body_over_the_limit_is_refused_as_soon_as_it_is() -> None:
    decoder = ChunkedBody(100, 1 << 16)
    assert decoder.feed(b"64\r\n" + b"x" * 100 + b"\r\n") == 106
    with pytest.raises(Refusal, match="100 bytes") as caught:
        decoder.feed(b"fffffff\r\nx")
    assert caught.value.status == 413


@pytest.mark.parametrize("wire", [b"1;" + b"a" * 3000 + b"\r\nx\r\n", b"0\r\n" + b"A: b\r\n" * 500])
def test_extensions_and_trailers_are_bounded(wire: bytes) -> None:
    with pytest.raises(Refusal, match="extensions or trailers"):
        ChunkedBody(1 << 20, 1000).feed(wire)
