"""A small HTTP client over the `Network` seam, parsing with h11: a peer that shares no code with proxy or worker."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import h11

from dyn_relay.net import Connection, ConnectionBroken, Network


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
) -> Response:
    """One request on a connection of its own; `body` is sent as JSON unless it is bytes. Never raises for a cut.

    Raises `dyn_relay.net.ConnectFailed`.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    connection = await network.connect(host, int(port))
    try:
        return await ask(connection, path, body, method=method, headers={"connection": "close"} | (headers or {}))
    finally:
        connection.close()


async def ask(
    connection: Connection,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """One request on an open connection, which may be used again if the answer is complete and says so."""
    return await (await begin(connection, path, body, method=method, headers=headers)).rest()


async def begin(
    connection: Connection,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
) -> Ongoing:
    """Send one request on an open connection; its answer is for the caller to read, part by part."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    verb = method or ("GET" if body is None else "POST")
    fields = {"host": "worker", "content-type": "application/json", "content-length": str(len(data))}
    parser = h11.Connection(h11.CLIENT)
    request = h11.Request(method=verb, target=path, headers=list((fields | (headers or {})).items()))
    out = (parser.send(request) or b"") + (parser.send(h11.Data(data=data)) or b"")
    out += parser.send(h11.EndOfMessage()) or b""
    ongoing = Ongoing(connection, parser, Response())
    try:
        await connection.send(out)
    except ConnectionBroken:
        ongoing.response.broken = "reset"
    return ongoing


@dataclass(slots=True)
class Ongoing:
    """A request that is out, and its answer as far as it has come."""

    connection: Connection
    parser: h11.Connection
    #: `wire` and `body` are put together by `rest`, also when that is cancelled.
    response: Response
    _reads: list[bytes] = field(default_factory=list)

    async def more(self) -> bool:
        """Read another part of the body into `response.parts`; False if there is none. Never raises for a cut."""
        response = self.response
        if response.broken or response.complete:
            return False
        try:
            return await self._part()
        except ConnectionBroken:
            response.broken = "reset"
        except h11.RemoteProtocolError as exc:
            response.broken = response.broken or str(exc)
        return False

    async def rest(self) -> Response:
        """Read the answer to its end. Never raises for a cut."""
        try:
            while await self.more():
                pass
        finally:
            self.response.wire, self.response.body = b"".join(self._reads), b"".join(self.response.parts)
        return self.response

    async def _part(self) -> bool:
        while True:
            event = self.parser.next_event()
            if event is h11.NEED_DATA:
                data = await self.connection.receive()
                self._reads.append(data)
                if not data:
                    self.response.broken = "eof"
                self.parser.receive_data(data)
            elif isinstance(event, h11.Response):
                self.response.status, self.response.reason = event.status_code, bytes(event.reason)
                self.response.headers = list(event.headers)
            elif isinstance(event, h11.Data):
                self.response.parts.append(bytes(event.data))
                return True
            elif isinstance(event, h11.EndOfMessage):
                self.response.complete, self.response.broken = True, ""
                return False
            elif isinstance(event, h11.ConnectionClosed):
                return False
