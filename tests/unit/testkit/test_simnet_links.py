"""Links take the time that they say, and are as wide as they say."""

from __future__ import annotations

import weakref
from math import inf, nan

import pytest
import trio
import trio.testing
from simnet_kit import drain, history, network_of, now, pair, send_until_blocked

from dyn_relay.net import ConnectFailed, ConnectionBroken
from dyn_testkit.simnet import Fragmentation, Link, SimNetwork

SLOW = Link(latency=0.1)
NARROW = Link(bandwidth=1460, buffer=2920)


async def test_a_dial_takes_one_way_there_and_one_way_back(autojump_clock):
    network = network_of(SLOW)
    with pytest.raises(ConnectFailed, match="b:80: Connection refused"):
        await network.host("a").connect("b", 80)
    assert now() == 0.2
    listener = await network.listen("b", 80)

    async def serve():
        await listener.accept()
        assert now() == 0.3

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        near = await network.host("a").connect("b", 80)
        assert now() == 0.4
    assert (near.host, near.peer_host, near.peer) == ("a", "b", "b:80")


@pytest.mark.parametrize("when", [0.05, 0.15])
async def test_a_cancelled_dial_leaves_nothing_open(when, autojump_clock):
    network = network_of(SLOW)
    listener = await network.listen("b", 80)
    with trio.move_on_after(when):
        await network.connect("b", 80)
    if when < 0.1:
        with trio.move_on_after(10) as scope:
            await listener.accept()
        assert scope.cancelled_caught
    else:
        assert await history(await listener.accept()) == [(0.25, "reset")]
    assert not network.dials


async def test_a_listener_that_closes_resets_who_is_still_dialling(autojump_clock):
    network = network_of(SLOW)
    listener = await network.listen("b", 80)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def leave():
            await trio.sleep(0.15)
            listener.close()

        near = await network.connect("b", 80)
    assert await history(near) == [(0.25, "reset")]


async def test_bytes_arrive_after_the_latency(autojump_clock):
    near, far = await pair(network_of(SLOW))  # at 0.2
    await near.send(b"one")
    assert far.quiet()
    await trio.sleep(0.05)
    await near.send(b"two")
    near.close()
    await far.send(b"into the void")  # far cannot know
    assert far.quiet()
    await far.wait_closed()
    assert now() == 0.35
    with pytest.raises(ConnectionBroken, match="pipe"):
        await far.send(b"more")
    assert not far.quiet()
    assert await history(far) == [(0.35, b"onetwo"), (0.35, b"")]


async def test_a_reader_gets_each_write_when_it_arrives(autojump_clock):
    near, far = await pair(network_of(SLOW))
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def write():
            await near.send(b"one")
            await trio.sleep(0.05)
            await near.send(b"two")
            near.close()

        assert await history(far) == [(0.3, b"one"), (0.35, b"two"), (0.35, b"")]


async def test_the_end_of_one_direction_takes_its_time(autojump_clock):
    near, far = await pair(network_of(SLOW))
    await near.send(b"question")
    near.end_sending()
    assert await history(far) == [(0.3, b"question"), (0.3, b"")]
    await far.send(b"answer")
    far.close()
    assert await history(near) == [(0.4, b"answer"), (0.4, b"")]


async def test_a_reset_comes_behind_the_bytes_and_loses_only_what_its_sender_has_not_read(autojump_clock):
    near, far = await pair(network_of(Link(latency=0.1, bandwidth=14600)))
    await far.send(b"never read")
    await near.send(bytes(2920))
    near.abort()
    assert far.quiet()
    assert await history(far) == [(0.4, bytes(1460)), (0.5, bytes(1460)), (0.5, "reset")]
    with pytest.raises(ConnectionBroken, match="closed"):
        await near.receive()


@pytest.mark.parametrize("leave", ["close", "abort"])
async def test_a_sender_that_waits_for_room_learns_that_the_peer_has_gone(leave, autojump_clock):
    near, far = await pair(network_of(Link(latency=0.1, buffer=10)))
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def write():
            with pytest.raises(ConnectionBroken):
                await near.send(bytes(1000))
            assert now() == 1.3

        await trio.sleep(1)
        getattr(far, leave)()


@pytest.mark.parametrize("latency", [0, 0.5])
@pytest.mark.parametrize(("leave", "seen"), [("close", b""), ("end_sending", b""), ("abort", "reset")])
async def test_a_reader_that_waits_gets_the_end(leave, seen, latency, autojump_clock):
    near, far = await pair(network_of(Link(latency=latency)))
    start = now()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def read():
            assert await history(far) == [(start + latency, seen)]

        nursery.start_soon(far.wait_closed)
        await trio.testing.wait_all_tasks_blocked()
        getattr(near, leave)()


@pytest.mark.parametrize(("leave", "message"), [("close", "closed"), ("abort", "closed"), ("end_sending", "pipe")])
async def test_leaving_wakes_the_own_tasks(leave, message, autojump_clock):
    near, far = await pair(network_of(Link(buffer=10)))
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def write():
            with pytest.raises(ConnectionBroken, match=message):
                await near.send(bytes(100))

        @nursery.start_soon
        async def read():
            if leave == "end_sending":
                assert await near.receive() == b"still read"
            else:
                with pytest.raises(ConnectionBroken, match="closed"):
                    await near.receive()

        await trio.testing.wait_all_tasks_blocked()
        getattr(near, leave)()
        if leave == "end_sending":
            await far.send(b"still read")


async def test_what_is_due_is_seen_without_reading(autojump_clock):
    near, far = await pair(network_of(SLOW))
    await near.send(b"x")
    assert far.quiet()
    await trio.sleep(0.1)
    assert not far.quiet()
    near.close()
    assert far.offer(b"x")
    await trio.sleep(0.1)
    assert not far.offer(b"x")


async def test_a_connection_that_both_ends_have_closed_is_forgotten():
    network = network_of()
    near, far = await pair(network)
    near.close()
    far.abort()
    left = [weakref.ref(near), weakref.ref(far)]
    del near, far
    assert [ref() for ref in left] == [None, None]


async def test_what_is_offered_arrives_in_its_time_and_never_exceeds_the_buffer(autojump_clock):
    near, far = await pair(network_of(Link(latency=0.1, buffer=10)))
    assert near.offer(b"0123456")
    assert near.offer(b"789xyz")
    assert near.pending
    assert not near.offer(b"refused")
    await trio.sleep(1)
    assert near.pending
    assert not near.offer(b"refused")
    assert await far.receive() == b"0123456789"
    await near.send(b"!")
    near.close()
    assert await history(far) == [(1.3, b"xyz!"), (1.3, b"")]


@pytest.mark.parametrize(("pause", "least"), [(1, 1.05), (0.01, 1.45)])
async def test_jitter_delays_and_never_reorders(pause, least, autojump_clock):
    near, far = await pair(network_of(Link(latency=1, jitter=0.5)))
    start = now()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def write():
            for number in range(200):
                await near.send(bytes([number]))
                await trio.sleep(pause)
            near.close()

        seen = await history(far)
    assert b"".join(data for _, data in seen) == bytes(range(200))
    delays = [time - start - number * pause for time, data in seen for number in data]
    assert 1 <= min(delays) < least  # where writes are close together, each waits for the slowest before it
    assert 1.45 < max(delays) <= 1.5


async def test_bandwidth_spreads_bytes_over_time(autojump_clock):
    near, far = await pair(network_of(Link(bandwidth=1460, latency=0.1)))
    await near.send(bytes(1460) * 2 + b"end")
    near.close()
    took = 2 + 3 / 1460
    seen = await history(far)
    assert seen == [(1.3, bytes(1460)), (2.3, bytes(1460)), (round(0.3 + took, 6), b"end"), (round(0.3 + took, 6), b"")]


async def test_a_narrow_link_holds_the_writer_back_as_the_reader_reads(autojump_clock):
    near, far = await pair(network_of(NARROW))
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def write():
            await near.send(bytes(14600))
            assert now() == 8  # the last two segments are in the buffer
            near.close()

        seen = await history(far)
    assert [time for time, _ in seen] == [*range(1, 11), 10]


async def test_a_reader_that_does_not_read_holds_the_writer_back(autojump_clock):
    near, far = await pair(network_of(NARROW))
    with trio.move_on_after(100):
        await near.send(bytes(14600))
    assert near.pending
    assert await far.receive() == bytes(2920)


async def test_a_cancelled_read_or_write_loses_nothing(autojump_clock):
    near, far = await pair(network_of(Link(latency=0.1, buffer=10)))
    got = b""
    await send_until_blocked(near, b"0123456789abc")
    for _ in range(3):
        with trio.move_on_after(0.04):
            got += await far.receive()
    assert got == b"0123456789"
    with trio.CancelScope() as scope:
        scope.cancel()
        await near.send(b"def")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.send, b"ghi")
        while len(got) < 19:
            got += await far.receive()
    assert got == b"0123456789abcdefghi"


async def test_a_link_can_change_under_open_connections(autojump_clock):
    network = network_of(Link(latency=1))
    near, far = await pair(network)  # at 2
    await near.send(b"slow,")
    await trio.sleep(0.5)
    network.link("a", "b", Link(latency=0.1))
    await near.send(b"fast but behind,")
    await far.receive()
    assert now() == 3
    await near.send(b"fast")
    assert await far.receive() == b"fast"
    assert now() == 3.1
    await near.send(b"slow, ")
    network.link("b", "a", Link())
    await near.send(b"instant, ")
    near.close()
    assert far.quiet()
    assert await history(far) == [(3.2, b"slow, instant, "), (3.2, b"")]


async def test_a_larger_buffer_lets_a_waiting_writer_go_on(autojump_clock):
    network = network_of(Link(buffer=10))
    near, far = await pair(network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.send, bytes(25))
        await trio.testing.wait_all_tasks_blocked()
        assert near.pending
        network.link("a", "b", Link(buffer=20))
        await trio.testing.wait_all_tasks_blocked()
        assert near.pending
        network.link("a", "b", Link(buffer=5))
        assert await far.receive() == bytes(20)
        assert await far.receive() == bytes(5)


async def test_reads_are_cut_as_the_link_says_now(autojump_clock):
    network = network_of()
    near, far = await pair(network)
    await near.send(b"0123456789")
    cut = Link(fragmentation=Fragmentation(sizes=(1, 2, 3)))
    network.link("a", "b", cut)
    assert [await far.receive(), await far.receive()] == [b"0", b"12"]
    network.link("a", "b", Link(fragmentation=Fragmentation(sizes=(4,))))
    assert await far.receive() == b"3456"
    network.link("a", "b", cut)
    assert await far.receive() == b"7"
    network.link("a", "b", Link())
    assert await far.receive() == b"89"


async def test_each_pair_of_hosts_has_its_link(autojump_clock):
    network = SimNetwork(link=SLOW)
    for name in "abc":
        network.host(name)
    network.link("a", "b", Link(latency=1))
    for port, (source, took) in enumerate([("a", 2), ("c", 0.2)], 1):
        listener = await network.host("b").listen("b", port)
        start = now()
        near = await network.host(source).connect("b", port)
        assert (now() - start, near.host) == (pytest.approx(took), source)
        far = await listener.accept()
        assert (far.host, far.peer_host, far.peer.partition(":")[0]) == ("b", source, source)
        await far.send(b"back")
        await near.receive()
        assert now() - start == pytest.approx(1.5 * took)


async def test_a_host_listens_at_its_own_name_only(autojump_clock):
    network = network_of()
    assert network.host("a") is network.host("a")
    with pytest.raises(OSError, match="Cannot assign"):
        await network.host("a").listen("b", 80)
    await network.host("a").listen("a", 80)
    assert network.listening == {("a", 80)}


async def test_a_host_can_dial_itself(autojump_clock):
    network = network_of(SLOW)
    listener = await network.host("a").listen("a", 80)
    near = await network.host("a").connect("a", 80)
    far = await listener.accept()
    await near.send(b"hello")
    near.close()
    assert await drain(far) == b"hello"


@pytest.mark.parametrize(
    "impossible",
    [{"latency": -1}, {"jitter": inf}, {"latency": nan}, {"bandwidth": 0}, {"bandwidth": nan}, {"buffer": 0}],
)
async def test_a_link_that_cannot_be(impossible, autojump_clock):
    with pytest.raises(ValueError, match=next(iter(impossible))):
        Link(**impossible)
