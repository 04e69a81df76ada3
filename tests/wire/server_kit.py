"""A server on the in-memory network, handlers for it, and its answers as h11 reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import h11
import trio
from wire_kit import MemoryConnection, MemoryNetwork, read_all

from dyn_relay.http11.server import Handler, Limits, Request, ServerConnection, serve

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


async def echo(served: ServerConnection, request: Request) -> None:
    """Say what was asked."""
    text = f"{request.method} {request.path} {request.query} ".encode() + request.body
    await served.respond(200, [(b"content-type", b"text/plain")], text)


Streaming = Callable[[ServerConnection, Request], Awaitable[None]]


def streaming(parts: list[bytes], headers: list[tuple[bytes, bytes]] | None = None, end: bool = True) -> Streaming:
    """A handler that streams `parts`, and ends the answer or not."""

    async def handler(served: ServerConnection, request: Request) -> None:
        await served.connection.send(served.head(200, headers or []))
        for part in parts:
            await served.connection.send(served.frame(part))
        if end:
            await served.connection.send(served.last())

    return handler


def answers(wire: bytes, methods: list[str], eof: bool = True) -> list[tuple[int, dict[bytes, bytes], bytes]]:
    """What h11 reads as a client: status, headers and body of each answer, one a method."""
    peer = h11.Connection(h11.CLIENT)
    peer.receive_data(wire)
    if eof:
        peer.receive_data(b"")
    found = []
    for number, method in enumerate(methods):
        if number:
            peer.start_next_cycle()
        peer.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        peer.send(h11.EndOfMessage())
        while not isinstance(event := peer.next_event(), h11.Response):
            assert isinstance(event, h11.InformationalResponse), event
        body = b""
        while not isinstance(data := peer.next_event(), h11.EndOfMessage):
            assert isinstance(data, h11.Data), data
            body += data.data
        found.append((event.status_code, dict(event.headers), body))
    return found


def refused(wire: bytes, status: int) -> str:
    """Check a refusal in SGLang's shape, the connection closed after it; give its message."""
    ((got, headers, body),) = answers(wire, ["POST"])
    assert got == status
    assert headers[b"connection"] == b"close"
    assert headers[b"content-type"] == b"application/json"
    error = json.loads(body)
    assert list(error) == ["object", "message", "type", "param", "code"]
    assert (error["object"], error["param"], error["code"]) == ("error", None, status)
    return str(error["message"])


class Serving:
    """A running server on a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, port: int) -> None:
        self.network = network
        self.port = port
        self.draining = trio.Event()
        self.returned = trio.Event()
        self.errors: list[Exception] = []

    async def connect(self) -> MemoryConnection:
        return await self.network.connect("server", self.port)

    async def talk(self, wire: bytes) -> bytes:
        """Send on a connection of its own; give all that comes back until the server closes."""
        client = await self.connect()
        await client.send(wire)
        answer = await read_all(client)
        client.close()
        return answer


@asynccontextmanager
async def serving(handler: Handler, limits: Limits | None = None, fragment: int = 1 << 30) -> AsyncIterator[Serving]:
    """Serve with `handler`; at the end of the block the server drains and must return."""
    network = MemoryNetwork()
    network.on_connect = lambda client, server: setattr(server, "fragment", fragment)
    listener = await network.listen("server", 0)
    running = Serving(network, listener.port)

    async def run() -> None:
        start = partial(serve, draining=running.draining, on_error=running.errors.append)
        await start(listener, handler, limits or Limits())
        running.returned.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        yield running
        running.draining.set()
        await running.returned.wait()
