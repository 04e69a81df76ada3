"""Connections of the mock worker: reuse, framing, clients that leave or are slow, real sockets."""

from __future__ import annotations

import httpx
import pytest
import trio
import trio.testing
from mock_worker_kit import ORACLE, body, options

from dyn_relay.net import Connection
from dyn_relay.sockets import open_network
from dyn_testkit.client import ask, fetch
from dyn_testkit.oracle import differences
from dyn_testkit.simnet import Fragmentation, Link, SimNetwork
from dyn_testkit.worker import MockWorker


async def open_to(network: SimNetwork, worker: MockWorker) -> Connection:
    return await network.connect(worker.host, worker.port)


async def test_keep_alive_and_idle_close(autojump_clock: trio.testing.MockClock) -> None:
    """Connections are reused; idle ones are closed after 5 s, but not before the first request."""
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        connection = await open_to(network, worker)
        await trio.sleep(60)
        for _ in range(2):
            answer = await ask(connection, "/generate", body(2, stream=True))
            assert answer.complete
            assert answer.header("connection") is None
            await trio.sleep(4.9)
        assert worker.dialled == 1
        before = trio.current_time()
        await connection.wait_closed()
        assert trio.current_time() - before == pytest.approx(0.1)


async def test_pipelining_chunked_bodies_and_continue() -> None:
    network = SimNetwork(5, Link(fragmentation=Fragmentation(3)))
    one = b"GET /ping HTTP/1.1\r\nHost: w\r\n\r\n"
    two = (
        b"POST /abort_request HTTP/1.1\r\nHost: w\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n"
        b"Connection: close\r\n\r\n"
    )
    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        connection = await open_to(network, worker)
        await connection.send(one + two)
        got = b""
        while b"100 Continue" not in got:
            got += await connection.receive()
        await connection.send(b'b\r\n{"rid":"xy"\r\n1\r\n}\r\n0\r\n\r\n')
        while data := await connection.receive():
            got += data
        assert got.count(b"HTTP/1.1 200 OK") == 2
        assert worker.aborts == [{"rid": "xy"}]
        assert [recorded.path for recorded in worker.requests] == ["/ping", "/abort_request"]


async def test_what_is_not_http_gets_400() -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        connection = await open_to(network, worker)
        await connection.send(b"\x00\x01 nonsense\r\n\r\n")
        got = await connection.receive()
        assert got.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_noticed(autojump_clock: trio.testing.MockClock, stream: bool) -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        with trio.move_on_after(3.5):
            await fetch(network, worker.url, "/generate", body(500, stream=stream))
        await worker.reaches(disconnects=1)
        assert worker.live == 0
        assert trio.current_time() == 3.5


async def test_a_slow_reader_holds_the_worker_back() -> None:
    network = SimNetwork(link=Link(buffer=2000))
    async with MockWorker.serve(network, "worker", 1, options(tick=0, dialect="incremental")) as worker:
        connection = await open_to(network, worker)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, connection, "/generate", body(900, stream=True))
            await worker.reaches(requests=1)
            nursery.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        held = len(next(iter(worker.scheduler.live.values())).ids)
        assert held < 30
        await connection.receive()
        await trio.testing.wait_all_tasks_blocked()
        assert held < len(next(iter(worker.scheduler.live.values())).ids) < 60


async def test_real_sockets_and_an_independent_client() -> None:
    """httpx reads answers and streams, and raises when a worker is killed in the middle of one."""
    async with (
        open_network() as network,
        MockWorker.serve(network, options=options(tick=0)) as worker,
        httpx.AsyncClient(base_url=worker.url, trust_env=False) as client,
    ):
        answer = await client.put("/generate", json=body(stream=False))
        assert not differences(answer.json(), ORACLE.answer(body()))
        async with client.stream("POST", "/generate", json=body(stream=True)) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) == 6

        async def killed_half_way() -> None:
            async with client.stream("POST", "/generate", json=body(1900, stream=True)) as stream:
                async for _ in stream.aiter_raw():
                    worker.kill()

        with pytest.raises(httpx.RemoteProtocolError):
            await killed_half_way()
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        port = worker.port
        await worker.restart()
        assert worker.port == port
        assert (await client.get("/health")).status_code == 200
