"""What comes in goes to whoever is registered for its path; everything else is a 404 that names the path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from dyn_relay.http11.errors import error_body
from dyn_relay.http11.server import Handler, Request, ServerConnection
from dyn_relay.sidecar.paths import GENERATE, shown
from dyn_relay.sidecar.settings import GENERATE_ENV

#: The sidecar's own path.
OWN = "/sidecar"
_JSON = (b"content-type", b"application/json")


class Reservations:
    """The requests that are being served: a drain waits for them. One is held until its answer has been handed over."""

    def __init__(self) -> None:
        self.held = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """One request."""
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1


class Door:
    """An `http11.server.Handler`. `backends`: tables of paths, and who serves them; the first that has a path does.

    `describe` gives what `GET /sidecar` says.
    """

    def __init__(
        self,
        backends: Mapping[frozenset[str], Handler],
        reservations: Reservations,
        describe: Callable[[], Mapping[str, Any]],
        *,
        generates: bool = True,
    ) -> None:
        self._backends = backends
        self._reservations = reservations
        self._describe = describe
        self._generates = generates

    async def __call__(self, connection: ServerConnection, request: Request) -> None:
        """Serve one request."""
        if request.path == OWN and request.method in ("GET", "HEAD"):
            await connection.respond(200, [_JSON], msgspec.json.encode(self._describe()))
            return
        handler = next((one for table, one in self._backends.items() if shown(request.path, table)), None)
        if handler is None:
            await _absent(connection, f"{request.path}: this sidecar shows no such path")
        elif request.path.rstrip("/") == GENERATE and not self._generates:
            await _absent(connection, f"{request.path}: switched off here ({GENERATE_ENV}, --enable-generate)")
        else:
            with self._reservations.hold():
                await handler(connection, request)


async def _absent(connection: ServerConnection, message: str) -> None:
    await connection.respond(404, [_JSON], error_body(404, message))
