"""A small HTTP client over the `Network` seam, parsing with h11: a peer that shares no code with proxy or worker."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import h11

from dyn_relay.net import Connection, ConnectionBroken, Network

#: Called with each part of a body as it is read.
Heard = Callable[[bytes], Awaitable[None]]


@dataclass(slots=True)
class Response:
    """An answer, as far as it came."""

    status: int = 0
    reason: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    #: The framing was complete: a truncated answer is not.
    complete: bool = False
    #: How it broke off: "" or "eof", "reset", or the protocol error.
    broken: str = ""
    #: The bytes of the wire.
    wire: bytes = b""
    #: A body part a read, as h11 gave them.
    parts: list[bytes] = field(default_factory=list)

    def header(self, name: str) -> str | None:
        """The first header of this name."""
        key = name.lower().encode()
        return next((value.decode() for found, value in self.headers if found == key), None)

    def json(self) -> Any:
        """The body, parsed. Raises `ValueError`."""
        return json.loads(self.body)

    def events(self) -> list[bytes]:
        """The data of the whole server-sent events in the body, `[DONE]` included, comments left out."""
        blocks = self.body.split(b"\n\n")[:-1]
        lines = [[line[6:] for line in block.split(b"\n") if line.startswith(b"data: ")] for block in blocks]
        return [b"\n".join(found) for found in lines if found]

    def values(self) -> list[Any]:
        """The JSON values of the events, without `[DONE]`. Raises `ValueError`."""
        return [json.loads(data) for data in self.events() if data != b"[DONE]"]


async def fetch(
    network: Network,
    url: str,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
    heard: Heard | None = None,
) -> Response:
    """One request on a connection of its own; `body` is sent as JSON unless it is bytes. Never raises for a cut.

    Raises `dyn_relay.net.ConnectFailed`.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    connection = await network.connect(host, int(port))
    try:
        fields = {"connection": "close"} | (headers or {})
        return await ask(connection, path, body, method=method, headers=fields, heard=heard)
    finally:
        connection.close()


async def ask(
    connection: Connection,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
    heard: Heard | None = None,
) -> Response:
    """One request on an open connection, which may be used again if the answer is complete and says so."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    verb = method or ("GET" if body is None else "POST")
    fields = {"host": "worker", "content-type": "application/json", "content-length": str(len(data))}
    parser = h11.Connection(h11.CLIENT)
    request = h11.Request(method=verb, target=path, headers=list((fields | (headers or {})).items()))
    out = (parser.send(request) or b"") + (parser.send(h11.Data(data=data)) or b"")
    out += parser.send(h11.EndOfMessage()) or b""
    response = Response()
    reads: list[bytes] = []
    try:
        await connection.send(out)
        await _read(connection, parser, response, reads, heard)
    except ConnectionBroken:
        response.broken = "reset"
    except h11.RemoteProtocolError as exc:
        response.broken = response.broken or str(exc)
    finally:
        response.wire, response.body = b"".join(reads), b"".join(response.parts)
    return response


async def _read(
    connection: Connection, parser: h11.Connection, response: Response, reads: list[bytes], heard: Heard | None
) -> None:
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            data = await connection.receive()
            reads.append(data)
            if not data:
                response.broken = "eof"
            parser.receive_data(data)
        elif isinstance(event, h11.Response):
            response.status, response.reason = event.status_code, bytes(event.reason)
            response.headers = list(event.headers)
        elif isinstance(event, h11.Data):
            response.parts.append(bytes(event.data))
            if heard is not None:
                await heard(response.parts[-1])
        elif isinstance(event, h11.EndOfMessage):
            response.complete, response.broken = True, ""
            return
        elif isinstance(event, h11.ConnectionClosed):
            return
