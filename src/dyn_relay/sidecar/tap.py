"""What the engine is asked, written down: for campaigns, and for whoever must see what a continuation asked for."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dyn_relay.http11.server import Handler, Request, ServerConnection
from dyn_relay.observe.trace import TraceFile
from dyn_relay.sidecar.paths import GENERATE

#: Paths.
WRITTEN = (GENERATE, "/abort_request")


class Tap:
    """An `http11.server.Handler` before another one: a row for each request of `WRITTEN`, with the time by `wall`.

    A body that is no JSON is written as text.
    """

    def __init__(self, handler: Handler, rows: TraceFile, wall: Callable[[], float]) -> None:
        self._handler = handler
        self._rows = rows
        self._wall = wall

    async def __call__(self, connection: ServerConnection, request: Request) -> None:
        """Write it down, and serve it."""
        path = request.path.rstrip("/")
        if path in WRITTEN:
            self._rows.write({"time": self._wall(), "path": path, "body": _body(request.body)})
        await self._handler(connection, request)


def _body(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return data.decode(errors="replace")
