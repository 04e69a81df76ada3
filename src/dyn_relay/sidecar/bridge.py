"""The bridge: the engine's own answer to a request, as `http11.forward` brings it, or none at all.

The client that leaves ends the request at the engine. What the engine breaks off is broken off here. Each request has
a connection of its own: a kept one may have gone stale, and a request that ends with it may have been served; a new one
on the same machine costs less than that doubt.
"""

from __future__ import annotations

import structlog

from dyn_relay.http11.client import BadResponse, Origin, Pool, Upstream
from dyn_relay.http11.errors import error_body
from dyn_relay.http11.forward import forward
from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.net import ConnectFailed, Network
from dyn_relay.relay.waiting import ClientGone, unless_gone

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("bridge")


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
            await forward(self._network, connection, request, upstream)
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
