"""What the simulated network tells of itself, and that the same seed tells the same."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from simnet_kit import B, history, network_of, pair, scheduled, send_until_blocked

from dyn_relay.net import ConnectFailed, ConnectionBroken
from dyn_testkit.simnet import Fragmentation, Link, NetEvent, SimNetwork


async def test_everything_is_told(autojump_clock):
    events: list[NetEvent] = []
    network = network_of(Link(latency=0.5, buffer=10), observe=events.append)
    near, far = await pair(network, 80)
    await send_until_blocked(near, b"0123456789abc")
    assert await far.receive() == b"0123456789"
    near.close()
    near.abort()
    assert await far.receive() == b""
    far.end_sending()
    far.abort()
    network.refuse(B)
    with pytest.raises(ConnectFailed):
        await network.connect(*B)
    a, b = "a:40001", "b:80"
    assert events == [
        NetEvent(0, "dial", a, b),
        NetEvent(1, "connected", a, b),
        NetEvent(1, "accepted", a, b),
        NetEvent(1, "sent", a, b, 10),
        NetEvent(1.5, "received", a, b, 10),
        NetEvent(1.5, "closed", a, b),
        NetEvent(2, "eof", a, b),
        NetEvent(2, "shut", b, a),
        NetEvent(2, "reset", b, a),
        NetEvent(2, "refuse", "", b),
        NetEvent(2, "dial", "client:40002", b),
        NetEvent(3, "refused", "client:40002", b),
    ]


async def test_faults_are_told_if_they_change_something(autojump_clock):
    events: list[NetEvent] = []
    network = network_of(observe=events.append)
    await pair(network, 80)
    del events[:]
    for _ in range(2):
        network.partition("a", "b", one_way=True)
        network.partition("b", "a")
    for _ in range(2):
        network.heal("a", "b")
    for _ in range(2):
        network.link("a", "b", Link(latency=1))
        network.link("b", "a", Link(latency=1))
    for _ in range(2):
        network.reset("a", "b")
    for fault in (network.hang, network.refuse, network.accept, network.deafen, network.hear):
        for _ in range(2):
            fault(B)
    assert [(event.kind, event.source, event.target) for event in events] == [
        ("partition", "a", "b"),
        ("partition", "b", "a"),
        ("heal", "a", "b"),
        ("heal", "b", "a"),
        ("link", "a", "b"),
        ("reset", "a:40001", "b:80"),
        ("hang", "", "b:80"),
        ("refuse", "", "b:80"),
        ("accept", "", "b:80"),
        ("deafen", "", "b:80"),
        ("hear", "", "b:80"),
    ]


def test_a_world_can_be_prepared_before_trio_runs():
    events: list[NetEvent] = []
    network = network_of(observe=events.append)
    network.link("a", "b", Link(latency=1))
    network.partition("a", "b", one_way=True)
    network.hang(B)
    network.deafen(B)
    assert [(event.time, event.kind) for event in events] == [
        (0, "link"),
        (0, "partition"),
        (0, "hang"),
        (0, "deafen"),
    ]


LINK = Link(latency=0.01, jitter=0.02, bandwidth=20000, fragmentation=Fragmentation(largest=50), buffer=1000)
UNRELATED = ("partition", "heal", "link", "refuse", "hang", "accept", "deafen", "hear")


def told(seed: int, *, unrelated: bool = False) -> list[NetEvent]:
    """What happens where many hosts talk to one at the same time; a function of its arguments."""
    events: list[NetEvent] = []

    async def main() -> None:
        network = SimNetwork(seed, LINK, observe=events.append)
        for name in ("b", "d", "e"):
            network.host(name)
        listener = await network.listen(*B)

        async def serve(connection) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(history, connection)
                await connection.send(bytes(500))
                connection.close() if connection.peer_host == "a1" else connection.end_sending()
                nursery.cancel_scope.deadline = trio.current_time() + 10

        async def talk(name: str) -> None:
            connection = await network.host(name).connect(*B)
            try:
                await connection.send(bytes(3000))
                connection.end_sending()
                await history(connection)
            except ConnectionBroken:
                connection.abort()

        async def disturb() -> None:
            """Of nobody's concern."""
            for at in range(20):
                await trio.sleep(0.01 + at / 1000)
                network.partition("d", "e")
                network.partition("b", "e", one_way=True)
                network.link("b", "d", Link(latency=at))
                network.refuse(("b", 81))
                network.hang(("d", 80))
                network.deafen(("e", 80))
                assert not network.reset("d", "b")
                network.heal("d", "e")
                network.heal("b", "e")
                network.accept(("b", 81))
                network.accept(("d", 80))
                network.hear(("e", 80))

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(talk, f"a{number}")
            if unrelated:
                nursery.start_soon(disturb)
            for _ in range(3):
                nursery.start_soon(serve, await listener.accept())
            await trio.sleep(60)
            nursery.cancel_scope.cancel()

    with scheduled(seed):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return events


def test_the_same_seed_tells_the_same():
    first, again, other = told(1), told(1), told(2)
    assert first == again
    assert first != other
    assert len({event.kind for event in first}) == 9


def test_faults_that_hit_nobody_change_nothing():
    events = told(1, unrelated=True)
    assert {event.kind for event in events} >= set(UNRELATED)
    assert [event for event in events if event.kind not in UNRELATED] == told(1)


async def test_one_connection_does_not_disturb_the_draws_of_another(autojump_clock):
    async def seen(bystander: bool) -> list[tuple[float, bytes]]:
        network = network_of(LINK)
        start = trio.current_time()
        listener = await network.listen("b", 81)
        other = await network.host("a").connect("b", 81)
        far_other = await listener.accept()
        near, far = await pair(network)
        read = []
        for _ in range(20):
            if bystander:
                assert other.offer(bytes(10))
            await near.send(bytes(10))
            await trio.sleep(1)
            read.append((round(trio.current_time() - start, 6), await far.receive()))
            if bystander:
                await far_other.receive()
        return read

    assert await seen(True) == await seen(False)
