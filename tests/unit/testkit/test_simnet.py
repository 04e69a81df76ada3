"""The network in memory keeps the seam's promises."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from simnet_kit import drain, pair, send_until_blocked

from dyn_relay.net import ConnectFailed, Connection, ConnectionBroken, Ended
from dyn_testkit.simnet import Fragmentation, Link, SimNetwork


@pytest.fixture
async def ends() -> tuple[Connection, Connection]:
    return await pair(SimNetwork(link=Link(buffer=10)))


async def test_a_full_buffer_holds_the_writer_back(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    done = False

    async def write() -> None:
        nonlocal done
        await client.send(b"x" * 25)
        done = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        assert not done
        assert await server.receive() == b"x" * 10
        await trio.testing.wait_all_tasks_blocked()
        assert not done
        assert await server.receive() == b"x" * 10
        await trio.testing.wait_all_tasks_blocked()
        assert done


async def test_a_cancelled_send_leaves_no_hole(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    await send_until_blocked(client, b"0123456789abc")
    with trio.CancelScope() as scope:
        scope.cancel()
        await client.send(b"def")
    got = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.send, b"ghi")
        while len(got) < 19:
            got += await server.receive()
    assert got == b"0123456789abcdefghi"


async def test_offer_never_waits(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    assert client.offer(b"0123456")
    assert client.offer(b"789xyz")
    assert not client.offer(b"refused")
    assert await server.receive() == b"0123456789"
    await client.send(b"!")
    assert await server.receive() == b"xyz!"


async def test_close_delivers_the_rest_then_the_end(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    await client.send(b"rest")
    client.close()
    client.close()
    await server.wait_closed()
    assert await drain(server) == b"rest"
    with pytest.raises(ConnectionBroken):
        await server.send(b"nobody reads this")
    with pytest.raises(ConnectionBroken):
        await client.receive()


async def test_reset_is_an_error_after_what_had_arrived(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    await send_until_blocked(client, b"0123456789abc")
    client.abort()
    await server.wait_closed()
    assert await server.receive() == b"0123456789"
    with pytest.raises(ConnectionBroken, match="reset"):
        await server.receive()


async def test_half_close(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    client.end_sending()
    assert await server.receive() == b""
    await server.send(b"answer")
    assert await client.receive() == b"answer"
    with pytest.raises(ConnectionBroken, match="pipe"):
        await client.send(b"more")
    assert not client.offer(b"more")


async def test_quiet(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    assert client.quiet()
    await server.send(b"x")
    assert not client.quiet()
    await client.receive()
    assert client.quiet()
    server.close()
    assert not client.quiet()


async def test_refused_and_closed_addresses() -> None:
    network = SimNetwork()
    with pytest.raises(ConnectFailed, match="refused"):
        await network.connect("nobody", 1)
    listener = await network.listen("host", 80)
    with pytest.raises(OSError, match="in use"):
        await network.listen("host", 80)
    waiting = await network.connect("host", 80)
    listener.close()
    with pytest.raises(ConnectionBroken):
        await waiting.receive()
    with pytest.raises(ConnectFailed):
        await network.connect("host", 80)
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()
    assert network.dials == [("host", 80)]


class Upper:
    """Ends at a full stop."""

    done = False

    def __init__(self, rest: float = 0.0) -> None:
        self.rest = rest
        self.fed: list[tuple[float, bytes]] = []

    def feed(self, data: bytes) -> bytes:
        self.fed.append((trio.current_time(), data))
        self.done = b"." in data
        return data.upper()


async def test_relay() -> None:
    network = SimNetwork()
    (source, far), (sink, reader) = await pair(network), await pair(network)
    await far.send(b"ab.")
    assert await network.relay(source, sink, Upper()) is Ended.DONE
    assert await reader.receive() == b"AB."
    reader.close()
    assert await network.relay(source, sink, Upper()) is Ended.SINK_GONE


async def test_a_source_that_rests(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    (source, far), (sink, reader) = await pair(network), await pair(network)
    upper = Upper(rest=5)
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.relay, source, sink, upper)
        for word in (b"a", b"b", b"c", b"d"):
            await trio.sleep(2)
            await far.send(word)
        await trio.sleep(20)
        await far.send(b"e.")
    fed = [(round(at - begin), data) for at, data in upper.fed]
    assert fed == [(2, b"a"), (7, b"bc"), (12, b"d"), (28, b"e.")]
    assert await reader.receive() == b"ABCDE."


async def test_a_source_does_not_rest_while_it_has_more(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork(link=Link(fragmentation=Fragmentation(largest=1)))
    (source, far), (sink, _) = await pair(network), await pair(network)
    upper = Upper(rest=5)
    await far.send(b"abc.")
    begin = trio.current_time()
    assert await network.relay(source, sink, upper) is Ended.DONE
    assert (len(upper.fed), trio.current_time()) == (4, begin)
