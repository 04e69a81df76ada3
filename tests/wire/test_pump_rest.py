"""Sources that rest: what comes meanwhile gathers in the kernel, and nothing is lost. The clock is the test's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import trio
from pump_kit import Copy, closing, local_pair, until_blocked
from trio.testing import MockClock, wait_all_tasks_blocked
from wire_kit import read_all, read_until

from dyn_relay import pump as module
from dyn_relay.net import RECEIVE_SIZE, Ended
from dyn_relay.pump import Pump
from dyn_relay.sockets import SocketConnection

REST = 0.005


class Lane:
    """One stream: worker -> source, sink -> client."""

    def __init__(self, pump: Pump, nursery: trio.Nursery, rest: float, total: int, buffer: int) -> None:
        self.pump = pump
        self.copy = Copy(total, rest)
        self.source, self.worker = local_pair(pump)
        self.sink, self.client = local_pair(pump, buffer)
        self.ended: Ended | None = None
        self.scope = trio.CancelScope()
        nursery.start_soon(self.relay)

    async def relay(self) -> None:
        with self.scope:
            self.ended = await self.pump.relay(self.source, self.sink, self.copy)

    async def write(self, *events: bytes) -> list[int]:
        """The worker writes each by itself; gives the sizes of the reads that the pump has made by then."""
        for event in events:
            assert self.worker.offer(event)
            await wait_all_tasks_blocked()
        return self.copy.sizes

    @property
    def all(self) -> tuple[SocketConnection, ...]:
        return self.source, self.worker, self.sink, self.client


class Bench:
    """A pump that runs, and the clock."""

    def __init__(self, nursery: trio.Nursery, clock: MockClock) -> None:
        self.pump = Pump()
        self.nursery = nursery
        self.clock = clock
        self.lanes: list[Lane] = []

    async def lane(self, *, rest: float = REST, total: int = 1 << 60, buffer: int = 0) -> Lane:
        """`buffer`: about what the kernel holds for the client, 200 KB if not given."""
        lane = Lane(self.pump, self.nursery, rest, total, buffer)
        self.lanes.append(lane)
        await wait_all_tasks_blocked()
        return lane

    async def resting(self, *, buffer: int = 0) -> Lane:
        """A stream whose source has more, and rests."""
        lane = await self.lane(buffer=buffer)
        assert await lane.write(b"1", b"2") == [1]
        assert lane.copy.fed == 1
        return lane

    async def later(self, seconds: float = REST) -> None:
        self.clock.jump(seconds)
        await wait_all_tasks_blocked()


@pytest.fixture
async def bench(mock_clock: MockClock) -> AsyncIterator[Bench]:
    async with trio.open_nursery() as nursery:
        made = Bench(nursery, mock_clock)
        await nursery.start(made.pump.run)
        yield made
        nursery.cancel_scope.cancel()
    with closing(*(connection for lane in made.lanes for connection in lane.all)):
        made.pump.close()


async def test_what_comes_meanwhile_is_one_read_and_one_write(bench: Bench, mock_clock: MockClock) -> None:
    lane = await bench.lane()
    assert await lane.write(b"1", b"22", b"333", b"4444") == [1]
    assert await lane.client.receive() == b"1"
    await bench.later(REST * 0.9)
    assert lane.copy.sizes == [1]
    await bench.later(REST * 0.2)
    assert lane.copy.sizes == [1, 9]
    assert await lane.client.receive() == b"223334444"
    assert bench.pump._resting  # no epoll needed any more
    assert await lane.write(b"5", b"5") == [1, 9]
    await bench.later()
    assert lane.copy.sizes == [1, 9, 2]


async def test_a_rest_is_as_long_as_the_transform_says(bench: Bench, mock_clock: MockClock) -> None:
    lane = await bench.lane(rest=3 * REST)
    await lane.write(b"1", b"2")
    await bench.later(2 * REST)
    assert lane.copy.sizes == [1]
    await bench.later()
    assert lane.copy.sizes == [1, 1]


async def test_the_first_one_after_a_longer_pause_passes_at_once(bench: Bench, mock_clock: MockClock) -> None:
    lane = await bench.lane()
    for number in range(1, 4):
        assert await lane.write(b"x") == [1] * number
        await bench.later()
    # Also after it has gathered something: at the end of the next rest there was nothing.
    await lane.write(b"x", b"yy")
    await bench.later()
    await bench.later()
    assert await lane.write(b"z") == [1, 1, 1, 1, 2, 1]


async def test_by_default_nobody_rests(bench: Bench, mock_clock: MockClock) -> None:
    lane = await bench.lane(rest=0.0)
    assert await lane.write(b"1", b"2", b"3") == [1, 1, 1]
    assert lane.ended is None


async def test_a_source_that_is_slower_than_its_rest_is_never_taken_out_of_epoll(
    bench: Bench, mock_clock: MockClock
) -> None:
    lane = await bench.lane()
    for _ in range(3):
        await lane.write(b"x")
        assert bench.pump._resting == []
        await bench.later()


async def test_all_that_rest_are_read_at_once(bench: Bench, mock_clock: MockClock) -> None:
    early, late = await bench.resting(), await bench.lane()
    await bench.later(REST / 2)
    assert await late.write(b"1", b"2") == [1]
    await bench.later(REST / 2)
    assert (early.copy.sizes, late.copy.sizes) == ([1, 1], [1, 1])


async def test_a_read_that_brings_nothing_to_write_is_followed_by_the_next(bench: Bench, mock_clock: MockClock) -> None:
    """A half event, or a head alone: the first whole event is not to wait for it."""
    lane = await bench.lane()
    lane.copy.silent = True
    await lane.write(b"half an ")
    lane.copy.silent = False
    assert await lane.write(b"event") == [5]
    # The same for what has gathered.
    lane.copy.silent = True
    await lane.write(b"x")
    await bench.later()
    lane.copy.silent = False
    assert await lane.write(b"yz") == [5, 2]


async def test_after_a_full_read_the_rest_of_it_is_read_at_once(bench: Bench, mock_clock: MockClock) -> None:
    lane = await bench.resting()
    much = b"x" * (RECEIVE_SIZE + 1000)
    assert await lane.write(much) == [1]
    await bench.later()
    assert lane.copy.sizes == [1, RECEIVE_SIZE, 1001]
    assert not lane.sink.unsent


@pytest.mark.parametrize("last", ["EOF", "reset"])
async def test_the_end_comes_with_the_last_bytes_a_rest_later_at_most(
    bench: Bench, mock_clock: MockClock, last: str
) -> None:
    lane = await bench.resting()
    if last == "reset":
        # A local socket is reset by a close while it has unread bytes, and then drops nothing of what it sent.
        lane.source.offer(b"unread")
    lane.worker.close()
    for _ in range(20):
        await wait_all_tasks_blocked()  # hangs if a source that hung up makes the pump spin
    assert lane.ended is None
    await bench.later()
    assert lane.copy.fed == 2
    await bench.later()
    assert lane.ended is (Ended.EOF if last == "EOF" else Ended.SOURCE_BROKEN)
    lane.sink.close()
    assert await read_all(lane.client) == b"12"


async def test_a_transform_that_is_done_does_not_rest(bench: Bench, mock_clock: MockClock) -> None:
    lane = await bench.lane(total=2)
    await lane.write(b"12")
    assert lane.ended is Ended.DONE


async def test_it_may_be_done_with_what_has_gathered(bench: Bench, mock_clock: MockClock) -> None:
    lane = await bench.lane(total=2)
    await lane.write(b"1", b"2")
    assert lane.ended is None
    await bench.later()
    assert lane.ended is Ended.DONE
    assert bench.pump._sources == bench.pump._sinks == {}


@pytest.mark.parametrize("how", ["cancelled", "client gone", "source closed", "sink closed"])
async def test_a_relay_that_ends_in_a_rest_loses_nothing_and_is_not_read_again(
    bench: Bench, mock_clock: MockClock, how: str
) -> None:
    """At once, not at the end of the rest. Its descriptors may be another relay's by then."""
    lane = await bench.resting()
    descriptor = lane.source.sock.fileno()
    ends: dict[str, Callable[[], None]] = {
        "cancelled": lane.scope.cancel,
        "client gone": lane.client.close,
        "source closed": lane.source.close,
        "sink closed": lane.sink.close,
    }
    ends[how]()
    await wait_all_tasks_blocked()
    expected = {"cancelled": None, "source closed": Ended.SOURCE_BROKEN}
    assert lane.ended is expected.get(how, Ended.SINK_GONE)
    assert bench.pump._sources == bench.pump._sinks == {}
    other = await bench.lane() if how == "source closed" else None
    if other is not None:
        assert other.source.sock.fileno() == descriptor
        assert await other.write(b"a", b"b") == [1]
    await bench.later()
    assert lane.copy.sizes == [1]
    if other is not None:
        assert other.copy.sizes == [1, 1]
    else:
        assert await lane.source.receive() == b"2"


async def test_a_relay_made_anew_reads_at_once_what_the_one_before_it_left(bench: Bench, mock_clock: MockClock) -> None:
    lane = await bench.resting()
    lane.scope.cancel()
    await wait_all_tasks_blocked()
    lane.scope = trio.CancelScope()
    bench.nursery.start_soon(lane.relay)
    await wait_all_tasks_blocked()
    assert lane.copy.sizes == [1, 1]
    # It rests by itself, and the one before it is forgotten.
    assert await lane.write(b"3") == [1, 1]
    await bench.later()
    assert await lane.write(b"4") == [1, 1, 1]
    assert await read_until(lane.client, b"3") == b"123"


async def test_a_sink_that_does_not_take_what_has_gathered(bench: Bench, mock_clock: MockClock) -> None:
    lane = await bench.resting(buffer=4096)
    much = b"x" * 60_000
    await lane.write(much)
    await bench.later()
    await until_blocked(lane.sink)
    await lane.write(b"y")
    await bench.later(REST * 10)
    assert lane.copy.sizes == [1, 60_001]
    assert bench.pump._resting == []
    # What came meanwhile has waited for longer than a rest.
    assert await read_until(lane.client, b"y") == b"12" + much + b"y"
    assert lane.copy.sizes == [1, 60_001, 1]
    assert await lane.write(b"z") == [1, 60_001, 1]
    await bench.later()
    assert lane.copy.sizes == [1, 60_001, 1, 1]


async def test_a_client_that_breaks_when_it_is_sent_what_has_gathered(bench: Bench, mock_clock: MockClock) -> None:
    lane = await bench.resting()
    lane.sink.end_sending()  # the next write fails
    await wait_all_tasks_blocked()
    assert lane.ended is None
    await bench.later()
    assert lane.ended is Ended.SINK_GONE
    assert bench.pump._sources == bench.pump._sinks == {}
    await bench.later()


async def test_many_that_rest_leave_others_their_turn(
    bench: Bench, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH", 4)
    lanes = [await bench.resting() for _ in range(10)]
    read: set[int] = set()
    bench.clock.jump(REST)
    while max(read, default=0) < 20:
        await trio.lowlevel.checkpoint()
        read.add(sum(len(lane.copy.sizes) for lane in lanes))
    assert read & {14, 18}
