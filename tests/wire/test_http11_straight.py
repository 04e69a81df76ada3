"""The straight way of an event, one chunk in one read: taken only where the long way gives the same."""

from __future__ import annotations

import pytest
from hypothesis import event as seen
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wire_kit import pieces

from dyn_relay.http11.response import ResponseReader
from dyn_relay.http11.sse import Splitter, in_one_chunk

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
HUGE = 1 << 30


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def long_way(data: bytes) -> list[tuple[bytes, bytes]] | None:
    """The events of a read between two chunks; None if more belongs to it, or less."""
    reader, splitter = ResponseReader(), Splitter(HUGE)
    reader.feed(HEAD)
    splitter.feed(b"data: first\n\n")
    events = splitter.feed(reader.feed(data))
    return events if reader.at_chunk(data) and not splitter.pending else None


lines = st.sampled_from([b"data: ", b"data:", b"data", b": ", b"event: x", b"", b"data: data: "])
payloads = st.one_of(
    st.binary(max_size=30), st.sampled_from([b"{}", b"[DONE]", b"a\rb", b"\r", b"x\n", b"x\n\ndata: y"])
)
ends = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\n", b"\r\n", b"\n\n\n", b""])
blocks = st.builds(lambda line, payload, end: line + payload + end, lines, payloads, ends)
framings = st.sampled_from(
    [
        chunk,
        lambda body: b"0%x\r\n%b\r\n" % (len(body), body),
        lambda body: b"%X\r\n%b\r\n" % (len(body), body),
        lambda body: b"%x;a=b\r\n%b\r\n" % (len(body), body),
        lambda body: chunk(body)[:-1],
        lambda body: chunk(body) + b"0\r\n\r\n",
        lambda body: chunk(body) + chunk(body),
        lambda body: chunk(body[:3]) + chunk(body[3:]) if len(body) > 3 else chunk(body),
        lambda body: chunk(body) + b"5",
        lambda body: body,
    ]
)


@settings(max_examples=1024)
@given(body=blocks, frame=framings)
@example(body=b"data: " + b"x" * 4096 + b"\n\n", frame=chunk)
@example(body=b"data: \n\n", frame=chunk)
def test_straight_is_what_the_long_way_gives(body: bytes, frame) -> None:
    data = frame(body)
    payload = in_one_chunk(data)
    seen(f"straight: {payload is not None}")
    if payload is not None:
        assert long_way(data) == [(b"data: " + payload + b"\n\n", payload)]
        assert data == chunk(b"data: " + payload + b"\n\n")


def test_an_engines_event_is_straight() -> None:
    for size in (1, 9, 10, 100, 5000, 70_000):
        payload = b"{" + b"x" * size + b"}"
        assert in_one_chunk(chunk(b"data: " + payload + b"\n\n")) == payload


@pytest.mark.parametrize(
    "data", [b"", b"\r\n", b"4\r\n\n\n\r\n", b"\n\n\r\n", b"a\r\ndata: \n\n\r\n", b"zz\r\ndata: x\n\n\r\n"]
)
def test_what_is_none(data: bytes) -> None:
    assert in_one_chunk(data) is None


@settings(max_examples=300)
@given(
    bodies=st.lists(blocks.filter(bool), max_size=5), cuts=st.lists(st.integers(0, 300), max_size=9), end=st.booleans()
)
def test_a_reader_knows_when_it_is_between_chunks(bodies: list[bytes], cuts: list[int], end: bool) -> None:
    stream = HEAD + b"".join(map(chunk, bodies)) + (b"0\r\n\r\n" if end else b"")
    borders, at = {len(HEAD)}, len(HEAD)
    for body in bodies:
        at += len(chunk(body))
        borders.add(at)
    reader, fed = ResponseReader(), 0
    for piece in pieces(stream, cuts):
        reader.feed(piece)
        fed += len(piece)
        assert reader.at_chunk(piece) == (fed in borders)


def test_a_sized_body_has_no_chunks() -> None:
    reader = ResponseReader()
    data = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab\r\n"
    reader.feed(data)
    assert not reader.at_chunk(data)
