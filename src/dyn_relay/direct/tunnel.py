"""What gRPC cannot carry, sent to the engine's HTTP port instead: bytes as they come, both ways."""

from __future__ import annotations

from dyn_relay.http11.client import Origin, Pool, request_parts
from dyn_relay.http11.response import ResponseReader
from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.net import Ended, relay_loop


class _Verbatim:
    """Passes an answer on as it is, and knows where it ends."""

    def __init__(self, *, no_body: bool) -> None:
        self.reader = ResponseReader(no_body=no_body)
        self.done = False

    def feed(self, data: bytes) -> bytes:
        self.reader.feed(data)
        self.done = self.reader.complete
        return data


class Tunnel:
    """To the HTTP server of an engine: the one `at` that URL, or the one at that host, on the port that it tells."""

    def __init__(self, pool: Pool, at: Origin | str) -> None:
        self._pool = pool
        self._at = at

    def end(self, port: int | None) -> Origin | None:
        """Where it leads, given what the engine tells; None: nobody knows."""
        if isinstance(self._at, Origin):
            return self._at
        return None if port is None else Origin(self._at, port)

    async def take(self, served: ServerConnection, request: Request, origin: Origin) -> None:
        """Answer `request` with what the server at its end says; an answer that breaks off does so here, too.

        Raises `ConnectFailed`, `ConnectionBroken`, `BadResponse`.
        """
        target = f"{request.path}?{request.query}" if request.query else request.path
        upstream = await self._pool.acquire(origin, fresh=True)
        try:
            for part in request_parts(origin, request.method, target, request.headers, request.body):
                await upstream.connection.send(part)
            served.started, served.reusable = True, False  # the head is the server's own
            verbatim = _Verbatim(no_body=request.method == "HEAD")
            ended = await relay_loop(upstream.connection, served.connection, verbatim)
            served.complete = ended is Ended.DONE or (ended is Ended.EOF and verbatim.reader.eof())
            if ended is Ended.SOURCE_BROKEN:
                served.connection.abort()
            upstream.release(verbatim.reader)
        finally:
            upstream.discard()
