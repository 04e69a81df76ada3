"""The connection in memory: what `net.Connection` promises, in a bounded buffer."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from dyn_relay.direct.pipe import CAPACITY, Pipe, pipe
from dyn_relay.net import ConnectionBroken


@pytest.fixture
async def ends() -> tuple[Pipe, Pipe]:
    return pipe("near", "far")


async def test_bytes_go_both_ways_and_each_end_has_the_others_name(ends):
    near, far = ends
    assert (near.peer, far.peer) == ("far", "near")
    await near.send(b"ask")
    assert await far.receive() == b"ask"
    await far.send(b"answer")
    assert [await near.receive(3), await near.receive()] == [b"ans", b"wer"]


async def test_a_writer_waits_when_nobody_reads(autojump_clock, ends):
    near, far = ends
    await near.send(b"w" * CAPACITY)
    assert not near.pending
    with trio.move_on_after(10) as patience:
        await near.send(b"x" * 7)
    assert patience.cancelled_caught
    assert near.pending
    assert not near.offer(b"y")
    assert await far.receive(CAPACITY) == b"w" * CAPACITY
    assert not near.pending
    await near.send(b"z")
    assert await far.receive() == b"x" * 7 + b"z", "what was on its way goes first"


async def test_a_writer_goes_on_as_soon_as_there_is_room(autojump_clock, ends):
    near, far = ends
    sent = trio.Event()

    async def write() -> None:
        await near.send(b"x" * (2 * CAPACITY))
        sent.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        assert await far.receive(CAPACITY - 1) == b"x" * (CAPACITY - 1)
        await wait_all_tasks_blocked()
        assert not sent.is_set()
        assert await far.receive(1) == b"x"
        await sent.wait()
    assert await far.receive() == b"x" * CAPACITY


async def test_an_offer_is_taken_whole_or_not_at_all(ends):
    near, far = ends
    assert near.offer(b"x" * (CAPACITY + 1))
    assert near.pending
    assert not near.offer(b"y")
    assert await far.receive(CAPACITY) == b"x" * CAPACITY
    await near.send(b"")
    assert await far.receive() == b"x"
    assert near.offer(b"y")
    assert await far.receive() == b"y"


async def test_half_a_close_ends_one_direction(ends):
    near, far = ends
    await near.send(b"last")
    near.end_sending()
    assert not far.quiet()
    assert [await far.receive(), await far.receive()] == [b"last", b""]
    with trio.fail_after(1):
        await far.wait_closed()
    await far.send(b"still")
    assert await near.receive() == b"still"
    with pytest.raises(ConnectionBroken):
        await near.send(b"more")
    assert not near.offer(b"more")


async def test_what_was_sent_before_a_close_is_read(ends):
    near, far = ends
    await near.send(b"last")
    near.close()
    near.close()
    assert [await far.receive(), await far.receive()] == [b"last", b""]
    with pytest.raises(ConnectionBroken):
        await far.send(b"to nobody")
    with pytest.raises(ConnectionBroken):
        await near.receive()


async def test_an_abort_is_an_error_at_once(ends):
    near, far = ends
    await near.send(b"lost")
    near.abort()
    with pytest.raises(ConnectionBroken):
        await far.receive()


@pytest.mark.parametrize("how", ["close", "abort", "end_sending"])
async def test_the_end_is_seen_by_who_waits(ends, how):
    near, far = ends
    async with trio.open_nursery() as nursery:
        nursery.start_soon(far.wait_closed)
        await wait_all_tasks_blocked()
        getattr(near, how)()


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_writer_that_waits_learns_that_nobody_reads(ends, how):
    near, far = ends

    async def write() -> None:
        with pytest.raises(ConnectionBroken):
            await near.send(b"x" * (CAPACITY + 1))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await wait_all_tasks_blocked()
        getattr(far, how)()


async def test_it_is_quiet_while_nothing_has_come(ends):
    near, far = ends
    assert far.quiet()
    await near.send(b"x")
    assert not far.quiet()
    await far.receive()
    assert far.quiet()
    far.close()
    assert not far.quiet()
