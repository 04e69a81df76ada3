"""What gRPC cannot carry, sent to the engine's HTTP port instead."""

from __future__ import annotations

import structlog
import trio

from dyn_relay.http11.client import BadResponse, Origin, Pool, fetch
from dyn_relay.http11.forward import forward
from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.net import ConnectFailed, ConnectionBroken, Network

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("direct")

#: Seconds that an order may take.
ORDER = 5.0


class Tunnel:
    """To the HTTP server of an engine: the one `at` that URL, or the one at that host, on the port that it tells."""

    def __init__(self, network: Network, pool: Pool, at: Origin | str) -> None:
        self._network = network
        self._pool = pool
        self._at = at

    def end(self, port: int | None) -> Origin | None:
        """Where it leads, given what the engine tells; None: nobody knows."""
        if isinstance(self._at, Origin):
            return self._at
        return None if port is None else Origin(self._at, port)

    async def tell(self, order: Request, port: int | None) -> None:
        """Hand on an order of which the answer does not matter; where nobody hears it there is nobody to obey."""
        origin = self.end(port)
        if origin is None:
            return
        try:
            await fetch(
                self._pool, origin, order.method, order.path, headers=order.headers, body=order.body, timeout=ORDER
            )
        except (ConnectFailed, ConnectionBroken, BadResponse, trio.TooSlowError) as exc:
            log.debug("not told over HTTP", origin=str(origin), path=order.path, error=str(exc))

    async def take(self, served: ServerConnection, request: Request, origin: Origin) -> None:
        """Answer `request` with what the server at its end says; one that breaks off, or never comes, is cut here, too.

        Raises `ConnectFailed`, `BadResponse`, `ConnectionBroken`.
        """
        upstream = await self._pool.acquire(origin, fresh=True)
        try:
            await forward(self._network, served, request, upstream)
        finally:
            upstream.discard()
            if not served.complete:
                served.break_off()
