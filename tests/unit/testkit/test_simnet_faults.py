"""Faults of the simulated network come, go, and hit nobody else."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing
from simnet_kit import B, drain, history, network_of, nothing_comes, now, pair

from dyn_relay.net import ConnectFailed, ConnectionBroken
from dyn_testkit.simnet import Link, SimNetwork

SLOW = Link(latency=0.1)


async def hangs(dial, seconds=1000):
    """No answer, for so long."""
    with trio.move_on_after(seconds) as scope:
        await dial()
    return scope.cancelled_caught


async def test_a_partition_holds_everything_until_it_heals(autojump_clock):
    network = network_of(SLOW)
    near, far = await pair(network)  # at 0.2
    await near.send(b"arrived,")
    await trio.sleep(0.1)
    await near.send(b"on its way,")
    await trio.sleep(0.05)
    network.partition("a", "b")
    await near.send(b"in the dark,")
    near.close()
    await far.send(b"and back")
    assert await far.receive() == b"arrived,"
    assert await nothing_comes(far)
    assert now() == 1000.35
    network.heal("a", "b")
    assert await history(far) == [(1000.45, b"on its way,in the dark,"), (1000.45, b"")]


async def test_a_partition_on_a_link_without_latency(autojump_clock):
    network = network_of()
    near, far = await pair(network)
    await near.send(b"arrived,")
    network.partition("a", "b")
    await near.send(b"held")
    assert await far.receive() == b"arrived,"
    assert await nothing_comes(far, 60)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def heal():
            await trio.sleep(5)
            network.heal("a", "b")

        assert await far.receive() == b"held"
    assert now() == 65
    await near.send(b"more")
    near.abort()
    assert await history(far) == [(65, b"more"), (65, "reset")]


async def test_what_is_sent_again_takes_the_link_as_it_is_now(autojump_clock):
    network = network_of(Link(latency=0.1, bandwidth=1460))
    near, far = await pair(network)  # at 0.2
    await near.send(bytes(4 * 1460))
    near.close()
    await trio.sleep(1.5)
    network.partition("a", "b")
    await trio.sleep(0.3)
    network.heal("a", "b")  # at 2: the second segment starts anew, with the others behind it
    segment = bytes(1460)
    assert await history(far) == [(2, segment), (3.1, segment), (4.1, segment), (5.1, segment), (5.1, b"")]


@pytest.mark.parametrize("end", ["close", "abort", "end_sending"])
async def test_ends_and_resets_are_held_too(end, autojump_clock):
    network = network_of(SLOW)
    near, far = await pair(network)
    network.partition("a", "b")
    getattr(near, end)()
    with trio.move_on_after(1000) as scope:
        await far.wait_closed()
    assert scope.cancelled_caught
    assert far.quiet()
    assert far.offer(b"nobody knows")
    network.heal("a", "b")
    await far.wait_closed()
    assert now() == 1000.3
    assert await history(far) == [(1000.3, "reset" if end == "abort" else b"")]


async def test_a_blocked_writer_learns_of_the_end_once_the_partition_heals(autojump_clock):
    events = []
    network = network_of(Link(buffer=10, latency=1), observe=events.append)
    near, far = await pair(network)  # at 2
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def write():
            with pytest.raises(ConnectionBroken, match="reset"):
                await near.send(bytes(100))
            assert now() == 103

        await trio.testing.wait_all_tasks_blocked()
        network.partition("a", "b")
        far.abort()  # makes room at once, and this end fills it: nothing tells it that nobody reads
        await trio.sleep(100)
        network.heal("a", "b")
    assert [event.size for event in events if event.kind == "sent"] == [10, 10]


async def test_writers_wait_in_a_partition_once_the_buffer_is_full(autojump_clock):
    network = network_of(Link(buffer=10))
    near, far = await pair(network)
    network.partition("a", "b")
    with trio.move_on_after(50) as scope:
        await near.send(b"0123456789abc")
    assert scope.cancelled_caught
    network.heal("a", "b")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.send, b"")
        assert await far.receive() == b"0123456789"
        assert await far.receive() == b"abc"


async def test_half_open_loses_one_direction_only(autojump_clock):
    network = network_of(SLOW)
    near, far = await pair(network)  # at 0.2
    network.partition("a", "b", one_way=True)
    await far.send(b"heard")
    assert await near.receive() == b"heard"
    await near.send(b"lost")
    assert await nothing_comes(far)
    network.heal("b", "a", one_way=True)  # not this one
    assert await nothing_comes(far)
    network.heal("a", "b", one_way=True)
    assert await far.receive() == b"lost"
    assert now() == 2000.4
    network.partition("a", "b", one_way=True)
    network.heal("b", "a")  # both, whichever was lost
    await near.send(b"heard")
    assert await far.receive() == b"heard"


@pytest.mark.parametrize("lost", [("a", "b"), ("b", "a")])
async def test_dials_hang_in_a_partition(lost, autojump_clock):
    network = network_of(SLOW)
    await network.listen(*B)
    network.partition(*lost, one_way=True)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def heal():
            await trio.sleep(100)
            network.heal("a", "b")

        await network.host("a").connect(*B)
        assert now() == (100.2 if lost == ("a", "b") else 100.1)
    network.partition("a", "b")
    assert await hangs(partial(network.host("a").connect, *B))
    assert await hangs(partial(network.host("a").connect, "b", 81))  # nobody listens; who could tell?


async def test_a_dial_on_its_way_gets_lost_too(autojump_clock):
    network = network_of(SLOW)
    await network.listen(*B)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def dial():
            await network.host("a").connect(*B)
            assert now() == 7.2

        await trio.sleep(0.05)
        network.partition("a", "b")
        await trio.sleep(6.95)
        network.heal("a", "b")


async def test_a_partition_hits_nobody_else(autojump_clock):
    network = network_of()
    listener = await network.listen(*B)
    other = await network.host("c").connect(*B)
    far = await listener.accept()
    network.partition("a", "b")
    network.partition("c", "a")
    await network.host("c").connect(*B)
    await other.send(b"hello")
    assert await far.receive() == b"hello"
    assert now() == 0


async def test_reset_breaks_all_connections_between_two_hosts(autojump_clock):
    network = network_of(SLOW)
    first = await pair(network)
    second = await pair(network)
    aside = await network.connect("b", int(first[0].peer.partition(":")[2]))
    await first[0].send(b"arrived")
    await trio.sleep(0.1)
    await first[0].send(b"on its way")
    start = now()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def read():
            assert await history(second[1]) == [(start, "reset")]

        await trio.testing.wait_all_tasks_blocked()
        assert network.reset("b", "a") == 2
    assert network.reset("a", "b") == 0
    assert await history(first[1]) == [(start, b"arrived"), (start, "reset")]
    for end in (*first, *second):
        assert not end.quiet()
        assert not end.offer(b"x")
        with pytest.raises(ConnectionBroken, match="reset"):
            await end.send(b"x")
        with pytest.raises(ConnectionBroken, match="reset"):
            await end.receive()
        await end.wait_closed()
    assert now() == start
    assert aside.quiet()
    assert network.reset("client", "b") == 1


async def test_reset_does_not_count_what_is_over(autojump_clock):
    network = network_of()
    ends = [await pair(network) for _ in range(5)]
    ends[0][0].abort()
    for end in ends[1]:
        end.close()
    ends[2][0].close()  # its peer may go on reading
    ends[3][0].end_sending()
    assert network.reset("a", "b") == 3
    await ends[2][1].wait_closed()


async def test_reset_wakes_a_writer_and_reaches_through_a_partition(autojump_clock):
    network = network_of(Link(buffer=10))
    near, far = await pair(network)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def write():
            with pytest.raises(ConnectionBroken, match="reset"):
                await near.send(bytes(100))

        network.partition("a", "b")
        await trio.testing.wait_all_tasks_blocked()
        assert network.reset("a", "b") == 1
    network.heal("a", "b")
    assert await history(far) == [(0, "reset")]


async def test_reset_within_one_host(autojump_clock):
    network = network_of()
    await network.listen("a", 80)
    near = await network.host("a").connect("a", 80)
    network.partition("a", "a")
    assert await hangs(partial(network.host("a").connect, "a", 80))
    assert network.reset("a", "a") == 1
    with pytest.raises(ConnectionBroken):
        await near.receive()


async def test_refuse_and_accept(autojump_clock):
    network = network_of(SLOW)
    near, far = await pair(network, 80)
    await network.listen("b", 81)
    for _ in range(2):
        network.refuse(B)
    with pytest.raises(ConnectFailed, match="b:80: Connection refused"):
        await network.host("a").connect(*B)
    assert network.listening == {B, ("b", 81)}
    await network.connect("b", 81)
    await near.send(b"goes on")
    assert await far.receive() == b"goes on"
    for _ in range(2):
        network.accept(B)
    await network.connect(*B)
    assert network.dials == [B, ("b", 81), B]


@pytest.mark.parametrize("undo", ["accept", "refuse"])
async def test_hang(undo, autojump_clock):
    network = network_of(SLOW)
    await network.listen(*B)
    for _ in range(2):
        network.hang(B)
    assert await hangs(partial(network.connect, *B))
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def change():
            await trio.sleep(10)
            network.accept(("b", 81))  # another one
            await trio.sleep(10)
            getattr(network, undo)(B)

        try:
            await network.connect(*B)
        except ConnectFailed:
            assert undo == "refuse"
        else:
            assert undo == "accept"
        assert now() == 1020.2
    network.hang(B)
    assert await hangs(partial(network.connect, *B))
    network.refuse(B)
    with pytest.raises(ConnectFailed):
        await network.connect(*B)


async def test_a_deaf_listener_gets_its_connections_later(autojump_clock):
    network = network_of(Link(buffer=10))
    network.deafen(B)  # before there is one
    listener = await network.listen(*B)
    near = await network.host("a").connect(*B)
    with trio.move_on_after(50):
        await near.send(b"0123456789abc")
    near.close()
    assert await hangs(listener.accept)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def hear():
            await trio.sleep(1)
            network.hear(("b", 81))
            await trio.sleep(1)
            for _ in range(2):
                network.hear(B)

        far = await listener.accept()
        assert now() == 1052
    assert await drain(far) == b"0123456789"
    for _ in range(2):
        network.deafen(B)
    await network.host("a").connect(*B)
    assert await hangs(listener.accept)
    listener.close()
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()


@pytest.mark.parametrize("fault", ["partition", "heal", "reset"])
def test_a_fault_for_nobody_is_a_mistake(fault):
    network = SimNetwork()
    network.host("w1")
    for hosts in (("w1", "w2"), ("w2", "w1")):
        with pytest.raises(ValueError, match="no host 'w2'; there are client, w1 "):
            getattr(network, fault)(*hosts)
    network.host("w2")
    getattr(network, fault)("w1", "w2")


@pytest.mark.parametrize("fault", ["refuse", "accept", "hang", "deafen", "hear"])
async def test_a_fault_at_no_address_is_a_mistake(fault):
    network = SimNetwork()
    with pytest.raises(ValueError, match="no host 'b'"):
        getattr(network, fault)(B)
    await network.listen("b", 1)
    getattr(network, fault)(B)


async def test_a_link_to_nobody_is_a_mistake():
    with pytest.raises(ValueError, match="no host 'b'"):
        SimNetwork().link("client", "b", SLOW)
