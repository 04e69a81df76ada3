"""How a call ends: good answers, statuses, resets, lost connections and broken ones."""

from __future__ import annotations

import pytest
import trio
from h2 import events
from h2.errors import ErrorCodes
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from dyn_relay.grpc.status import CallFailed, Code, Lost, Refused
from dyn_testkit.simnet import Fragmentation, Link
from tests.grpc.hand import HEAD, OK, Hand, World, message, numbers, world
from tests.grpc.plays import LINKS, Play, ends_with, failed, only, played, sends

# Good answers.


@LINKS
async def test_messages_come_as_they_were_sent(link: Link, autojump_clock: MockClock) -> None:
    outcome = await played(sends(b"".join(map(message, range(5))), OK), link)
    assert (outcome.numbers, outcome.failure) == ([0, 1, 2, 3, 4], None)


async def test_also_when_frames_cut_them(autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int) -> None:
        await hand.head(stream_id)
        for byte in message(1) + message(2, 300) + message(3):
            await hand.data(stream_id, bytes([byte]))
        await hand.data(stream_id, b"")
        await hand.end(stream_id)

    outcome = await played(play)
    assert (outcome.numbers, outcome.failure) == ([1, 2, 3], None)


async def test_padding_is_no_data(autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int) -> None:
        await hand.head(stream_id)
        for number in range(600):  # their padding alone is more than a window
            while hand.h2.local_flow_control_window(stream_id) < 300:
                await hand.event(events.WindowUpdated)
            hand.h2.send_data(stream_id, message(number), pad_length=200)
            await hand.flush()
        await hand.end(stream_id)

    assert (await played(play)).numbers == list(range(600))


async def test_nothing_is_an_answer_too(autojump_clock: MockClock) -> None:
    for play in (only(*HEAD, *OK), sends(b"", OK)):
        outcome = await played(play)
        assert (outcome.numbers, outcome.failure) == ([], None)


async def test_an_interim_head_is_skipped(autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int) -> None:
        await hand.head(stream_id, [(":status", "103")])
        await hand.answer(stream_id, 1)

    assert (await played(play)).numbers == [1]


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "application/grpc;charset=x"])
async def test_content_types_of_grpc(kind: str, autojump_clock: MockClock) -> None:
    outcome = await played(ends_with(*OK, head=[(":status", "200"), ("content-type", kind)]))
    assert (outcome.numbers, outcome.failure) == ([7], None)


async def test_metadata_of_an_answer(autojump_clock: MockClock) -> None:
    async with world() as w:
        w.nursery.start_soon(_with_metadata, w)
        async with w.generate() as call:
            assert call.headers == ()
            assert await numbers(call) == [1]
            assert call.headers == [(b"plain", b"a b"), (b"x-bin", b"\xff\0"), (b"x-bin", b"\x01")]
            assert call.trailers == [(b"last", b"words"), (b"y-bin", b"")]


async def _with_metadata(w: World) -> None:
    hand = await w.accept()
    stream_id = await hand.request()
    await hand.head(stream_id, [*HEAD, ("plain", "a b"), ("x-bin", "/wA=,AQ")])
    await hand.data(stream_id, message(1))
    await hand.end(stream_id, [*OK, ("last", "words"), ("y-bin", "")])


# Statuses.


@LINKS
@pytest.mark.parametrize("code", [code for code in Code if code])
async def test_a_status_is_a_refusal(code: Code, link: Link, autojump_clock: MockClock) -> None:
    given, failure = await failed(ends_with(("grpc-status", str(int(code))), ("grpc-message", "why not")), link)
    assert given == [7]
    assert isinstance(failure, Refused)
    assert (failure.code, failure.message) == (code, "why not")


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("a%20b", "a b"),
        ("%C3%BC 100%25", "ü 100%"),
        ("100% %zz %4", "100% %zz %4"),
        ("%FF", "\N{REPLACEMENT CHARACTER}"),
        ("", ""),
    ],
)
async def test_messages_of_statuses_are_decoded(sent: str, read: str, autojump_clock: MockClock) -> None:
    _, failure = await failed(only(*HEAD, ("grpc-status", "13"), ("grpc-message", sent)))
    assert isinstance(failure, Refused)
    assert (failure.code, failure.message) == (Code.INTERNAL, read)


@pytest.mark.parametrize("status", ["17", "99", "-1", "x", "", "00000"])
async def test_a_status_that_is_none_is_unknown(status: str, autojump_clock: MockClock) -> None:
    _, failure = await failed(ends_with(("grpc-status", status), ("grpc-message", "m")))
    assert isinstance(failure, Refused)
    assert (failure.code, failure.message) == (Code.UNKNOWN, f"grpc-status {status}: m")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("400", Code.INTERNAL),
        ("401", Code.UNAUTHENTICATED),
        ("403", Code.PERMISSION_DENIED),
        ("404", Code.UNIMPLEMENTED),
        ("429", Code.UNAVAILABLE),
        ("502", Code.UNAVAILABLE),
        ("503", Code.UNAVAILABLE),
        ("504", Code.UNAVAILABLE),
        ("500", Code.UNKNOWN),
        ("204", Code.UNKNOWN),
        ("302", Code.UNKNOWN),
    ],
)
@pytest.mark.parametrize("end", [True, False], ids=["alone", "with a page"])
async def test_http_statuses(status: str, code: Code, end: bool, autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int) -> None:
        await hand.head(stream_id, [(":status", status), ("content-type", "text/html")], end=end)
        if not end:
            await hand.event(events.StreamReset)

    given, failure = await failed(play)
    assert given == []
    assert isinstance(failure, Refused)
    assert (failure.code, failure.message) == (code, f"HTTP status {status}, and no grpc-status")


async def test_a_status_of_grpc_counts_more_than_https(autojump_clock: MockClock) -> None:
    _, failure = await failed(only((":status", "503"), ("grpc-status", "5")))
    assert isinstance(failure, Refused)
    assert failure.code is Code.NOT_FOUND


async def test_a_failure_stays(autojump_clock: MockClock) -> None:
    async with world() as w:
        w.nursery.start_soon(_lone, w, ends_with(("grpc-status", "13")))
        async with w.generate() as call:
            with pytest.raises(Refused) as first:
                await numbers(call)
            with pytest.raises(Refused) as again:
                await anext(call)
            assert first.value is again.value


async def test_so_does_the_end(autojump_clock: MockClock) -> None:
    async with world() as w:
        w.nursery.start_soon(_lone, w, ends_with(*OK))
        async with w.generate() as call:
            assert await numbers(call) == [7]
            assert await numbers(call) == []


async def _lone(w: World, play: Play) -> None:
    hand = await w.accept()
    await play(hand, await hand.request())


# Resets.


@LINKS
@pytest.mark.parametrize("code", [*ErrorCodes, 0xABCD])
async def test_a_reset_is_a_loss(code: int, link: Link, autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int) -> None:
        await hand.head(stream_id)
        await hand.data(stream_id, message(7) + message(8)[:3])
        await hand.frame("RstStream", stream_id, error_code=code)

    given, failure = await failed(play, link)
    name = code.name if isinstance(code, ErrorCodes) else "error 0xabcd"
    assert (given, str(failure)) == ([7], f"the server reset the stream: {name}")
    assert isinstance(failure, Lost)
    assert not failure.unprocessed


@pytest.mark.parametrize("code", ErrorCodes)
async def test_only_a_refused_stream_was_not_begun(code: ErrorCodes, autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int) -> None:
        await hand.frame("RstStream", stream_id, error_code=code)

    _, failure = await failed(play)
    assert isinstance(failure, Lost)
    assert failure.unprocessed is (code is ErrorCodes.REFUSED_STREAM)


async def test_a_reset_after_the_end_changes_nothing(autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int) -> None:
        await hand.answer(stream_id, 1)
        await hand.frame("RstStream", stream_id, error_code=0)

    outcome = await played(play)
    assert (outcome.numbers, outcome.failure) == ([1], None)


# The connection.


@LINKS
@pytest.mark.parametrize("how", ["end", "reset"])
async def test_a_lost_connection_is_a_loss(how: str, link: Link, autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int) -> None:
        await hand.head(stream_id)
        await hand.data(stream_id, message(7) + message(8)[:3])
        if how == "end":
            hand.connection.end_sending()
        else:
            hand.connection.abort()

    given, failure = await failed(play, link)
    words = {"end": "the server closed the connection", "reset": "the connection broke: Connection reset by peer"}
    assert (given, str(failure)) == ([7], words[how])
    assert isinstance(failure, Lost)
    assert not failure.unprocessed


def header_block(stream_id: int, size: int, parts: int = 1) -> bytes:
    """A head with a field of `size` bytes, in HEADERS and CONTINUATIONs."""
    block = Encoder().encode([*HEAD, ("filler", "x" * size)], huffman=False)
    step = -(-len(block) // parts)
    frames = []
    for number in range(parts):
        part = block[number * step : (number + 1) * step]
        flags = 4 if number == parts - 1 else 0
        frames.append(
            len(part).to_bytes(3, "big") + bytes([9 if number else 1, flags]) + stream_id.to_bytes(4, "big") + part
        )
    return b"".join(frames)


async def test_a_large_head_comes_in_parts(autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int) -> None:
        await hand.connection.send(header_block(stream_id, 900_000, 60))
        await hand.frame("Data", stream_id, data=message(1))
        await hand.frame("Headers", stream_id, data=Encoder().encode(OK), flags=("END_HEADERS", "END_STREAM"))

    outcome = await played(play)
    assert (outcome.numbers, outcome.failure) == ([1], None)


def bomb(stream_id: int) -> bytes:
    """A head of some kilobytes that is more than a megabyte when it is unpacked."""
    field = b"\x40\x06filler\x7f" + b"\xa1\x1e" + b"x" * 4000
    block = field + b"\xbe" * 300
    return len(block).to_bytes(3, "big") + b"\1\4" + stream_id.to_bytes(4, "big") + block


def raw(data: bytes) -> Play:
    async def play(hand: Hand, stream_id: int) -> None:
        await hand.head(stream_id)
        await hand.data(stream_id, message(7))
        await hand.connection.send(data)

    return play


async def ended_twice(hand: Hand, stream_id: int) -> None:
    await hand.head(stream_id)
    await hand.data(stream_id, message(7))
    await hand.frame("Data", stream_id, data=b"", flags=("END_STREAM",))
    await hand.frame("Data", stream_id, data=message(8))


@LINKS
@pytest.mark.parametrize(
    "data",
    {
        "a frame too long": b"\0\x40\1\0\0\0\0\0\1",
        "a bomb of headers": bomb(1),
        "endless continuations": b"\0\0\0\1\0\0\0\0\1" + b"\0\0\0\x09\0\0\0\0\1" * 70,
        "something between continuations": b"\0\0\0\1\0\0\0\0\1" + b"\0\0\0\0\0\0\0\0\1",
        "a continuation of nothing": b"\0\0\0\x09\4\0\0\0\1",
        "no headers": b"\0\0\4\1\4\0\0\0\1\xff\xff\xff\xff",
        "a stream that we never opened": b"\0\0\0\0\0\0\0\0\x09",
        "data on no stream": b"\0\0\0\0\0\0\0\0\0",
        "a stream of the server's own": b"\0\0\1\1\4\0\0\0\2\x88",
        "a push": b"\0\0\5\5\4\0\0\0\1\0\0\0\2\x82",
        "padding longer than the frame": b"\0\0\2\0\x08\0\0\0\1\xff\0",
        "no window": b"\0\0\4\x08\0\0\0\0\0\0\0\0\0",
        "too large a window": b"\0\0\4\x08\0\0\0\0\0\x7f\xff\xff\xff",
        "a short ping": b"\0\0\4\6\0\0\0\0\0abcd",
        "a short goaway": b"\0\0\4\7\0\0\0\0\0abcd",
        "a goaway on a stream": b"\0\0\x08\7\0\0\0\0\1\0\0\0\0\0\0\0\0",
        "settings on a stream": b"\0\0\0\4\0\0\0\0\1",
        "settings that cannot be": b"\0\0\6\4\0\0\0\0\0\0\5\0\0\0\1",
        "upper case": b"\0\0\7\1\4\0\0\0\1\0\1X\1y\xbe\xbe\xbe",
        "a request's field": b"\0\0\1\1\5\0\0\0\1\x82",
        "HTTP/1.1": b"HTTP/1.1 200 OK\r\n\r\n",
    }.items(),
    ids=lambda item: item[0],
)
async def test_broken_http2_is_a_loss(data: tuple[str, bytes], link: Link, autojump_clock: MockClock) -> None:
    given, failure = await failed(raw(data[1]), link)
    assert given == [7]
    assert isinstance(failure, Lost)
    assert str(failure).startswith("the server broke HTTP/2: ")
    assert not failure.unprocessed


async def test_frames_after_the_end(autojump_clock: MockClock) -> None:
    given, failure = await failed(ended_twice)
    assert (given, str(failure)) == ([7], "the answer ended without trailers")


@pytest.mark.parametrize(
    ("data", "code"),
    [(bytes(9), ErrorCodes.PROTOCOL_ERROR), (b"\0\x40\1\0\0\0\0\0\1", ErrorCodes.FRAME_SIZE_ERROR)],
    ids=["data on no stream", "a frame too long"],
)
async def test_the_peer_is_told_what_it_broke(data: bytes, code: ErrorCodes, autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start()
        hand = await w.accept()
        await hand.request()
        await hand.connection.send(data)
        await outcome.fails(Lost)
        (goodbye,) = [event for event in await hand.closed() if isinstance(event, events.ConnectionTerminated)]
        assert goodbye.error_code is code


async def test_what_came_before_counts(autojump_clock: MockClock) -> None:
    """All in one read: a whole answer, half of another, and nonsense."""
    async with world() as w:
        first = w.start()
        hand = await w.accept()
        await hand.request()
        second = w.start()
        await hand.request()
        for stream_id in (1, 3):
            hand.h2.send_headers(stream_id, HEAD)
            hand.h2.send_data(stream_id, message(stream_id))
        hand.h2.send_headers(1, OK, end_stream=True)
        await hand.connection.send(hand.h2.data_to_send() + b"HTTP/1.1 200 OK\r\n\r\n")
        assert (await first.wait()).failure is None
        assert first.numbers == [1]
        await second.fails(Lost)
        assert second.numbers == [3]


@given(data=st.binary(max_size=200), cut=st.integers(1, 50))
def test_no_bytes_do_more_harm_than_a_loss(data: bytes, cut: int) -> None:
    async def main() -> None:
        async with world(Link(fragmentation=Fragmentation(largest=cut)), keepalive=None) as w:
            outcome = w.start()
            hand = await w.accept()
            await raw(data)(hand, await hand.request())
            hand.connection.end_sending()
            await outcome.fails(Lost)
            assert outcome.numbers[:1] == [7]

    trio.run(main, clock=MockClock(autojump_threshold=0))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 200]),
            st.integers(0, 255),
            st.sampled_from([0, 1, 2, 3, 9]),
            st.binary(max_size=20),
        ),
        max_size=8,
    )
)
def test_nor_do_any_frames(frames: list[tuple[int, int, int, bytes]]) -> None:
    data = b"".join(
        len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream_id.to_bytes(4, "big") + body
        for kind, flags, stream_id, body in frames
    )

    async def main() -> None:
        async with world() as w:
            outcome = w.start()
            hand = await w.accept()
            await raw(data)(hand, await hand.request())
            hand.connection.end_sending()
            await outcome.wait()
            assert isinstance(outcome.failure, CallFailed)
            assert outcome.numbers[:1] == [7]

    trio.run(main, clock=MockClock(autojump_threshold=0))
