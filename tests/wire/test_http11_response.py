"""Reading responses: any fragmentation, the end of the body, and what is not a response (A2, D4)."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_kit import feed_all, pieces

from dyn_relay.http11.errors import BadResponse
from dyn_relay.http11.response import MAX_HEAD, ResponseReader

OK = b"HTTP/1.1 200 OK\r\n"


def read(parts: list[bytes], **options: bool) -> tuple[ResponseReader, bytes]:
    reader = ResponseReader(**options)
    return reader, b"".join([reader.feed(part) for part in parts])


def by_h11(wire: bytes, eof: bool) -> tuple[int, bytes, bool]:
    """Status, body and completeness as h11 sees them."""
    peer = h11.Connection(h11.CLIENT)
    peer.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    peer.send(h11.EndOfMessage())
    peer.receive_data(wire)
    if eof:
        peer.receive_data(b"")
    status, body = 0, b""
    while True:
        event = peer.next_event()
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return status, body, True
        elif event is h11.NEED_DATA:
            return status, body, False


interim = st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" * 2])
field = st.sampled_from([b"Date: x\r\n", b"Server: uvicorn\r\n", b"X-A: b\r\nX-A: c\r\n"])
bodies = st.lists(
    st.one_of(st.binary(min_size=1, max_size=50), st.just(b"0\r\n\r\n"), st.just(b"data: [DONE]\n\n")), max_size=5
)
framing = st.sampled_from(["sized", "chunked", "closed"])


@settings(max_examples=512)
@given(
    before=interim,
    status=st.sampled_from([200, 400, 503]),
    fields=st.lists(field, max_size=3),
    body=bodies,
    how=framing,
    cuts=st.lists(st.integers(0, 600), max_size=12),
)
def test_any_fragmentation_gives_the_response_that_h11_reads(
    before: bytes, status: int, fields: list[bytes], body: list[bytes], how: str, cuts: list[int]
) -> None:
    content = b"".join(body)
    head = before + b"HTTP/1.1 %d Some Words\r\n" % status + b"".join(fields)
    wire = {
        "sized": head + b"Content-Length: %d\r\n\r\n" % len(content) + content,
        "chunked": head
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"%X\r\n%b\r\n" % (len(part), part) for part in body)
        + b"0\r\n\r\n",
        "closed": head + b"\r\n" + content,
    }[how]
    reader, got = read(pieces(wire, cuts))
    assert reader.complete is (how != "closed")
    assert reader.keep_alive is (how != "closed")
    assert reader.eof() is True
    assert (reader.status, got, True) == by_h11(wire, eof=how == "closed")
    assert not any(key == b"link" for key, _ in reader.headers)
    assert [value for key, value in reader.headers if key == b"x-a"] == [b"b", b"c"] * fields.count(
        b"X-A: b\r\nX-A: c\r\n"
    )


CUTTABLE = {
    "sized": OK + b"Content-Length: 5\r\n\r\nhello",
    "chunked": OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", CUTTABLE)
def test_d4_a_response_cut_at_any_byte_is_not_complete(name: str) -> None:
    wire = CUTTABLE[name]
    for at in range(len(wire)):
        reader, _ = read([wire[:at]] if at else [])
        assert not reader.complete
        assert reader.eof() is False, at
        assert reader.bytes_seen is (at > 0)
        assert reader.head_complete is (at >= wire.index(b"\r\n\r\n") + 4)


def test_a2_a_close_delimited_response_may_be_empty_and_is_not_kept() -> None:
    reader, body = read([OK + b"\r\n"])
    assert (body, reader.complete, reader.eof(), reader.complete, reader.keep_alive) == (b"", False, True, True, False)


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
        (b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5\r\n", True),
    ],
)
def test_keep_alive(head: bytes, kept: bool) -> None:
    reader, body = read([head + b"Content-Length: 2\r\n\r\nok"])
    assert (body, reader.complete, reader.keep_alive) == (b"ok", True, kept)


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_a_body_end_with_the_head(status: int) -> None:
    reader, _ = read([b"HTTP/1.1 %d X\r\n\r\n" % status])
    assert reader.complete


def test_the_answer_to_a_head_request_ends_with_its_head() -> None:
    reader, body = read([OK + b"Content-Length: 500\r\n\r\n"], no_body=True)
    assert (body, reader.complete, reader.keep_alive) == (b"", True, True)
    assert reader.feed(b"x") == b""
    assert not reader.keep_alive


@pytest.mark.parametrize("extra", [b"HTTP/1.1 200 OK\r\n", b"\0garbage", b"x"])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("connection", [b"", b"Connection: close\r\n"])
def test_bytes_after_the_end_spoil_the_connection_not_the_response(
    extra: bytes, together: bool, connection: bytes
) -> None:
    wire = OK + connection + b"Content-Length: 2\r\n\r\nok"
    reader, body = read([wire + extra] if together else [wire, extra])
    assert (reader.status, body, reader.complete, reader.keep_alive) == (200, b"ok", True, False)
    assert reader.headers[-1] == (b"content-length", b"2")


BAD = {
    "garbage": b"garbage\r\n\r\n",
    "an SSH banner": b"SSH-2.0-OpenSSH_9.2\r\n",
    "TLS alert": b"\x15\x03\x01\x00\x02\x02\x46",
    "bad status": b"HTTP/1.1 2000 OK\r\n\r\n",
    "another version": b"HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "another protocol": b"ICY 200 OK\r\n\r\n",
    "both lengths": OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
    "two lengths": OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "bad length": OK + b"Content-Length: 2x\r\n\r\nok",
    "unknown coding": OK + b"Transfer-Encoding: gzip\r\n\r\nabc",
    "unknown coding before chunked": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "folded line": OK + b"A: b\r\n c\r\n\r\n",
    "NUL": OK + b"A: \0\r\n\r\n",
    "bad chunk size": OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "chunk longer than its size": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
    "switch of protocols": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    "switch without words": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "an endless head": OK + b"A: b\r\n" * (MAX_HEAD // 6 + 1),
    "endless interim responses": b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_HEAD // 25 + 1),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("step", [1, 1 << 30])
def test_what_is_no_response(name: str, step: int) -> None:
    wire = BAD[name]
    reader = ResponseReader()
    with pytest.raises(BadResponse) as caught:
        feed_all(reader.feed, wire, step)
    assert str(caught.value)
    assert not reader.complete


@settings(max_examples=300)
@given(noise=st.binary(max_size=200), start=st.sampled_from([b"", OK, OK + b"Transfer-Encoding: chunked\r\n\r\n"]))
def test_noise_never_raises_anything_else(noise: bytes, start: bytes) -> None:
    reader = ResponseReader()
    try:
        reader.feed(start + noise)
    except BadResponse:
        pass


@pytest.mark.parametrize(
    ("begin", "flood"), [(b"0\r\n", b"x-a: b\r\n"), (b"1;", b"extension")], ids=["trailers", "ext"]
)
def test_framing_without_an_end(begin: bytes, flood: bytes) -> None:
    """It costs memory, and time for all others, and is no answer."""
    head = OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"
    with pytest.raises(BadResponse):
        read([head + begin, *[flood * 1000] * (MAX_HEAD // 1000)])


@pytest.mark.parametrize("status", [b"000", b"099"])
def test_a_status_that_is_none(status: bytes) -> None:
    with pytest.raises(BadResponse):
        read([b"HTTP/1.1 %b X\r\ncontent-length: 0\r\n\r\n" % status])
