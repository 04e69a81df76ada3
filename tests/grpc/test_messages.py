"""Messages and frames come out as they went in, however the bytes were cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from h2.exceptions import FrameTooLargeError
from hypothesis import given
from hypothesis import strategies as st

from dyn_relay.grpc.frames import MAX_FRAME_SIZE, FrameSplitter, GoAway
from dyn_relay.grpc.messages import Inbox, framed
from dyn_relay.grpc.status import Lost

LIMIT = 50
MESSAGES = st.lists(st.binary(max_size=LIMIT), max_size=6)
CUTS = st.lists(st.integers(0, 400), max_size=20)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(edges)]


def drained(inbox: Inbox) -> list[bytes]:
    """All that can be taken; it is ready if and only if something can."""
    taken = []
    while inbox.ready:
        message = inbox.take()
        assert message is not None
        taken.append(message)
    assert inbox.take() is None
    return taken


@given(MESSAGES, CUTS, st.binary(max_size=4))
def test_messages_survive_any_cut(messages: list[bytes], cuts: list[int], rest: bytes) -> None:
    data = b"".join(framed(message, LIMIT) for message in messages) + rest
    inbox = Inbox(LIMIT)
    taken = []
    for piece in pieces(data, cuts):
        inbox.feed(piece)
        taken += drained(inbox)
    assert taken == messages
    assert len(inbox) == len(rest)


@given(MESSAGES, CUTS)
def test_also_when_they_are_taken_late(messages: list[bytes], cuts: list[int]) -> None:
    inbox = Inbox(LIMIT)
    for piece in pieces(b"".join(framed(message, LIMIT) for message in messages), cuts):
        inbox.feed(piece)
    assert drained(inbox) == messages
    assert len(inbox) == 0


@given(MESSAGES, st.integers(1, 255), st.integers(0, 2**32 - 1))
def test_a_wrong_flag_is_told_when_it_is_reached(messages: list[bytes], flag: int, size: int) -> None:
    inbox = Inbox(LIMIT)
    inbox.feed(b"".join(framed(message, LIMIT) for message in messages) + bytes([flag]) + size.to_bytes(4, "big"))
    assert [inbox.take() for _ in messages] == messages
    assert inbox.ready
    with pytest.raises(Lost, match="compress" if flag == 1 else f"flag {flag}"):
        inbox.take()


@given(st.integers(0, 2**32 - 1))
def test_the_limit_is_one(size: int) -> None:
    inbox = Inbox(LIMIT)
    inbox.feed(b"\0" + size.to_bytes(4, "big"))
    if size > LIMIT:
        assert inbox.ready
        with pytest.raises(Lost, match=f"a message of {size} bytes; at most 50 are taken"):
            inbox.take()
    else:
        assert inbox.ready is (size == 0)
        assert inbox.take() == (b"" if size == 0 else None)


def frame(kind: int, body: bytes, stream_id: int = 1) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, 0]) + stream_id.to_bytes(4, "big") + body


FRAMES = st.builds(frame, st.sampled_from([0, 1, 4, 6, 8, 200]), st.binary(max_size=40))
GOAWAYS = st.builds(
    lambda last, code, reason: (
        frame(7, last.to_bytes(4, "big") + code.to_bytes(4, "big") + reason.encode(), 0),
        GoAway(last & 0x7FFFFFFF, code, reason),
    ),
    st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1]),
    st.integers(0, 2**32 - 1),
    st.text("aü", max_size=5),
)


@given(st.lists(FRAMES.map(lambda data: (data, data)) | GOAWAYS, max_size=6), CUTS)
def test_frames_survive_any_cut(frames: list[tuple[bytes, bytes | GoAway]], cuts: list[int]) -> None:
    splitter = FrameSplitter()
    out = [got for piece in pieces(b"".join(data for data, _ in frames), cuts) for got in splitter.feed(piece)]
    assert out == [expected for _, expected in frames]


@pytest.mark.parametrize("data", [frame(7, b"short", 0), frame(7, bytes(8), 1)], ids=["short", "on a stream"])
def test_a_goaway_that_is_none_is_left_to_h2(data: bytes) -> None:
    assert list(FrameSplitter().feed(data)) == [data]


def test_a_frame_that_is_too_long_is_not_waited_for() -> None:
    good = frame(0, bytes(MAX_FRAME_SIZE))
    out = FrameSplitter().feed(good + frame(0, bytes(MAX_FRAME_SIZE + 1))[:9])
    assert next(out) == good
    with pytest.raises(FrameTooLargeError):
        next(out)
