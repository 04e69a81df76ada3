"""Connections: how many, when they are made, kept and left."""

from __future__ import annotations

import pytest
import trio
from h2 import events
from trio.testing import MockClock, wait_all_tasks_blocked

from dyn_relay.grpc.channels import Newer
from dyn_relay.grpc.status import Lost
from dyn_relay.net import ConnectFailed
from dyn_testkit.simnet import Link
from tests.grpc.hand import HOST, PORT, Hand, Outcome, World, world


async def gathered(outcomes: list[Outcome]) -> list[int]:
    """What good calls have given, sorted."""
    for outcome in outcomes:
        assert (await outcome.wait()).failure is None
    return sorted(number for outcome in outcomes for number in outcome.numbers)


async def serve(hand: Hand) -> None:
    """Answer every request with its stream's number."""
    while True:
        stream_id = await hand.request()
        await hand.answer(stream_id, stream_id)


async def test_a_connection_is_used_again(autojump_clock: MockClock) -> None:
    async with world() as w:
        for expected in (1, 3):
            outcome = w.start()
            if expected == 1:
                hand = await w.accept()
            stream_id = await hand.request()
            await hand.answer(stream_id, expected, 100)
            assert (await outcome.wait()).numbers == [expected, 100]
            assert outcome.failure is None
        assert len(w.network.dials) == 1


async def test_a_call_made_from_what_an_older_connection_has_told_is_not_sent(autojump_clock: MockClock) -> None:
    """Over the next one there may be another process."""
    async with world(streams_per_connection=1) as w:
        assert w.channels.made == 0
        first = w.start()
        await (await w.accept()).request()
        assert w.channels.made == 1
        refused = w.start(known=1)
        hand = await w.accept()
        await refused.fails(Newer)
        assert w.channels.made == 2
        with trio.move_on_after(1) as patience:
            await hand.request()
        assert patience.cancelled_caught, "nothing was sent"
        assert not first.over.is_set()


async def test_few_calls_share_one(autojump_clock: MockClock) -> None:
    async with world(streams_per_connection=3) as w:
        outcomes = [w.start() for _ in range(7)]
        hands = [await w.accept() for _ in range(3)]
        await wait_all_tasks_blocked()
        assert len(w.network.dials) == 3
        for hand in hands:
            w.nursery.start_soon(serve, hand)
        assert await gathered(outcomes) == [1, 1, 1, 3, 3, 5, 5]


async def test_five_hundred_calls_at_once_make_sixty_three(autojump_clock: MockClock) -> None:
    async with world(Link(latency=0.01)) as w:
        outcomes = [w.start() for _ in range(500)]
        hands: list[Hand] = []

        async def accept() -> None:
            while True:
                hands.append(await w.accept())
                w.nursery.start_soon(serve, hands[-1])

        w.nursery.start_soon(accept)
        assert await gathered(outcomes) == sorted([*range(1, 17, 2)] * 62 + [1, 3, 5, 7])
        assert len(hands) == 63


async def test_a_place_is_free_when_its_call_is_over(autojump_clock: MockClock) -> None:
    async with world(streams_per_connection=1) as w:
        first = w.start()
        hand = await w.accept()
        stream_id = await hand.request()
        second = w.start()
        other = await w.accept()
        await hand.answer(stream_id, 1)
        await first.wait()
        third = w.start()
        await hand.answer(await hand.request(), 3)
        assert (await third.wait()).numbers == [3]
        await other.answer(await other.request(), 2)
        assert (await second.wait()).numbers == [2]
        assert len(w.network.dials) == 2


async def test_the_servers_limit_is_obeyed(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcomes = [w.start() for _ in range(5)]
        hands = [await w.accept(max_concurrent_streams=2) for _ in range(3)]
        for hand in hands:
            w.nursery.start_soon(serve, hand)
        assert await gathered(outcomes) == [1, 1, 1, 3, 3]


async def test_also_a_limit_that_comes_later(autojump_clock: MockClock) -> None:
    async with world() as w:
        first = w.start()
        hand = await w.accept()
        stream_id = await hand.request()
        hand.h2.update_settings({3: 1})
        await hand.flush()
        await hand.event(events.SettingsAcknowledged)
        second = w.start()
        other = await w.accept()
        await other.answer(await other.request(), 2)
        assert (await second.wait()).numbers == [2]
        await hand.answer(stream_id, 1)
        assert (await first.wait()).numbers == [1]


async def test_a_server_that_takes_no_streams_is_none(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start()
        await w.accept(max_concurrent_streams=0)
        assert "takes no calls" in str(await outcome.fails(ConnectFailed))


async def test_refused_dials_fail_all_that_wait_for_them(autojump_clock: MockClock) -> None:
    async with world(Link(latency=1)) as w:
        w.network.refuse((HOST, PORT))
        outcomes = [w.start() for _ in range(3)]
        for outcome in outcomes:
            assert str(await outcome.fails(ConnectFailed)) == "engine:30001: Connection refused"
        w.network.accept((HOST, PORT))
        again = w.start()
        hand = await w.accept()
        await hand.answer(await hand.request(), 1)
        assert (await again.wait()).numbers == [1]


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak HTTP/2"),
        (b"", "closed before it spoke HTTP/2"),
        (None, "no HTTP/2 SETTINGS within 5 s"),
    ],
)
async def test_what_does_not_greet_is_no_server(greeting: bytes | None, words: str, autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start()
        connection = await w.listener.accept()
        if greeting:
            await connection.send(greeting)
        elif greeting is not None:
            connection.end_sending()
        assert words in str(await outcome.fails(ConnectFailed))
        assert trio.current_time() == (5 if greeting is None else 0)


async def test_a_dial_that_hangs_ends_in_time(autojump_clock: MockClock) -> None:
    async with world(connect_timeout=2) as w:
        w.network.hang((HOST, PORT))
        outcome = w.start()
        assert "no connection within 2 s" in str(await outcome.fails(ConnectFailed))
        assert trio.current_time() == 2


async def test_a_dial_outlives_whoever_asked_first(autojump_clock: MockClock) -> None:
    async with world(Link(latency=1)) as w:
        with trio.move_on_after(0.5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_open, w)
                await wait_all_tasks_blocked()
                second = w.start()
        hand = await w.accept()
        assert await hand.request() == 1
        await hand.answer(1, 5)
        assert (await second.wait()).numbers == [5]
        assert len(w.network.dials) == 1
        (transport,) = w.channels._transports
        assert transport.claims == 0


async def _open(w: World) -> None:
    async with w.generate():
        await trio.sleep_forever()


async def test_an_idle_connection_is_closed_after_a_while(autojump_clock: MockClock) -> None:
    async with world(idle_timeout=10) as w:
        hand = await _used(w)
        seen = await hand.closed()
        assert trio.current_time() == 10
        (goodbye,) = [event for event in seen if isinstance(event, events.ConnectionTerminated)]
        assert goodbye.error_code == 0
        # The next call dials.
        again = w.start()
        other = await w.accept()
        await other.answer(await other.request(), 2)
        assert (await again.wait()).numbers == [2]


async def test_one_in_use_is_not(autojump_clock: MockClock) -> None:
    async with world(idle_timeout=10) as w:
        await _used(w)
        async with w.generate():
            await trio.sleep(29)
            assert len(w.network.dials) == 1


async def test_nor_is_one_whose_call_has_ended_and_is_still_held(autojump_clock: MockClock) -> None:
    async with world(idle_timeout=10) as w:
        async with w.opened() as (call, hand):
            await hand.answer(await hand.request(), 1)
            assert [list(item.output_ids) async for item in call] == [[1]]
            await trio.sleep(29)
        await _used(w, hand)
        assert len(w.network.dials) == 1


async def test_idleness_begins_anew_with_each_call(autojump_clock: MockClock) -> None:
    async with world(idle_timeout=10) as w:
        hand = await _used(w)
        await trio.sleep(9)
        await _used(w, hand)
        await trio.sleep(9)
        await _used(w, hand)
        await hand.closed()
        assert trio.current_time() == 28


@pytest.mark.parametrize("how", ["end", "reset", "goaway"])
async def test_a_kept_connection_that_has_gone_is_not_used(how: str, autojump_clock: MockClock) -> None:
    async with world() as w:
        hand = await _used(w)
        if how == "end":
            hand.connection.end_sending()
        elif how == "reset":
            hand.connection.abort()
        else:
            await hand.goaway(1)
        # At once: its task had no turn yet to see the end.
        assert w.channels._with_place() is None
        outcome = w.start()
        other = await w.accept()
        await other.answer(await other.request(), 2)
        assert (await outcome.wait()).numbers == [2]


async def test_a_server_that_goes_away_at_once_is_none(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start()
        connection = await w.listener.accept()
        hand = Hand(connection, {})
        hand.h2.close_connection()
        await hand.flush()
        assert "takes no calls" in str(await outcome.fails(ConnectFailed))


async def test_nothing_outlives_its_scope(autojump_clock: MockClock) -> None:
    async with world() as w, trio.open_nursery() as nursery:
        outcome = Outcome()
        nursery.start_soon(w._run, outcome, "r", {})
        hand = await w.accept()
        await hand.request()
        w.channels._nursery.cancel_scope.cancel()
        lost = await outcome.fails(Lost)
        assert str(lost) == "the channels were closed"
        await hand.closed()


async def _used(w: World, hand: Hand | None = None) -> Hand:
    """A connection that is idle after one good call."""
    outcome = w.start()
    hand = hand or await w.accept()
    await hand.answer(await hand.request(), 1)
    assert (await outcome.wait()).numbers == [1]
    return hand
