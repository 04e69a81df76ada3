"""Answers that make no sense, or are larger than they may be: what is sent, and what of it counts."""

from __future__ import annotations

import pytest
from h2 import events
from h2.errors import ErrorCodes
from trio.testing import MockClock

from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.status import Code, Lost, Refused, TooLarge
from dyn_testkit.simnet import Link
from tests.grpc.hand import HEAD, OK, Hand, message, world
from tests.grpc.plays import LINKS, Play, ends_with, failed, only, sends


@LINKS
@pytest.mark.parametrize(
    ("play", "given", "words"),
    {
        "no status": (ends_with(("x", "y")), [7], "ended without a grpc-status"),
        "no status at all": (only(*HEAD), [], "ended without a grpc-status"),
        "two statuses": (ends_with(*OK, ("grpc-status", "13")), [7], "more than one grpc-status"),
        "another type": (
            ends_with(*OK, head=[(":status", "200"), ("content-type", "text/html")]),
            [],
            "not an answer of gRPC: text/html",
        ),
        "a type that begins so": (
            ends_with(*OK, head=[(":status", "200"), ("content-type", "application/grpc-web")]),
            [],
            "not an answer of gRPC: application/grpc-web",
        ),
        "no type": (ends_with(*OK, head=[(":status", "200")]), [], "not an answer of gRPC: no content-type"),
        "half a message": (sends(message(7) + message(8)[:-1], OK), [7], "ended in the middle of a message"),
        "half a prefix": (sends(message(7) + b"\0\0", OK), [7], "ended in the middle of a message"),
        "compressed": (sends(message(7) + b"\1" + message(8)[1:], OK), [7], "compressed"),
        "a wrong flag": (sends(message(7) + b"\2" + message(8)[1:], OK), [7], "flag 2"),
        "a compressed one to come": (sends(message(7) + b"\1\0\0\0\xff"), [7], "compressed"),
        "no protobuf": (sends(message(7) + b"\0\0\0\0\2\xff\xff", OK), [7], "no GenerateResponse"),
        "broken base64": (ends_with(*OK, ("x-bin", "%%%")), [7], "the metadata x-bin is not base64"),
        "broken base64 in the head": (ends_with(*OK, head=[*HEAD, ("x-bin", "A")]), [], "x-bin is not base64"),
    }.values(),
)
async def test_nonsense_is_a_loss(
    play: Play, given: list[int], words: str, link: Link, autojump_clock: MockClock
) -> None:
    numbers, failure = await failed(play, link)
    assert numbers == given
    assert isinstance(failure, Lost)
    assert words in str(failure)
    assert not failure.unprocessed


async def test_an_end_without_trailers(autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int) -> None:
        await hand.head(stream_id)
        await hand.data(stream_id, message(7) + message(8), end=True)

    given, failure = await failed(play)
    assert (given, str(failure)) == ([7, 8], "the answer ended without trailers")


async def test_a_status_counts_after_half_a_message(autojump_clock: MockClock) -> None:
    given, failure = await failed(sends(message(7)[:-1], [("grpc-status", "8")]))
    assert isinstance(failure, Refused)
    assert (given, failure.code) == ([], Code.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize("size", [1001, 2**32 - 1])
async def test_a_message_over_the_limit_is_not_waited_for(size: int, autojump_clock: MockClock) -> None:
    async with world(max_message=1000) as w:
        outcome = w.start()
        hand = await w.accept()
        await hand.head(await hand.request())
        await hand.data(1, message(7) + b"\0" + size.to_bytes(4, "big"))
        lost = await outcome.fails(Lost)
        assert str(lost) == f"a message of {size} bytes; at most 1000 are taken"
        assert not lost.unprocessed
        assert outcome.numbers == [7]
        assert (await hand.event(events.StreamReset)).error_code is ErrorCodes.CANCEL


async def test_one_of_just_the_limit_is_taken(autojump_clock: MockClock) -> None:
    async with world(max_message=1000) as w:
        outcome = w.start()
        hand = await w.accept()
        await hand.head(await hand.request())
        exact = message(7, 994)
        assert len(exact) == 1005
        await hand.data(1, exact)
        await hand.end(1)
        assert (await outcome.wait()).numbers == [7]


async def test_a_request_over_the_limit_is_not_sent(autojump_clock: MockClock) -> None:
    async with world(max_message=1000) as w:
        refused = await w.start("x" * 998).fails(TooLarge)
        assert str(refused) == "the request has 1001 bytes; gRPC carries at most 1000"
        assert not w.network.dials
        outcome = w.start("x" * 997)
        hand = await w.accept()
        await hand.answer(await hand.request(), 1)
        assert (await outcome.wait()).numbers == [1]


async def test_the_server_of_a_bad_message_is_told_at_once(autojump_clock: MockClock) -> None:
    async with world() as w, w.opened() as (call, hand):
        await hand.request()
        await hand.head(1)
        await hand.data(1, b"\0\0\0\0\2\xff\xff" + message(1))
        for _ in range(2):  # what follows it is not given
            with pytest.raises(Lost, match="no GenerateResponse"):
                await anext(call)
        assert (await hand.event(events.StreamReset)).error_code is ErrorCodes.CANCEL


@pytest.mark.parametrize(("count", "words"), [(0, "no message"), (2, "more than one message")])
async def test_unary_calls_have_one_message(count: int, words: str, autojump_clock: MockClock) -> None:
    async with world() as w:

        async def serve() -> None:
            hand = await w.accept()
            stream_id = await hand.request()
            await hand.head(stream_id)
            await hand.data(stream_id, b"\0\0\0\0\0" * count)
            await hand.end(stream_id)

        w.nursery.start_soon(serve)
        with pytest.raises(Lost, match=words):
            await w.channels.unary(methods.HEALTH_CHECK, pb.HealthCheckRequest(), timeout=None)
