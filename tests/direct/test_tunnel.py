"""What goes over HTTP instead of gRPC: an engine that answers before it has read all, and one that does not answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from dyn_relay.direct.tunnel import Tunnel
from dyn_relay.http11.client import Origin, Pool
from dyn_relay.http11.server import Limits, Request, ServerConnection, serve
from dyn_testkit.background import background
from dyn_testkit.client import Response, fetch
from dyn_testkit.simnet import SimNetwork

ENGINE = Origin.parse("http://engine:1")


async def through(
    said: bytes, body: bytes, *, then: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint
) -> Response:
    """What a client gets of an engine that says this, with no more than the beginning of the request read.

    `then`: what follows in whoever has called the tunnel.
    """
    network = SimNetwork(1)
    tunnel = Tunnel(network, Pool(network), "engine")
    heard = await network.listen("engine", 1)
    shown = await network.listen("side", 1)

    async def engine() -> None:
        connection = await heard.accept()
        await connection.receive(100)
        await connection.send(said)
        await trio.sleep(1)
        connection.close()

    async def pass_on(served: ServerConnection, request: Request) -> None:
        await tunnel.take(served, request, ENGINE)
        await then()

    async with background() as nursery:
        nursery.start_soon(engine)
        nursery.start_soon(lambda: serve(shown, pass_on, Limits(), draining=trio.Event()))
        with trio.fail_after(60):
            return await fetch(network, "http://side:1", "/generate", body)


@pytest.mark.parametrize("size", [10, 10_000_000])
async def test_an_answer_that_comes_before_the_body_was_taken_is_given(autojump_clock, size):
    got = await through(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno", b"x" * size)
    assert (got.status, got.body, got.complete) == (413, b"no", True)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 O",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nno",
        b"?\r\n\r\n",
    ],
    ids=["nothing", "an interim head", "half a head", "half a body", "no HTTP"],
)
async def test_what_is_no_answer_is_a_cut(autojump_clock, said):
    """Never an answer made here; nor does the client wait for whoever called the tunnel."""
    got = await through(said, b"x", then=trio.sleep_forever)
    assert (got.status in (0, 200), got.complete, got.broken) == (True, False, "eof")
