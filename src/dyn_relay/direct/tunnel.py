"""What gRPC cannot carry, sent to the engine's HTTP port instead: bytes as they come, both ways."""

from __future__ import annotations

import trio

from dyn_relay.http11.client import BadResponse, Origin, Pool, request_parts
from dyn_relay.http11.response import ResponseReader
from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.net import ConnectionBroken, Ended, relay_loop


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

        Raises `ConnectFailed`, `BadResponse`.
        """
        target = f"{request.path}?{request.query}" if request.query else request.path
        upstream = await self._pool.acquire(origin, fresh=True)
        parts = request_parts(origin, request.method, target, request.headers, request.body)
        verbatim = _Verbatim(no_body=request.method == "HEAD")
        failure: list[BadResponse] = []
        ended = Ended.SOURCE_BROKEN

        async def give() -> None:
            try:
                for part in parts:
                    await upstream.connection.send(part)
            except ConnectionBroken:
                pass  # it may have answered before it closed: reading tells

        try:
            served.started, served.reusable = True, False  # the head is the server's own
            async with trio.open_nursery() as nursery:
                nursery.start_soon(give)
                try:
                    ended = await relay_loop(upstream.connection, served.connection, verbatim)
                except BadResponse as exc:  # carried out of the nursery as it is
                    failure.append(exc)
                nursery.cancel_scope.cancel()
            if failure:
                raise failure[0]
            served.complete = ended is Ended.DONE or (ended is Ended.EOF and verbatim.reader.eof())
            if ended is Ended.SOURCE_BROKEN:
                served.connection.abort()
            upstream.release(verbatim.reader)
        finally:
            upstream.discard()
