"""The pump: backpressure, cancellation in the middle of a write, descriptors that come and go."""

from __future__ import annotations

import itertools
import random
import socket
import ssl
from collections.abc import AsyncIterator

import pytest
import trio
from pump_kit import Copy, closing, local_pair, until_blocked
from trio.testing import wait_all_tasks_blocked
from wire_kit import read_all, read_until

from dyn_relay.net import LARGE_RECEIVE_SIZE, RECEIVE_SIZE, Ended
from dyn_relay.pump import BATCH, BATCH_BYTES, CUTS, Pump
from dyn_relay.sockets import SocketConnection, SocketNetwork, describe, open_network

#: Far more than the kernel buffers of one connection below.
MUCH = 4 << 20


@pytest.fixture
async def network() -> AsyncIterator[SocketNetwork]:
    async with open_network() as made:
        yield made


async def tcp_pair(network: SocketNetwork) -> tuple[SocketConnection, SocketConnection]:
    listener = await network.listen("127.0.0.1", 0)
    dialled, accepted = await network.connect("127.0.0.1", listener.port), await listener.accept()
    listener.close()
    assert isinstance(dialled, SocketConnection)
    assert isinstance(accepted, SocketConnection)
    return dialled, accepted


async def test_a_source_is_not_read_while_the_sink_does_not_take(network: SocketNetwork) -> None:
    source, worker = await tcp_pair(network)
    client, sink = local_pair(network._pump, 4096)
    payload = random.Random(1).randbytes(MUCH)
    copy = Copy(MUCH)
    with closing(source, worker, client, sink):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.send, payload)
            nursery.start_soon(network.relay, source, sink, copy)
            await until_blocked(sink)
            fed = copy.fed
            assert len(sink.unsent) <= LARGE_RECEIVE_SIZE
            for _ in range(20):
                await wait_all_tasks_blocked()
            assert copy.fed == fed < MUCH
            got = b""
            while len(got) < MUCH:
                got += await client.receive()
        assert got == payload


@pytest.mark.parametrize("seed", range(5))
async def test_no_byte_is_lost_or_doubled_by_cancels_in_the_middle_of_writes(network: SocketNetwork, seed: int) -> None:
    dice = random.Random(seed)
    source, worker = await tcp_pair(network)
    client, sink = local_pair(network._pump, 4096)
    payload = dice.randbytes(1 << 20)
    copy = Copy(len(payload))
    got = bytearray()
    interrupted = 0

    async def relay() -> Ended | None:
        """Relay until some of it has reached the client, and a little longer; None if it was cancelled."""
        async with trio.open_nursery() as attempt:

            async def cancel() -> None:
                while client.quiet():
                    await trio.lowlevel.checkpoint()
                for _ in range(dice.randint(0, 5)):
                    await trio.lowlevel.checkpoint()
                attempt.cancel_scope.cancel()

            attempt.start_soon(cancel)
            ended = await network.relay(source, sink, copy)
            attempt.cancel_scope.cancel()
            return ended
        return None

    with closing(source, worker, client, sink):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.send, payload)
            while (ended := await relay()) is None:
                interrupted += bool(sink.unsent)
                while not client.quiet():
                    got += await client.receive(dice.randint(1, 20000))
            assert ended is Ended.DONE
            while len(got) < len(payload):
                got += await client.receive()
    assert interrupted > 20
    assert got == payload


async def test_a_rest_left_by_offer_is_not_overwritten(network: SocketNetwork) -> None:
    source, worker = await tcp_pair(network)
    client, sink = local_pair(network._pump, 4096)
    comment = b": keep-alive\n" * 10_000
    with closing(source, worker, client, sink):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(network.relay, source, sink, Copy(5))
            await wait_all_tasks_blocked()
            assert sink.offer(comment)
            assert sink.unsent
            assert not sink.offer(b"another")
            await worker.send(b"event")
            assert await read_until(client, b"event") == comment + b"event"


async def test_a_client_that_leaves_while_it_does_not_take_is_seen(network: SocketNetwork) -> None:
    source, worker = await tcp_pair(network)
    client, sink = local_pair(network._pump, 4096)
    with closing(source, worker, client, sink):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.send, b"x" * MUCH)

            async def run() -> None:
                assert await network.relay(source, sink, Copy()) is Ended.SINK_GONE
                nursery.cancel_scope.cancel()

            nursery.start_soon(run)
            await until_blocked(sink)
            client.close()


async def test_a_source_that_breaks_while_the_sink_does_not_take(network: SocketNetwork) -> None:
    """It neither spins nor overwrites what is unsent; what was taken from it before is delivered first."""
    source, worker = await tcp_pair(network)
    client, sink = local_pair(network._pump, 4096)
    payload = random.Random(2).randbytes(MUCH)
    copy = Copy()
    with closing(source, worker, client, sink):
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                with trio.CancelScope() as sending:
                    async with trio.open_nursery() as inner:

                        async def run() -> None:
                            assert await network.relay(source, sink, copy) is Ended.SOURCE_BROKEN
                            sink.close()

                        nursery.start_soon(run)
                        inner.start_soon(worker.send, payload)
                        await until_blocked(sink)
                        sending.cancel()
                worker.abort()
                for _ in range(20):
                    await wait_all_tasks_blocked()  # hangs if the pump spins
                got = await read_all(client)
    assert got == payload[: copy.fed]
    assert copy.fed > 0


@pytest.mark.parametrize("by", ["cancelled", "closed"])
async def test_what_was_read_is_not_lost_by_what_is_read_after_it_in_the_same_wake_up(
    network: SocketNetwork, by: str
) -> None:
    """Several sources are read before anything is sent, and what one of them gives may end another's relay."""
    pump = network._pump
    (worker, source), (sink, client) = local_pair(pump), local_pair(pump)
    (later_worker, later_source), (later_sink, later_client) = local_pair(pump), local_pair(pump)
    scope = trio.CancelScope()
    ended: list[Ended] = []

    class Ends(Copy):
        def feed(self, data: bytes) -> bytes:
            assert sink.unsent == b"first"
            scope.cancel() if by == "cancelled" else sink.close()
            return super().feed(data)

    async def relayed() -> None:
        with scope:
            ended.append(await network.relay(source, sink, Copy()))

    with closing(worker, source, sink, client, later_worker, later_source, later_sink, later_client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relayed)
            nursery.start_soon(network.relay, later_source, later_sink, Ends())
            await wait_all_tasks_blocked()
            worker.sock.send(b"first")
            later_worker.sock.send(b"second")
            assert await later_client.receive() == b"second"
            await wait_all_tasks_blocked()
            assert ended == ([] if by == "cancelled" else [Ended.SINK_GONE])
            if by == "cancelled":
                await sink.send(b", and more")
                assert await client.receive() == b"first, and more"
            nursery.cancel_scope.cancel()


async def test_a_descriptor_used_again_after_a_close_during_a_relay(network: SocketNetwork) -> None:
    for _ in range(3):
        source, worker = await tcp_pair(network)
        client, sink = await tcp_pair(network)
        with closing(source, worker, client, sink):
            descriptors = {source.sock.fileno(), sink.sock.fileno()}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(network.relay, source, sink, Copy())
                await wait_all_tasks_blocked()
                source.close()
                sink.close()
            again, peer = await tcp_pair(network)
            with closing(again, peer):
                assert {again.sock.fileno(), peer.sock.fileno()} == descriptors
                await peer.send(b"x")
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(again.wait_closed)
                        await wait_all_tasks_blocked()
                        scope.cancel()
                assert await again.receive() == b"x"


async def test_a_connection_is_relayed_once_at_a_time(network: SocketNetwork) -> None:
    source, worker = await tcp_pair(network)
    other, _worker = await tcp_pair(network)
    client, sink = await tcp_pair(network)
    with closing(source, worker, other, _worker, client, sink):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(network.relay, source, sink, Copy())
            await wait_all_tasks_blocked()
            for pair in ((other, sink), (source, other)):
                with pytest.raises(trio.BusyResourceError):
                    await network.relay(*pair, Copy())
            nursery.cancel_scope.cancel()
        # The failed attempts have left nothing behind.
        await worker.send(b"x")
        assert await network.relay(source, sink, Copy(1)) is Ended.DONE
        await _worker.send(b"y")
        assert await network.relay(other, sink, Copy(1)) is Ended.DONE


async def test_reads_grow_while_they_come_back_full_and_shrink_again() -> None:
    pump = Pump()
    source, worker = local_pair(pump)
    sink, client = local_pair(pump)
    copy = Copy(200_001)
    with closing(source, worker, client, sink):
        assert worker.offer(b"x" * 200_000)
        assert not worker.unsent
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump.run)
            nursery.start_soon(pump.relay, source, sink, copy)
            await read_until(client, b"x")
            await wait_all_tasks_blocked()
            assert copy.sizes == [RECEIVE_SIZE, 200_000 - RECEIVE_SIZE]
            assert pump._sources[source.sock.fileno()].size == LARGE_RECEIVE_SIZE
            await worker.send(b"y")
            await read_until(client, b"y")
            nursery.cancel_scope.cancel()
    pump.close()


async def test_one_wake_up_serves_many_small_reads_and_few_large_ones() -> None:
    pump = Pump()
    lanes = [(local_pair(pump), local_pair(pump), Copy()) for _ in range(30)]
    everything = [connection for source, sink, _ in lanes for connection in (*source, *sink)]
    with closing(*everything):
        async with trio.open_nursery() as nursery:
            for (source, _), (sink, _), copy in lanes:
                nursery.start_soon(pump.relay, source, sink, copy)
            await wait_all_tasks_blocked()
            for (_, worker), _, _ in lanes:
                worker.offer(b"x" * 150_000)
            pump._serve()
            assert pump._batch == BATCH_BYTES // RECEIVE_SIZE
            read = sum(len(copy.sizes) for _, _, copy in lanes)
            pump._serve()
            assert sum(len(copy.sizes) for _, _, copy in lanes) - read <= BATCH_BYTES // RECEIVE_SIZE
            while any(copy.fed < 150_000 for _, _, copy in lanes):
                pump._serve()
                for _, (sink, client), _ in lanes:
                    while sink.unsent or not client.quiet():
                        client.sock.recv(1 << 20)
                        sink.flush()
            pump._serve()
            assert pump._batch == BATCH
            nursery.cancel_scope.cancel()
    pump.close()


async def test_a_wake_up_looks_again_for_what_has_become_ready_and_yields_all_the_same() -> None:
    """A source that is never empty must not keep everybody else waiting."""
    pump = Pump()
    (source, worker), (sink, client) = local_pair(pump), local_pair(pump)

    class Endless(Copy):
        def feed(self, data: bytes) -> bytes:
            if self.fed < 10_000:
                worker.offer(b"y")
            self.fed += len(data)
            return b""

    copy = Endless()
    with closing(source, worker, sink, client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump.relay, source, sink, copy)
            await wait_all_tasks_blocked()
            worker.offer(b"x")
            pump._serve()
            assert copy.fed == BATCH
            nursery.cancel_scope.cancel()


async def test_who_was_cut_is_told_a_few_at_a_time_and_the_others_are_served_in_between(network: SocketNetwork) -> None:
    """A worker dies: each of its streams is work; a stream of another one does not wait for all of them."""
    pump, cuts = network._pump, 8 * CUTS
    source, worker = local_pair(pump)
    client, sink = local_pair(pump)
    pairs = [(local_pair(pump), local_pair(pump)) for _ in range(cuts)]
    told: list[Ended] = []
    #: How many had been told when a byte of the other one came.
    seen: list[int] = []

    class Watching(Copy):
        def feed(self, data: bytes) -> bytes:
            seen.append(len(told))
            worker.sock.send(b"x")  # there is always one more
            return b""

    async def relay(upstream: SocketConnection, downstream: SocketConnection) -> None:
        told.append(await network.relay(upstream, downstream, Copy()))

    with closing(source, worker, client, sink, *(end for pair in pairs for ends in pair for end in ends)):
        async with trio.open_nursery() as nursery:
            for (upstream, _), (_, downstream) in pairs:
                nursery.start_soon(relay, upstream, downstream)
            await wait_all_tasks_blocked()
            for (_, dead), _ in pairs:
                dead.close()
            worker.sock.send(b"x")
            nursery.start_soon(network.relay, source, sink, Watching())
            with trio.fail_after(20):
                while len(told) < cuts:
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert told == [Ended.EOF] * cuts
    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert max(steps) <= 2 * CUTS  # the tasks that two wake-ups have woken may run between two others
    assert seen[-1] >= cuts - 2 * CUTS


@pytest.mark.parametrize("goes_on", [True, False], ids=["the pump goes on", "the pump ends"])
async def test_how_a_relay_was_cut_is_told_though_its_task_is_cancelled_meanwhile(goes_on: bool) -> None:
    """A reset shows once: a cancelled task that looked again would find an orderly end."""
    pump, told = Pump(), list[Ended]()
    pairs = [(local_pair(pump), local_pair(pump)) for _ in range(3 * CUTS)]

    async def relay(upstream: SocketConnection, downstream: SocketConnection) -> None:
        told.append(await pump.relay(upstream, downstream, Copy()))

    async def pumping(scope: trio.CancelScope) -> None:
        with scope:
            await pump.run()

    with closing(*(end for pair in pairs for ends in pair for end in ends)):
        async with trio.open_nursery() as pumps, trio.open_nursery() as relays:
            for (upstream, _), (_, downstream) in pairs:
                relays.start_soon(relay, upstream, downstream)
            await wait_all_tasks_blocked()
            for (_, dead), _ in pairs:
                dead.close()
            pump._serve()
            pump._tell(CUTS)
            assert len(pump._cut) == 2 * CUTS
            relays.cancel_scope.cancel()
            scope = trio.CancelScope()
            pumps.start_soon(pumping, scope)
            if not goes_on:
                scope.cancel()
            with trio.CancelScope(shield=True), trio.fail_after(20):
                while len(told) < len(pairs):
                    await trio.lowlevel.checkpoint()
            scope.cancel()
    assert told == [Ended.EOF] * len(pairs)
    pump.close()


async def test_nothing_stays_registered(network: SocketNetwork) -> None:
    source, worker = await tcp_pair(network)
    client, sink = await tcp_pair(network)
    with closing(source, worker, client, sink):
        await worker.send(b"x")
        assert await network.relay(source, sink, Copy(1)) is Ended.DONE
        with trio.move_on_after(0):
            await network.relay(source, sink, Copy())
        with trio.move_on_after(0):
            await sink.wait_closed()
        assert network._pump._sources == network._pump._sinks == {}


def test_errors_in_words() -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    attempts = OSError("all attempts failed")
    attempts.__cause__ = ExceptionGroup("", [refused, TimeoutError(110, "x")])
    verification = ssl.SSLCertVerificationError(1, "certificate verify failed")
    verification.verify_message = "certificate has expired"
    broken = trio.BrokenResourceError()
    broken.__cause__ = verification
    assert describe(refused) == describe(attempts) == "Connection refused"
    assert describe(socket.gaierror(-2, "Name or service not known")) == "Name or service not known"
    assert describe(broken) == "certificate verify failed: certificate has expired"
    assert describe(ssl.SSLError(1, "[SSL] wrong version number")) == "[SSL] wrong version number"
    assert describe(ValueError()) == "ValueError"
