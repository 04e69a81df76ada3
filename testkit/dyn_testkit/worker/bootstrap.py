"""The bootstrap server of a prefill worker: liveness, ranks, and what a decode worker's leg comes for.

`/health` and `/route` are SGLang 0.5.23's (disaggregation/common/conn.py). How the KV travels is the mock's own: the
decode leg posts its room to `/mock/take` and keeps the connection; the prefill leg answers on it once it has something
to give; the decode leg posts `/mock/took` when it has all of it. A leg that ends before posts `/mock/drop`, and closes
the connection; a process that dies only closes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs

import trio

from dyn_relay.net import Connection, ConnectionBroken, Listener
from dyn_testkit.worker.wire import TEXT, BadRequest, Reply, Request, json_reply, keeps_alive, read_request, reply_bytes

TAKE, TOOK, DROP = "/mock/take", "/mock/took", "/mock/drop"
#: What `/route` wants to know of; -1 for all of them asks for the whole server.
RANKS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


@dataclass(slots=True)
class Visitor:
    """A decode worker's leg, as the prefill worker knows it."""

    connection: Connection
    #: It has all that it came for.
    served: bool = False
    #: It has said that it wants it no more.
    dropped: bool = False
    _gone: trio.Event = field(default_factory=trio.Event)

    async def give(self, data: bytes) -> None:
        """Send it some bytes; it may have left."""
        try:
            await self.connection.send(data)
        except ConnectionBroken:
            self._gone.set()

    def leave(self, *, served: bool) -> None:
        """It goes, with what it came for or without."""
        self.served = self.served or served
        self._gone.set()

    async def gone(self) -> None:
        """Return once it has left."""
        await self._gone.wait()


@dataclass(slots=True)
class BootstrapServer:
    """Serves the bootstrap port of one process."""

    dp_size: int
    #: The worker's host, and the port of its API.
    address: Callable[[], tuple[str, int]]
    wall: Callable[[], float]
    #: Who waits, by (rank, room).
    visitors: dict[tuple[int, int], Visitor] = field(default_factory=dict)
    _changed: trio.Event = field(default_factory=trio.Event)

    async def visitor(self, rank: int, room: int) -> Visitor:
        """Return whoever has come, or comes, for this room."""
        while (rank, room) not in self.visitors:
            await self._changed.wait()
        return self.visitors[rank, room]

    async def accept(self, listener: Listener, connections: dict[Connection, None]) -> None:
        """Serve all that dial until the listener is closed; `connections` has those that are open."""
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    connection = await listener.accept()
                except trio.ClosedResourceError:
                    return
                connections[connection] = None
                nursery.start_soon(self._serve, connection, connections)

    async def _serve(self, connection: Connection, connections: dict[Connection, None]) -> None:
        key, visitor = None, Visitor(connection)
        leftover = b""
        try:
            while (got := await read_request(connection, leftover)) is not None:
                request, leftover = got
                if request.path == TAKE:
                    body = json.loads(request.body)
                    key = (body["rank"], body["room"])
                    self.visitors[key] = visitor
                    self._changed.set()
                    self._changed = trio.Event()
                elif request.path == TOOK:
                    visitor.leave(served=True)
                elif request.path == DROP:
                    visitor.dropped = True
                    visitor.leave(served=False)
                else:
                    keep = keeps_alive(request)
                    await connection.send(reply_bytes(self._answer(request), self.wall(), keep))
                    if not keep:
                        return
        except (BadRequest, ConnectionBroken):
            pass
        finally:
            visitor.leave(served=False)
            if key is not None and self.visitors.get(key) is visitor:
                del self.visitors[key]
            connections.pop(connection, None)
            connection.close()

    def _answer(self, request: Request) -> Reply:
        if (request.method, request.path) == ("GET", "/health"):
            return Reply(200, b"OK", TEXT)
        if (request.method, request.path) == ("GET", "/route"):
            return self._route(request)
        return Reply(404, b"404: Not Found", TEXT)

    def _route(self, request: Request) -> Reply:
        query = parse_qs(request.target.partition("?")[2])
        if not all(name in query for name in RANKS):
            return Reply(400, b"Missing inputs for bootstrap server.", TEXT)
        dp, *others = (int(query[name][0]) for name in RANKS)
        host, port = self.address()
        if (dp, *others) == (-1, -1, -1, -1):
            return json_reply(
                {
                    "attn_tp_size": 1,
                    "attn_cp_size": 1,
                    "dp_size": self.dp_size,
                    "pp_size": 1,
                    "page_size": 1,
                    "kv_cache_dtype": "auto",
                    "follow_bootstrap_room": True,
                    "prefill_http_port": port,
                    "decode_allocation_policy": "early",
                }
            )
        if not 0 <= dp < self.dp_size or others != [0, 0, 0]:
            return Reply(404, b"Bootstrap info not found", TEXT)
        return json_reply({"rank_ip": host, "rank_port": port})
