"""A connection on which nothing comes: who is asked whether it lives, when, and for how long."""

from __future__ import annotations

import pytest
import trio
from h2 import events
from trio.testing import MockClock, wait_all_tasks_blocked

from dyn_relay.grpc.status import Code, Lost, Refused
from dyn_testkit.simnet import Link
from tests.grpc.hand import HOST, Hand, message, world


async def pings(hand: Hand) -> list[float]:
    """Times of all pings until the client closes; they are answered."""
    times: list[float] = []
    while data := await hand.connection.receive():
        times += [trio.current_time() for event in hand.h2.receive_data(data) if isinstance(event, events.PingReceived)]
        await hand.flush()
    return times


async def test_a_silent_server_is_asked_soon_and_then_rarely(autojump_clock: MockClock) -> None:
    async with world() as w:
        times: list[float] = []

        async def serve() -> None:
            hand = await w.accept()
            times.extend(await pings(hand))

        w.nursery.start_soon(serve)
        assert (await w.start(timeout=1000).fails(Refused)).code is Code.DEADLINE_EXCEEDED
        await trio.sleep(100)
        assert times == [30, 340, 650, 960]


@pytest.mark.parametrize("pause", [5, 100])
async def test_a_server_that_speaks_is_asked_after_each_silence(pause: float, autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start()
        hand = await w.accept()
        await hand.request()
        await hand.head(1)
        for number in range(3):
            asked = trio.current_time()
            await hand.event(events.PingReceived)
            assert trio.current_time() == asked + 30
            await wait_all_tasks_blocked()
            await trio.sleep(pause)
            await hand.data(1, message(number))
        await hand.end(1)
        assert (await outcome.wait()).numbers == [0, 1, 2]


async def test_one_that_speaks_all_the_time_is_not_asked(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start()
        hand = await w.accept()
        await hand.request()
        await hand.head(1)
        for number in range(20):
            await trio.sleep(29)
            await hand.data(1, message(number))
        await hand.end(1)
        await outcome.wait()
        assert not [event for event in await hand.closed() if isinstance(event, events.PingReceived)]


async def test_a_ping_is_not_overdue_for_who_stood_still(mock_clock: MockClock) -> None:
    """Its answer lies in the socket when the process goes on, long after it was due."""
    for _ in range(20):
        async with world() as w:
            outcome = w.start()
            hand = await w.accept()
            stream_id = await hand.request()
            await wait_all_tasks_blocked()
            mock_clock.jump(30)
            pinged = hand.h2.receive_data(await hand.connection.receive())
            assert [type(event) for event in pinged] == [events.PingReceived]
            await wait_all_tasks_blocked()
            assert hand.connection.offer(hand.h2.data_to_send())
            mock_clock.jump(300)
            await wait_all_tasks_blocked()
            await hand.answer(stream_id, 5)
            assert (await outcome.wait()).numbers == [5]


async def test_what_was_on_its_way_before_the_pong_does_not_count(autojump_clock: MockClock) -> None:
    """A server counts pings anew when it sends; what it sent before it got a ping is older than that ping."""
    async with world(Link(latency=9), connect_timeout=100) as w:
        w.start()
        hand = await w.accept()
        await hand.request()
        start = trio.current_time()
        # The ping leaves 30 s after the SETTINGS came, which is 12 s from now; this meets it on its way.
        await trio.sleep(10)
        await hand.head(1)
        times = []
        with trio.move_on_at(start + 300):
            while True:
                await hand.event(events.PingReceived)
                times.append(trio.current_time() - start)
        assert len(times) == 1


async def test_a_dead_server_is_given_up(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start()
        hand = await w.accept()
        await hand.request()
        await hand.head(1)
        w.network.partition("client", HOST)
        lost = await outcome.fails(Lost)
        assert str(lost) == "the server has not answered a ping for 20 s"
        assert trio.current_time() == 50


async def test_bytes_prove_life_as_a_pong_does(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start()
        hand = await w.accept()
        await hand.request()
        await hand.head(1)
        await trio.sleep(25)
        # It reads nothing, so that it answers no ping, and speaks.
        for number in range(10):
            await trio.sleep(19)
            await hand.data(1, message(number))
        assert not outcome.over.is_set()
        last = trio.current_time()
        await outcome.fails(Lost)
        assert outcome.numbers == list(range(10))
        assert trio.current_time() == last + 20


async def test_nobody_is_asked_without_a_call(autojump_clock: MockClock) -> None:
    async with world(idle_timeout=10_000) as w:
        outcome = w.start()
        hand = await w.accept()
        await hand.answer(await hand.request(), 1)
        await outcome.wait()
        with trio.move_on_after(9_000) as scope:
            await hand.event(events.PingReceived)
        assert scope.cancelled_caught
