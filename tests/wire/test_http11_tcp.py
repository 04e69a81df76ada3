"""The server over real TCP, with httpx as the client: what users' clients will see."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import trio
from server_kit import echo, streaming

from dyn_relay.http11.server import Limits, Request, ServerConnection, serve
from dyn_relay.sockets import open_network

Handler = Callable[[ServerConnection, Request], Awaitable[None]]


@asynccontextmanager
async def client_of(handler: Handler, limits: Limits | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """An httpx client whose base URL is a server running `handler`."""
    draining = trio.Event()
    async with open_network() as network, trio.open_nursery() as nursery:
        listener = await network.listen("127.0.0.1", 0)
        nursery.start_soon(partial(serve, listener, handler, limits or Limits(), draining=draining))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.port}", timeout=30) as client:
            yield client
        draining.set()


async def test_bodies_of_all_sizes_and_framings() -> None:
    async def upload(body: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(body), 70_000):
            yield body[at : at + 70_000]

    async with client_of(echo) as client:
        for size in (0, 1, 65536, 300_000, 5_000_000):
            body = bytes(size)
            sized = await client.post("/generate", content=body)
            chunked = await client.post("/generate", content=upload(body))
            assert sized.content == chunked.content == b"POST /generate  " + body
        assert (await client.head("/health")).content == b""
        assert (await client.options("/health")).status_code == 200


async def test_j2_the_413_reaches_a_client_that_is_still_sending() -> None:
    async with client_of(echo, Limits(max_body=1000)) as client:
        response = await client.post("/generate", content=bytes(8_000_000))
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["message"]
        assert (await client.get("/next")).status_code == 200


async def test_a_stream_arrives_whole() -> None:
    parts = [b"data: %d\n\n" % number for number in range(100)]
    async with client_of(streaming(parts)) as client:
        for _ in range(2):
            async with client.stream("POST", "/generate") as response:
                assert b"".join([chunk async for chunk in response.aiter_bytes()]) == b"".join(parts)


async def test_c5_a_broken_stream_raises_after_what_was_written() -> None:
    error = b'data: {"error":{"message":"no worker is left"}}\n\n'
    got = bytearray()

    async def read(response: httpx.Response) -> None:
        async for chunk in response.aiter_bytes():
            got.extend(chunk)

    handler = streaming([b"data: 1\n\n", error], end=False)
    async with client_of(handler) as client, client.stream("POST", "/generate") as response:
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            await read(response)
    assert got == b"data: 1\n\n" + error
