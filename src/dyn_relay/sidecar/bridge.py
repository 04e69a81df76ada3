"""The bridge: a request goes to an origin as it came, and the answer comes back as it comes. Knows nothing of engines.

Method, path, query, end-to-end headers and body go there; status, end-to-end headers and the body come back, frame by
frame. The client that does not read stops the reading of the origin; the one that leaves ends the request there. What
the origin breaks off is broken off here. Of an answer nothing is held but what one read gives, of a request its body.

Each request has a connection of its own. A kept one may have gone stale, and a request that ends with it may have been
served; a new one on the same machine costs less than that doubt.
"""

from __future__ import annotations

import structlog
import trio

from dyn_relay.http11.client import BadResponse, Origin, Pool, ResponseReader, Upstream, request_parts
from dyn_relay.http11.errors import error_body
from dyn_relay.http11.headers import end_to_end
from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.net import ConnectFailed, ConnectionBroken, Ended, Network
from dyn_relay.relay.waiting import ClientGone, unless_gone

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("bridge")

#: Made anew for the next hop, or answered here.
_OURS = frozenset({b"host", b"content-length", b"expect"})


class Bridge:
    """To one origin. An `http11.server.Handler`."""

    def __init__(self, network: Network, pool: Pool, origin: Origin) -> None:
        self._network = network
        self._pool = pool
        self._origin = origin

    async def __call__(self, connection: ServerConnection, request: Request) -> None:
        """Serve the request. An origin that cannot be reached, or does not answer, ends the connection unanswered:

        that is what a dead one does.
        """
        upstream = await self._dial(connection)
        if upstream is None:
            return
        try:
            await self._converse(connection, request, upstream)
        except BadResponse as exc:
            log.warning("an answer makes no sense", path=request.path, error=str(exc))
            if not connection.started:
                body = error_body(502, f"the engine's answer makes no sense: {exc}")
                await connection.respond(502, [(b"content-type", b"application/json")], body)
        finally:
            upstream.discard()
            if not connection.complete:
                connection.break_off()

    async def _dial(self, connection: ServerConnection) -> Upstream | None:
        dialled: list[Upstream] = []

        async def acquire() -> None:
            dialled.append(await self._pool.acquire(self._origin, fresh=True))

        try:
            await unless_gone(connection.connection, acquire)
        except (ConnectFailed, ClientGone) as exc:
            for upstream in dialled:
                upstream.discard()
            if isinstance(exc, ConnectFailed):
                log.warning("the engine cannot be reached", error=str(exc))
            connection.break_off()
            return None
        return dialled[0]

    async def _converse(self, connection: ServerConnection, request: Request, upstream: Upstream) -> None:
        """Raises `BadResponse`, `ConnectionBroken`."""
        target = f"{request.path}?{request.query}" if b"?" in request.target else request.path
        headers = [field for field in end_to_end(request.headers) if field[0] not in _OURS]
        parts = request_parts(self._origin, request.method, target, headers, request.body)
        answer = _Answer(connection, no_body=request.method == "HEAD")
        failure: list[BadResponse] = []
        ended: Ended | None = None

        async def give() -> None:
            try:
                for part in parts:
                    await upstream.connection.send(part)
            except ConnectionBroken:
                pass  # it may have answered before it closed: reading tells

        async with trio.open_nursery() as nursery:
            nursery.start_soon(give)
            try:
                ended = await self._network.relay(upstream.connection, connection.connection, answer)
            except BadResponse as exc:  # carried out of the nursery as it is
                failure.append(exc)
            nursery.cancel_scope.cancel()
        if failure:
            raise failure[0]
        if ended is Ended.EOF:
            await connection.connection.send(answer.eof())


class _Answer:
    """The bytes of an answer, from the framing of the origin to that of the client. A `net.Transform`."""

    def __init__(self, connection: ServerConnection, *, no_body: bool) -> None:
        self.done = False
        self._connection = connection
        self._response = ResponseReader(no_body=no_body)
        self._begun = False

    def feed(self, data: bytes) -> bytes:
        """Raises `BadResponse`."""
        body = self._response.feed(data)
        return self._framed(body) if self._response.head_complete else b""

    def eof(self) -> bytes:
        """The origin has closed: the rest, if that is the end of the answer."""
        return self._framed(b"") if not self.done and self._response.eof() else b""

    def _framed(self, body: bytes) -> bytes:
        response, head = self._response, b""
        if not self._begun:
            self._begun = True
            headers = end_to_end(response.headers)
            head = self._connection.head(response.status, headers, delimited=response.close_delimited)
        self.done = response.complete
        return self._connection.frame(body, head, last=self.done)
