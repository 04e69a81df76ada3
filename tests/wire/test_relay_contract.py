"""`Network.relay` and `Connection`: what each implementation of the seam must do, over TCP (the pump), in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import wait_all_tasks_blocked
from wire_kit import MemoryNetwork, read_all, read_until

from dyn_relay.net import ConnectFailed, Connection, ConnectionBroken, Ended, Network
from dyn_relay.sockets import open_network


class Upper:
    """Gives back what it gets in upper case; done after a "!", fails at a "?"."""

    def __init__(self, rest: float = 0.0) -> None:
        self.done = False
        self.rest = rest
        self.fed = 0

    def feed(self, data: bytes) -> bytes:
        if b"?" in data:
            raise KeyError(data)
        self.fed += len(data)
        self.done = b"!" in data
        return data.upper()


class World:
    """Two connections: worker -> source, sink -> client."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.worker: Connection
        self.source: Connection
        self.sink: Connection
        self.client: Connection

    async def dial(self) -> tuple[Connection, Connection]:
        listener = await self.network.listen("127.0.0.1", 0)
        dialled = await self.network.connect(listener.host, listener.port)
        accepted = await listener.accept()
        listener.close()
        return dialled, accepted

    async def relay(self, transform: Upper | None = None) -> Ended:
        return await self.network.relay(self.source, self.sink, transform or Upper())

    def close(self) -> None:
        for connection in (self.worker, self.source, self.sink, self.client):
            connection.close()


@pytest.fixture(params=["tcp", "memory"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with open_network() as tcp:
        made = World(tcp if request.param == "tcp" else MemoryNetwork())
        made.source, made.worker = await made.dial()
        made.client, made.sink = await made.dial()
        yield made
        made.close()


async def test_bytes_go_through_and_the_end_of_the_source_is_reported(world: World) -> None:
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            assert await world.relay() is Ended.EOF
            world.sink.close()

        nursery.start_soon(run)
        await world.worker.send(b"one ")
        assert await read_until(world.client, b" ") == b"ONE "
        await world.worker.send(b"two ")
        assert await read_until(world.client, b" ") == b"TWO "
        await world.worker.send(b"three")
        world.worker.close()
        assert await read_all(world.client) == b"THREE"


async def test_it_stops_when_the_transform_is_done(world: World) -> None:
    await world.worker.send(b"last words!")
    assert await world.relay() is Ended.DONE
    assert await read_until(world.client, b"!") == b"LAST WORDS!"
    # Both can be used on: another request on the source, the end of the answer to the client.
    await world.sink.send(b"0\r\n\r\n")
    assert await read_until(world.client, b"\n") == b"0\r\n\r\n"
    await world.worker.send(b"next")
    assert await world.source.receive() == b"next"


async def test_a_reset_of_the_source_is_reported(world: World) -> None:
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            assert await world.relay() is Ended.SOURCE_BROKEN

        nursery.start_soon(run)
        await world.worker.send(b"x")
        await read_until(world.client, b"X")
        world.worker.abort()


@pytest.mark.parametrize("how", ["close", "abort", "end_sending"])
@pytest.mark.parametrize("before", [b"", b"GET /pipelined HTTP/1.1\r\n"])
async def test_a_client_that_leaves_is_seen_while_the_source_is_silent(world: World, how: str, before: bytes) -> None:
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            assert await world.relay() is Ended.SINK_GONE

        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        await world.client.send(before)
        getattr(world.client, how)()


@pytest.mark.parametrize("side", ["source", "sink"])
async def test_a_connection_closed_here_ends_its_relay(world: World, side: str) -> None:
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            expected = {"source": Ended.SOURCE_BROKEN, "sink": Ended.SINK_GONE}[side]
            assert await world.relay() is expected
            assert await world.relay() is expected

        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        getattr(world, side).close()


async def test_an_exception_of_the_transform_comes_out_as_it_is(world: World) -> None:
    await world.worker.send(b"?")
    with pytest.raises(KeyError):
        await world.relay()
    await world.worker.send(b"!")
    assert await world.relay() is Ended.DONE


async def test_both_ends_gone_at_once(world: World) -> None:
    world.worker.close()
    world.client.close()
    assert await world.relay() in (Ended.EOF, Ended.SINK_GONE)


async def test_a_cancelled_relay_loses_nothing(world: World) -> None:
    for word in (b"a ", b"b "):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(world.relay)
                await world.worker.send(word)
                assert await read_until(world.client, b" ") == word.upper()
                scope.cancel()
        assert scope.cancelled_caught
    await world.worker.send(b"!")
    assert await world.relay() is Ended.DONE
    assert await read_until(world.client, b"!") == b"!"


@pytest.mark.parametrize("how", ["client gone", "cancelled"])
async def test_a_relay_that_ends_while_its_source_rests(world: World, how: str) -> None:
    """The rest is longer than anybody waits."""
    upper = Upper(rest=1000)
    ended: list[Ended] = []
    with trio.fail_after(20), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                ended.append(await world.relay(upper))

            nursery.start_soon(run)
            await world.worker.send(b"a ")
            assert await read_until(world.client, b" ") == b"A "
            await wait_all_tasks_blocked()
            await world.worker.send(b"b")
            await wait_all_tasks_blocked()
            if how == "cancelled":
                scope.cancel()
            else:
                world.client.close()
    assert upper.fed == 2
    if how == "client gone":
        assert ended == [Ended.SINK_GONE]
        return
    assert not ended
    await world.worker.send(b"!")
    assert await world.relay(Upper()) is Ended.DONE
    assert await read_until(world.client, b"!") == b"B!"


async def test_what_a_cancelled_send_left_goes_first(world: World) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await world.sink.send(b"kept,")
    await world.worker.send(b"then!")
    assert await world.relay() is Ended.DONE
    assert await read_until(world.client, b"!") == b"kept,THEN!"


async def test_what_a_cancelled_send_left_goes_also_while_the_source_is_silent(world: World) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await world.sink.send(b"kept")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.relay)
        assert await read_until(world.client, b"kept") == b"kept"
        nursery.cancel_scope.cancel()


async def test_wait_closed_returns_when_the_peer_has_left_and_reads_nothing(world: World) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.sink.wait_closed)
        await world.client.send(b"unread")
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        world.client.end_sending()
    assert await read_all(world.sink) == b"unread"


async def test_wait_closed_returns_when_it_is_closed_here(world: World) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.sink.wait_closed)
        await wait_all_tasks_blocked()
        world.sink.close()
    await world.sink.wait_closed()


async def test_quiet(world: World) -> None:
    assert world.source.quiet()
    await world.worker.send(b"x")
    assert not world.source.quiet()
    assert await world.source.receive() == b"x"
    assert world.source.quiet()
    world.worker.close()
    assert not world.source.quiet()
    world.source.close()
    assert not world.source.quiet()


async def test_half_close(world: World) -> None:
    world.client.end_sending()
    assert await world.sink.receive() == b""
    await world.sink.send(b"still here")
    world.sink.close()
    assert await read_all(world.client) == b"still here"


@pytest.mark.parametrize("use", ["receive", "send"])
async def test_a_closed_connection_is_broken(world: World, use: str) -> None:
    world.source.close()
    with pytest.raises(ConnectionBroken):
        await (world.source.receive() if use == "receive" else world.source.send(b"x"))
    assert not world.source.offer(b"x")
    world.source.close()
    world.source.abort()


async def test_a_close_by_another_task_ends_a_waiting_receive(world: World) -> None:
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            with pytest.raises(ConnectionBroken):
                await world.source.receive()

        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        world.source.close()


async def test_a_reset_is_seen_by_the_reader(world: World) -> None:
    world.worker.abort()
    with pytest.raises(ConnectionBroken):
        await world.source.receive()


async def test_offer(world: World) -> None:
    assert world.sink.offer(b": keep-alive\n\n")
    assert await read_until(world.client, b"\n\n") == b": keep-alive\n\n"


async def test_nobody_listens(world: World) -> None:
    listener = await world.network.listen("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await listener.accept()

        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        listener.close()
    listener.close()
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()
    with pytest.raises(ConnectFailed, match=f"127.0.0.1:{listener.port}: Connection refused"):
        await world.network.connect("127.0.0.1", listener.port)
