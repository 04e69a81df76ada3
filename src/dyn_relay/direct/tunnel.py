"""What gRPC cannot carry, sent to the engine's HTTP port instead."""

from __future__ import annotations

from dyn_relay.http11.client import Origin, Pool
from dyn_relay.http11.forward import forward
from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.net import Network


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

    async def take(self, served: ServerConnection, request: Request, origin: Origin) -> None:
        """Answer `request` with what the server at its end says; an answer that breaks off does so here, too.

        Raises `ConnectFailed`, `BadResponse`, `ConnectionBroken`.
        """
        upstream = await self._pool.acquire(origin, fresh=True)
        try:
            await forward(self._network, served, request, upstream)
        finally:
            upstream.discard()
            if served.started and not served.complete:
                served.break_off()
