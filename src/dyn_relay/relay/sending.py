"""How a request gets to its worker, and how the connection is left."""

from __future__ import annotations

import math

import trio

from dyn_relay.formats.base import CannotComplete, Outbound
from dyn_relay.http11.client import Origin, Upstream, request_parts
from dyn_relay.http11.errors import BadResponse, EventTooLarge
from dyn_relay.http11.headers import Headers
from dyn_relay.net import ConnectionBroken, Ended, Sink
from dyn_relay.relay.context import Context
from dyn_relay.relay.reader import AnswerReader
from dyn_relay.relay.waiting import unless_gone

#: Seconds to wait for the end of the framing after the engine's last word, so that the connection can be reused.
TAIL_PATIENCE = 0.1


async def dial(context: Context, origin: Origin, client: Sink, *, reuse: bool) -> Upstream:
    """A connection; an idle one only if `reuse`. Raises `ConnectFailed`, `ClientGone`."""
    pool = context.pool
    idle = pool.take(origin) if reuse else None
    if idle is not None:
        return idle
    dialled: list[Upstream] = []

    async def acquire() -> None:
        dialled.append(await pool.acquire(origin, fresh=True))

    try:
        await unless_gone(client, acquire)
    except BaseException:
        for upstream in dialled:
            upstream.discard()
        raise
    return dialled[0]


async def send(
    context: Context,
    upstream: Upstream,
    origin: Origin,
    outbound: Outbound,
    headers: Headers,
    reader: AnswerReader,
    client: Sink,
) -> Ended | None:
    """Hand the request over: None once it is out. What comes meanwhile is read; if that ends it all, how.

    Raises `trio.TooSlowError`, `BadResponse`, `EventTooLarge`, `CannotComplete`.
    """
    connection = upstream.connection
    own: Headers = [(b"content-type", outbound.content_type)] if outbound.content_type else []
    parts = request_parts(origin, outbound.method, outbound.path, [*own, *headers], outbound.body)
    if len(parts) == 1 and connection.offer(parts[0]):
        if not connection.pending:
            return None  # as almost always: the kernel has it
        parts = [b""]

    async def give() -> None:
        try:
            for part in parts:
                await connection.send(part)
        except ConnectionBroken:
            return  # it may have answered before it closed (413, say): reading will tell
        reading.cancel()

    ended: Ended | None = None
    errors: list[Exception] = []
    with trio.fail_after(context.config.stall_timeout_secs or math.inf):
        async with trio.open_nursery() as nursery:
            reading = trio.CancelScope()
            nursery.start_soon(give)
            try:
                with reading:
                    ended = await context.network.relay(connection, client, reader)
            except (BadResponse, EventTooLarge, CannotComplete) as exc:  # carried out of the nursery as it is
                errors.append(exc)
            nursery.cancel_scope.cancel()
    if errors:
        raise errors[0]
    return ended


async def read_tail(upstream: Upstream, reader: AnswerReader) -> None:
    """The engine's last word is there, the end of its framing is not: read on briefly, to keep the connection."""
    with trio.move_on_after(TAIL_PATIENCE):
        try:
            while not reader.response.complete:
                data = await upstream.connection.receive()
                if not data:
                    return
                reader.response.feed(data)
        except (ConnectionBroken, BadResponse):
            return
