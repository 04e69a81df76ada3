"""Who may send how much: windows as backpressure, both ways."""

from __future__ import annotations

import pytest
import trio
from h2 import events
from h2.settings import SettingCodes
from trio.testing import MockClock, wait_all_tasks_blocked

from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.channels import Call
from dyn_relay.grpc.http2 import CONNECTION_WINDOW, STREAM_WINDOW
from dyn_relay.grpc.status import Code, Lost, Refused
from dyn_testkit.simnet import Link
from tests.grpc.hand import HEAD, Hand, World, message, numbers, world

#: A message of 1000 bytes and a little.
FILLED = 1000


async def fill(hand: Hand, stream_id: int, filler: int = FILLED) -> int:
    """Send messages until the client lets us send no more; how many bytes."""
    await hand.head(stream_id)
    sent = 0
    while room := hand.h2.local_flow_control_window(stream_id):
        data = message(1, filler)[:room]
        await hand.data(stream_id, data)
        sent += len(data)
    return sent


async def test_the_server_is_told_of_our_windows(autojump_clock: MockClock) -> None:
    async with world() as w, w.opened() as (_, hand):
        stream_id = await hand.request()
        told = hand.h2.remote_settings
        assert (told.enable_push, told.initial_window_size) == (0, STREAM_WINDOW)
        assert hand.h2.outbound_flow_control_window == CONNECTION_WINDOW
        assert hand.h2.local_flow_control_window(stream_id) == STREAM_WINDOW


async def test_a_stalled_call_holds_one_window(autojump_clock: MockClock) -> None:
    async with world() as w, w.opened() as (_, hand):
        assert await fill(hand, await hand.request()) == STREAM_WINDOW
        # Not even after a while.
        with trio.move_on_after(3600) as scope:
            await hand.event(events.WindowUpdated)
        assert scope.cancelled_caught


async def test_two_hundred_stalled_calls_hold_two_hundred_windows(autojump_clock: MockClock) -> None:
    async with world() as w:
        hands: list[tuple[Hand, int]] = []

        async def serve() -> None:
            while True:
                w.nursery.start_soon(requests, await w.accept())

        async def requests(hand: Hand) -> None:
            while True:
                hands.append((hand, await hand.request()))

        async def stall() -> None:
            async with w.generate():
                await trio.sleep_forever()

        w.nursery.start_soon(serve)
        for _ in range(200):
            w.nursery.start_soon(stall)
        await wait_all_tasks_blocked()
        assert len(hands) == 200
        sent = [await fill(hand, stream_id, 16000) for hand, stream_id in hands]
        await wait_all_tasks_blocked()
        assert sent == [STREAM_WINDOW] * 200
        held = [len(stream._inbox) for transport in w.channels._transports for stream in transport._streams.values()]
        assert held == [STREAM_WINDOW] * 200


async def test_a_slow_taker_does_not_hold_up_another(autojump_clock: MockClock) -> None:
    """Seven stalled calls, and one on the same connection that takes several times the connection's window."""
    async with world() as w:
        w.nursery.start_soon(_stalled, w)
        hand = await w.accept()
        await hand.request()
        for _ in range(6):
            w.nursery.start_soon(_stalled, w)
            await hand.request()
        taker = w.start()
        await hand.request()
        for stream_id in range(1, 15, 2):
            await fill(hand, stream_id)
        await hand.head(15)
        count = 3 * CONNECTION_WINDOW // FILLED
        await hand.pour(15, message(1, FILLED) * count)
        await hand.end(15)
        assert len((await taker.wait()).numbers) == count
        assert len(w.network.dials) == 1


async def _answer_pings(hand: Hand) -> None:
    await hand.event(events.ConnectionTerminated)


async def _stalled(w: World) -> None:
    async with w.generate():
        await trio.sleep_forever()


async def test_the_window_comes_back_as_messages_are_taken(autojump_clock: MockClock) -> None:
    async with world() as w, w.opened() as (call, hand):
        stream_id = await hand.request()
        await fill(hand, stream_id)
        size = len(message(1, FILLED))
        for _ in range(STREAM_WINDOW // 2 // size):
            await anext(call)
        await wait_all_tasks_blocked()
        assert hand.h2.local_flow_control_window(stream_id) == 0
        await anext(call)
        given = await hand.event(events.WindowUpdated, stream_id=stream_id)
        assert given.delta == (STREAM_WINDOW // 2 // size + 1) * size


async def test_a_message_larger_than_the_window_comes_while_it_is_waited_for(autojump_clock: MockClock) -> None:
    async with world() as w, w.opened() as (call, hand):
        stream_id = await hand.request()
        await hand.head(stream_id)
        large = message(5, 10 * STREAM_WINDOW)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hand.pour, stream_id, large + message(6, 10 * STREAM_WINDOW))
            # Nobody waits: only the window comes.
            await trio.sleep(10)
            assert hand.h2.local_flow_control_window(stream_id) == 0
            item = await anext(call)
            assert (list(item.output_ids), len(item.text)) == ([5], 10 * STREAM_WINDOW)
            await trio.sleep(10)
            # The second one fills its window and no more, now that it is not waited for.
            assert hand.h2.local_flow_control_window(stream_id) == 0
            assert list((await anext(call)).output_ids) == [6]


@pytest.mark.parametrize("first", ["message", "taker"])
async def test_the_window_is_as_long_as_the_message_that_is_waited_for(autojump_clock: MockClock, first: str) -> None:
    """So that a long one takes two round trips, not as many as it has windows; the next one has the usual window."""
    async with world() as w, w.opened() as (call, hand):
        stream_id = await hand.request()
        await hand.head(stream_id)
        large = message(5, 10 * STREAM_WINDOW)
        outcome: list[int] = []

        async def take() -> None:
            outcome.extend((await anext(call)).output_ids)

        if first == "message":
            await hand.data(stream_id, large[:STREAM_WINDOW])
            await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            await wait_all_tasks_blocked()
            if first == "taker":
                await hand.data(stream_id, large[:STREAM_WINDOW])
            await hand.event(events.WindowUpdated, stream_id=stream_id)
            assert hand.h2.local_flow_control_window(stream_id) == len(large) - STREAM_WINDOW
            await hand.pour(stream_id, large[STREAM_WINDOW:])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            await hand.event(events.WindowUpdated, stream_id=stream_id)
            assert STREAM_WINDOW // 2 < hand.h2.local_flow_control_window(stream_id) <= STREAM_WINDOW
            await hand.data(stream_id, message(6))
        assert outcome == [5, 6]


async def test_padding_is_given_back_too(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start()
        hand = await w.accept()
        stream_id = await hand.request()
        await hand.head(stream_id)
        count = STREAM_WINDOW // 100
        for _ in range(count):
            while hand.h2.local_flow_control_window(stream_id) < 256 + len(message(7)):
                await hand.event(events.WindowUpdated, stream_id=stream_id)
            hand.h2.send_data(stream_id, message(7), pad_length=255)
            await hand.flush()
        await hand.end(stream_id)
        assert (await outcome.wait()).numbers == [7] * count


@pytest.mark.parametrize("begun", [1, 4, 5, 6, 1000])
async def test_half_a_message_is_not_waited_for_for_ever(autojump_clock: MockClock, begun: int) -> None:
    """A queue is silent between messages, never within one; the connection itself is well and answers its pings."""
    async with world() as w, w.opened() as (call, hand):
        stream_id = await hand.request()
        await hand.head(stream_id)
        whole = message(5, FILLED)
        w.nursery.start_soon(_answer_pings, hand)

        async def send_late() -> None:
            await trio.sleep(3600)
            await hand.data(stream_id, whole)

        w.nursery.start_soon(send_late)
        assert list((await anext(call)).output_ids) == [5]
        await trio.sleep(3600)
        began = trio.current_time()
        await hand.data(stream_id, whole[:begun])
        with pytest.raises(Lost, match="half a message, and no more of it for 60 s"):
            await anext(call)
        assert 60 <= trio.current_time() - began <= 120


async def test_who_stood_still_blames_nobody(mock_clock: MockClock) -> None:
    """The rest of the message lies in the socket when the process goes on, and the deadline has passed long ago."""
    for _ in range(20):
        async with world() as w, w.opened() as (call, hand):
            stream_id = await hand.request()
            await hand.head(stream_id)
            whole = message(5, FILLED)
            await hand.data(stream_id, whole[:100])
            outcome: list[int] = []

            async def take(call: Call[pb.GenerateResponse] = call, outcome: list[int] = outcome) -> None:
                outcome.extend((await anext(call)).output_ids)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(take)
                await wait_all_tasks_blocked()
                hand.h2.send_data(stream_id, whole[100:])
                assert hand.connection.offer(hand.h2.data_to_send())
                mock_clock.jump(300)
            assert outcome == [5]


async def test_a_message_that_comes_slowly_is_waited_for(autojump_clock: MockClock) -> None:
    async with world() as w, w.opened() as (call, hand):
        stream_id = await hand.request()
        await hand.head(stream_id)
        whole = message(5, 20)

        async def drip() -> None:
            for at in range(len(whole)):
                await trio.sleep(59)
                await hand.data(stream_id, whole[at : at + 1])

        w.nursery.start_soon(_answer_pings, hand)
        w.nursery.start_soon(drip)
        assert list((await anext(call)).output_ids) == [5]


async def test_data_for_a_left_call_is_given_back(autojump_clock: MockClock) -> None:
    """Or the connection would be stuck after some left calls."""
    async with world() as w:
        w.nursery.start_soon(_stalled, w)
        hand = await w.accept()
        await hand.request()
        for _ in range(2 * CONNECTION_WINDOW // STREAM_WINDOW):
            async with w.generate():
                stream_id = await hand.request()
                await hand.head(stream_id)
            # The server has not read of the reset yet, and sends for nobody.
            await hand.data(stream_id, b"\0" * STREAM_WINDOW)
        outcome = w.start()
        stream_id = await hand.request()
        await hand.head(stream_id)
        await hand.pour(stream_id, message(1, 100000))
        await hand.end(stream_id)
        assert (await outcome.wait()).numbers == [1]
        assert len(w.network.dials) == 1


async def test_a_server_that_takes_more_than_it_may(autojump_clock: MockClock) -> None:
    async with world() as w, w.opened() as (call, hand):
        stream_id = await hand.request()
        await fill(hand, stream_id)
        await hand.frame("Data", stream_id, data=b"x")
        await wait_all_tasks_blocked()
        with pytest.raises(Lost, match="the server broke HTTP/2: Flow control window shrunk below 0"):
            await numbers(call)


# Requests.

LARGE = "x" * 300_000


async def received(hand: Hand, stream_id: int, size: int) -> int:
    got = 0
    while got < size:
        got += len((await hand.event(events.DataReceived, stream_id=stream_id)).data)
    return got


async def test_a_large_request_waits_for_the_server(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start(LARGE)
        hand = await w.accept()
        assert await received(hand, 1, 65535) == 65535
        await trio.sleep(10)
        hand.h2.increment_flow_control_window(10**6)
        await hand.flush()
        await trio.sleep(10)
        hand.h2.increment_flow_control_window(1000, 1)
        await hand.flush()
        assert await received(hand, 1, 1000) == 1000
        hand.h2.increment_flow_control_window(10**6, 1)
        await hand.flush()
        await hand.answer(await hand.request(), 1)
        assert (await outcome.wait()).numbers == [1]


async def test_a_request_goes_out_bit_by_bit(autojump_clock: MockClock) -> None:
    async with world(Link(buffer=60)) as w:
        w.nursery.start_soon(_stalled, w)
        hand = await w.accept()
        await hand.request()
        outcome = w.start("x" * 200)
        with trio.fail_after(1):
            await hand.answer(await hand.request(), 1)
        assert (await outcome.wait()).numbers == [1]


async def test_settings_open_windows_too(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start(LARGE)
        hand = await w.accept(initial_window_size=0)
        hand.h2.increment_flow_control_window(10**6)
        await hand.flush()
        await trio.sleep(10)
        hand.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100_000})
        await hand.flush()
        assert await received(hand, 1, 100_000) == 100_000
        # Fewer than were used: the window is below zero for a while.
        hand.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10})
        await hand.flush()
        await hand.event(events.SettingsAcknowledged)
        hand.h2.increment_flow_control_window(99_990, 1)
        await hand.flush()
        await trio.sleep(10)
        hand.h2.increment_flow_control_window(10**6, 1)
        await hand.flush()
        await hand.answer(await hand.request(), 1)
        assert (await outcome.wait()).numbers == [1]


async def test_frames_are_as_large_as_the_server_allows(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start(LARGE)
        hand = await w.accept(max_frame_size=20_000, initial_window_size=10**6)
        hand.h2.max_inbound_frame_size = 20_000
        hand.h2.increment_flow_control_window(10**6)
        await hand.flush()
        first = await hand.event(events.DataReceived)
        sizes = [len(first.data)]
        while not first.stream_ended:
            first = await hand.event(events.DataReceived)
            sizes.append(len(first.data))
        assert max(sizes) == 20_000
        await hand.answer(1, 1)
        assert (await outcome.wait()).numbers == [1]


async def test_an_early_answer_ends_the_sending(autojump_clock: MockClock) -> None:
    async with world() as w:
        outcome = w.start(LARGE)
        hand = await w.accept()
        await received(hand, 1, 65535)
        await hand.head(1, [*HEAD, ("grpc-status", "8"), ("grpc-message", "too much")], end=True)
        refused = await outcome.fails(Refused)
        assert (refused.code, refused.message) == (Code.RESOURCE_EXHAUSTED, "too much")
        assert (await hand.event(events.StreamReset)).stream_id == 1
        # The connection is as good as before.
        hand.h2.increment_flow_control_window(65535)
        await hand.flush()
        again = w.start()
        await hand.answer(await hand.request(), 3)
        assert (await again.wait()).numbers == [3]


@pytest.mark.parametrize("how", ["reset", "end", "leave"])
async def test_a_sender_that_waits_is_told_of_the_end(how: str, autojump_clock: MockClock) -> None:
    async with world() as w:
        if how == "leave":
            outcome = w.start(LARGE, timeout=100)
            hand = await w.accept()
            assert (await hand.event(events.StreamReset)).stream_id == 1
            assert trio.current_time() == 100
            return
        outcome = w.start(LARGE)
        hand = await w.accept()
        await received(hand, 1, 65535)
        if how == "reset":
            await hand.frame("RstStream", 1, error_code=2)
        else:
            hand.connection.end_sending()
        await outcome.fails(Lost)


async def test_a_server_that_reads_nothing_holds_up_only_what_it_is_sent(autojump_clock: MockClock) -> None:
    """Windows wide open, bytes not taken: what waits here is bounded, and answers come in."""
    async with world(Link(buffer=10_000)) as w:
        talker = w.start()
        hand = await w.accept(initial_window_size=2**30)
        hand.h2.increment_flow_control_window(2**30)
        await hand.flush()
        await hand.request()
        large = w.start("x" * 3_000_000)
        await wait_all_tasks_blocked()
        (transport,) = w.channels._transports
        assert len(transport._backlog) <= 65536 + 20_000
        await hand.answer(1, 1)
        assert (await talker.wait()).numbers == [1]
        await hand.answer(await hand.request(), 3)
        assert (await large.wait()).numbers == [3]


async def test_a_flood_of_pings_is_not_answered_without_end(autojump_clock: MockClock) -> None:
    async with world(Link(buffer=10_000)) as w:
        outcome = w.start()
        hand = await w.accept()
        await hand.request()
        with trio.move_on_after(10) as scope:
            for _ in range(100_000):
                await hand.connection.send(b"\0\0\x08\6\0\0\0\0\0abcdefgh" * 100)
        assert scope.cancelled_caught
        (transport,) = w.channels._transports
        assert len(transport._backlog) < 300_000 + 65536 * 2
        # It reads the answers after all.
        with trio.move_on_after(10):
            while True:
                await hand.connection.receive()
        hand.h2.send_headers(1, HEAD)
        hand.h2.send_data(1, message(1))
        await hand.connection.send(hand.h2.data_to_send())
        await hand.end(1)
        assert (await outcome.wait()).numbers == [1]
