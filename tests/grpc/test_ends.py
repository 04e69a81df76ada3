"""Goings away, deadlines, cancellations."""

from __future__ import annotations

import pytest
import trio
from h2 import events
from h2.errors import ErrorCodes
from trio.testing import MockClock, wait_all_tasks_blocked

from dyn_relay.grpc.status import Code, Lost, Refused
from dyn_testkit.simnet import Link
from tests.grpc.hand import HOST, PORT, Hand, Outcome, World, message, world


async def begun(w: World, count: int) -> tuple[Hand, list[Outcome]]:
    """Calls on one connection, in the order of their streams; each has got its stream's number."""
    outcomes = []
    hand = None
    for _ in range(count):
        outcomes.append(w.start())
        hand = hand or await w.accept()
        stream_id = await hand.request()
        await hand.head(stream_id)
        await hand.data(stream_id, message(stream_id))
    assert hand is not None
    await wait_all_tasks_blocked()
    return hand, outcomes


# GOAWAY.


@pytest.mark.parametrize("code", [ErrorCodes.NO_ERROR, ErrorCodes.INTERNAL_ERROR])
async def test_what_a_goaway_spares_goes_on(code: ErrorCodes, autojump_clock: MockClock) -> None:
    async with world() as w:
        hand, (spared, cut) = await begun(w, 2)
        waiting = w.start()
        await hand.request()
        await hand.goaway(1, code, b"for a reason")
        lost = await cut.fails(Lost)
        assert str(lost) == f"the server goes away: {code.name}: for a reason"
        assert not lost.unprocessed, "it has answered, whatever it says now"
        assert (await waiting.fails(Lost)).unprocessed
        assert cut.numbers == [3]
        # A new call goes elsewhere, though this connection still lives.
        new = w.start()
        other = await w.accept()
        await other.answer(await other.request(), 9)
        assert (await new.wait()).numbers == [9]
        await hand.data(1, message(100))
        await hand.end(1)
        await spared.wait()
        assert (spared.numbers, spared.failure) == ([1, 100], None)
        # Its last stream has ended: it is closed, at once.
        await hand.closed()
        assert trio.current_time() == 0
        assert len(w.network.dials) == 2


async def test_a_goaway_may_come_in_two_steps(autojump_clock: MockClock) -> None:
    async with world() as w:
        hand, (first, second) = await begun(w, 2)
        await hand.goaway(2**31 - 1)
        await wait_all_tasks_blocked()
        assert not first.over.is_set()
        await hand.goaway(1)
        await second.fails(Lost)
        await hand.end(1)
        assert (await first.wait()).failure is None


async def test_a_connection_that_ends_after_its_goaway(autojump_clock: MockClock) -> None:
    async with world() as w:
        hand, (first,) = await begun(w, 1)
        await hand.goaway(1)
        hand.connection.end_sending()
        lost = await first.fails(Lost)
        assert not lost.unprocessed
        assert first.numbers == [1]


async def test_the_goaway_of_one_connection_takes_only_its_own(autojump_clock: MockClock) -> None:
    """Five hundred streams, one connection of sixty-three goes."""
    async with world() as w:
        hands: list[Hand] = []

        async def serve(hand: Hand) -> None:
            for _ in range(8):
                stream_id = await hand.request()
                await hand.head(stream_id)
                await hand.data(stream_id, message(stream_id))

        async def accept() -> None:
            while True:
                hands.append(await w.accept())
                w.nursery.start_soon(serve, hands[-1])

        w.nursery.start_soon(accept)
        outcomes = [w.start() for _ in range(500)]
        await wait_all_tasks_blocked()
        await hands[0].goaway(0, ErrorCodes.NO_ERROR)
        await wait_all_tasks_blocked()
        lost = [outcome for outcome in outcomes if outcome.over.is_set()]
        assert len(lost) == 8
        for hand in hands[1:]:
            for stream_id in list(hand.h2.streams):
                await hand.data(stream_id, message(1000 + stream_id))
                await hand.end(stream_id)
        for outcome in outcomes:
            await outcome.wait()
            assert outcome in lost or outcome.failure is None
            assert outcome in lost or outcome.numbers[1] == outcome.numbers[0] + 1000


async def test_a_refused_call_goes_elsewhere_when_it_is_made_again(autojump_clock: MockClock) -> None:
    async with world() as w:
        first = w.start()
        hand = await w.accept()
        await hand.request()
        await hand.goaway(0)
        assert (await first.fails(Lost)).unprocessed
        again = w.start()
        other = await w.accept()
        await other.answer(await other.request(), 1)
        assert (await again.wait()).numbers == [1]


# Deadlines.


@pytest.mark.parametrize(
    ("timeout", "told"),
    [
        (None, None),
        (0.0000015, "2u"),
        (1.5, "1500000u"),
        (99.999999, "99999999u"),
        (100, "100000m"),
        (0.0001234567, "124u"),
        (200_000, "200000S"),
        (10**9, "16666667M"),
        (10**10, "2777778H"),
        (10**15, "99999999H"),
    ],
)
async def test_deadlines_are_told(timeout: float | None, told: str | None, autojump_clock: MockClock) -> None:
    async with world() as w, trio.open_nursery() as nursery:
        nursery.start_soon(_opened, w, timeout)
        hand = await w.accept()
        head = await hand.event(events.RequestReceived)
        assert dict(head.headers).get("grpc-timeout") == told
        nursery.cancel_scope.cancel()


async def _opened(w: World, timeout: float | None) -> None:
    async with w.generate(timeout=timeout):
        await trio.sleep_forever()


@pytest.mark.parametrize("timeout", [0, -1])
async def test_a_deadline_that_has_passed(timeout: float, autojump_clock: MockClock) -> None:
    async with world() as w:
        refused = await w.start(timeout=timeout).fails(Refused)
        assert refused.code is Code.DEADLINE_EXCEEDED
        assert not w.network.dials


async def test_a_deadline_while_it_dials(autojump_clock: MockClock) -> None:
    async with world() as w:
        w.network.hang((HOST, PORT))
        assert (await w.start(timeout=3).fails(Refused)).code is Code.DEADLINE_EXCEEDED
        assert trio.current_time() == 3


async def test_a_deadline_while_it_sends(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start("x" * 100_000, timeout=3)
        hand = await w.accept()
        assert (await outcome.fails(Refused)).code is Code.DEADLINE_EXCEEDED
        assert trio.current_time() == 3
        assert (await hand.event(events.StreamReset)).error_code is ErrorCodes.CANCEL


async def test_a_deadline_while_it_waits(autojump_clock: MockClock) -> None:
    async with world(Link(latency=1)) as w:
        outcome = w.start(timeout=10)
        hand = await w.accept()
        await hand.request()
        await hand.head(1)
        await hand.data(1, message(1))
        refused = await outcome.fails(Refused)
        assert refused.code is Code.DEADLINE_EXCEEDED
        assert outcome.numbers == [1]
        assert trio.current_time() == 10
        assert (await hand.event(events.StreamReset)).error_code is ErrorCodes.CANCEL


async def test_a_deadline_is_one_for_all_of_it(autojump_clock: MockClock) -> None:
    """Each message in time does not make the next one's."""
    async with world() as w:
        outcome = w.start(timeout=10)
        hand = await w.accept()
        await hand.request()
        await hand.head(1)
        for number in range(4):
            await hand.data(1, message(number))
            await trio.sleep(4)
            if outcome.over.is_set():
                break
        assert (await outcome.fails(Refused)).code is Code.DEADLINE_EXCEEDED
        assert outcome.numbers == [0, 1, 2]


async def test_a_deadline_that_passes_while_nobody_takes(autojump_clock: MockClock) -> None:
    async with world() as w, w.opened(timeout=5) as (call, hand):
        await hand.request()
        await hand.answer(1, 1)
        await trio.sleep(5)
        with pytest.raises(Refused, match="DEADLINE_EXCEEDED"):
            await anext(call)


# Leaving.


async def test_leaving_a_call_cancels_it(autojump_clock: MockClock) -> None:
    async with world() as w:
        async with w.opened() as (call, hand):
            await hand.request()
            await hand.head(1)
            await hand.data(1, message(1))
            assert list((await anext(call)).output_ids) == [1]
        reset = await hand.event(events.StreamReset)
        assert (reset.stream_id, reset.error_code) == (1, ErrorCodes.CANCEL)
        again = w.start()
        await hand.answer(await hand.request(), 3)
        assert (await again.wait()).numbers == [3]


async def test_leaving_after_the_end_says_nothing(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start()
        hand = await w.accept()
        await hand.answer(await hand.request(), 1)
        await outcome.wait()
        again = w.start()
        seen = await hand.event(events.Event)
        while not isinstance(seen, events.StreamEnded):
            assert not isinstance(seen, events.StreamReset)
            seen = await hand.event(events.Event)
        await hand.answer(3, 3)
        assert (await again.wait()).numbers == [3]


async def test_cancelled_waiting_loses_nothing(autojump_clock: MockClock) -> None:
    async with world() as w, w.opened() as (call, hand):
        await hand.request()
        await hand.head(1)
        with trio.move_on_after(1) as scope:
            await anext(call)
        assert scope.cancelled_caught
        await hand.data(1, message(1))
        assert list((await anext(call)).output_ids) == [1]


async def test_a_late_answer_to_a_left_call_is_ignored(autojump_clock: MockClock) -> None:
    async with world(Link(latency=1)) as w:
        kept = w.start()
        hand = await w.accept()
        await hand.request()
        async with w.generate():
            await hand.request()
        # The reset is on its way.
        await hand.head(3)
        await hand.data(3, message(3))
        await hand.end(3)
        await trio.sleep(10)
        await hand.answer(1, 1)
        assert (await kept.wait()).numbers == [1]


async def test_metadata_is_sent(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start(metadata=[(b"plain", b"a b"), (b"x-bin", b"\xff\0"), (b"plain", b"c")])
        hand = await w.accept()
        head = await hand.event(events.RequestReceived)
        assert head.headers == [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/sglang.runtime.v1.SglangService/Generate"),
            (":authority", "engine:30001"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "dyn-relay"),
            ("plain", "a b"),
            ("x-bin", "/wA"),
            ("plain", "c"),
        ]
        await hand.answer(1, 1)
        assert (await outcome.wait()).failure is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"Upper", b"x"),
        (b"", b"x"),
        (b":path", b"x"),
        (b"grpc-timeout", b"1S"),
        (b"te", b"x"),
        (b"a b", b"x"),
        (b"plain", b"a\nb"),
        (b"plain", "ü".encode()),
        (b"plain", b" x"),
    ],
)
async def test_metadata_that_cannot_be_sent(name: bytes, value: bytes, autojump_clock: MockClock) -> None:
    async with world() as w:
        error = await w.start(metadata=[(name, value)]).fails(ValueError)
        assert repr(name) in str(error)
        assert not w.network.dials
