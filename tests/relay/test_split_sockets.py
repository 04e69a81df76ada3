"""A split over real sockets: the client's connection is watched, written to by all items, and read from by none."""

from __future__ import annotations

import socket

import pytest
import trio

from dyn_relay.sockets import open_network
from dyn_testkit.client import begin
from dyn_testkit.faults import KILL_WORKER, Fault, FaultPlan, at_token, first
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import open_relay, until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE
from tests.relay.several import judged, several


@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
async def test_a_worker_dies_under_half_of_the_items(stream):
    plan = FaultPlan.of(Fault(at_token(20), KILL_WORKER, first(1)))
    options = WorkerOptions(tick=0.001)
    async with open_network() as network, open_fleet(network) as fleet:
        workers = await fleet(2, options=options, faults=[plan, None])
        urls = [worker.url for worker in workers]
        async with open_relay(network, workers=urls, split_batches=True, log_level="error") as relay:
            await relay.ready()
            for n in (1, 2):
                body = several(4, n, stream=stream, tokens=40)
                assert judged(await relay.ask(body), body, ORACLE) == []
            plan.verify()
            await relay.quiet()
            assert not any(relay.gauges.values())


async def test_a_client_reads_late_and_another_leaves():
    """The first: all buffers before it fill, then it gets everything, whole. The second: its items end."""
    options = WorkerOptions(dialect="incremental")
    async with open_network() as network, open_fleet(network) as fleet:
        workers = await fleet(2, options=options)
        urls = [worker.url for worker in workers]
        async with open_relay(network, workers=urls, split_batches=True, log_level="error") as relay:
            await relay.ready()
            body = several(4, rid="job", tokens=6000)
            host, _, port = relay.url.removeprefix("http://").partition(":")
            connection = await network.connect(host, int(port))
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            ongoing = await begin(connection, "/generate", body)
            with trio.fail_after(60):
                live = relay.app.live
                await until(lambda: not len(live) or any(one._downstream.client.pending for one in live))
                assert judged(await ongoing.rest(), body, ORACLE, "incremental") == []
            connection.close()
            connection = await network.connect(host, int(port))
            ongoing = await begin(connection, "/generate", several(4, rid="job", tokens=100_000))
            with trio.fail_after(60):
                await ongoing.more()
                connection.close()
                await relay.quiet()
                await until(lambda: not any(worker.live for worker in workers))
            assert [row["outcome"] for row in relay.rows] == ["done"] * 4 + ["client_gone"] * 4
