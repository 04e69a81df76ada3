"""`/generate`: streams and unary answers over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio

from dyn_relay.net import Connection
from dyn_testkit.faults import Spot
from dyn_testkit.worker.contract import (
    INTERNAL_ERROR,
    Aborted,
    Invalid,
    Refused,
    Unhandled,
    error_object,
    parse_body,
    value_error,
)
from dyn_testkit.worker.inject import AnswerCut, HttpInjector
from dyn_testkit.worker.manager import Manager
from dyn_testkit.worker.wire import DONE, LAST_CHUNK, Reply, Request, chunk, event, json_reply, reply_bytes, stream_head


@dataclass(frozen=True, slots=True)
class Generator:
    """Serves `/generate` requests of one worker."""

    manager: Manager

    async def serve(self, connection: Connection, request: Request, inject: HttpInjector, keep: bool) -> None:
        """Answer one request. Raises `AnswerCut`, `Poisoned`, `dyn_relay.net.ConnectionBroken`."""
        answer = _Answer(self.manager, connection, inject, keep)
        try:
            body = parse_body(request)
        except Refused as exc:
            await answer.reply(exc.reply)
            return
        await inject.at(Spot.AT_HEAD)
        if body.get("stream"):
            await answer.stream(body)
        else:
            await answer.unary(body)


@dataclass(slots=True)
class _Answer:
    """The answer to one request, on its way out."""

    manager: Manager
    connection: Connection
    inject: HttpInjector
    keep: bool
    _lock: trio.Lock = field(default_factory=trio.Lock)

    async def reply(self, reply: Reply) -> None:
        """Send a whole answer."""
        head = reply_bytes(reply, self.manager.renderer.wall(), self.keep, with_body=False)
        await self.connection.send(await self.inject.cut_reply(head, reply.body))
        for spot in (Spot.AFTER_FINISH, Spot.BEFORE_LAST_CHUNK, Spot.AFTER_DONE):
            await self.inject.at(spot)

    async def unary(self, body: dict[str, Any]) -> None:
        """A JSON object, or a list for batches and samples."""
        try:
            values, single = await self.manager.unary(body, self.inject)
        except Invalid as exc:
            await self.reply(value_error(str(exc)))
        except Unhandled:
            await self.reply(INTERNAL_ERROR)
        except Aborted as exc:
            status = exc.status_code or 500
            await self.reply(value_error(exc.message) if status < 500 else error_object(status, exc.message))
        else:
            await self.reply(json_reply(values[0] if single else values))

    async def stream(self, body: dict[str, Any]) -> None:
        """Server-sent events, then `[DONE]`."""
        await self.connection.send(stream_head(self.manager.renderer.wall(), self.keep))
        try:
            await self.manager.stream(body, self.inject, self._send)
        except Invalid as exc:
            error = {"message": str(exc), "type": "invalid_request_error", "code": 400, "retryable": False}
            await self.connection.send(chunk(event(msgspec.json.encode({"error": error}))))
        except Unhandled as exc:
            self.connection.close()
            raise AnswerCut from exc
        await self.inject.at(Spot.AFTER_FINISH)
        await self.connection.send(chunk(DONE))
        await self.inject.at(Spot.BEFORE_LAST_CHUNK)
        await self.connection.send(LAST_CHUNK)
        await self.inject.at(Spot.AFTER_DONE)

    async def _send(self, value: dict[str, Any], sent: int, total: int) -> None:
        data = event(msgspec.json.encode(value))
        whole = chunk(data)
        size = len(b"%x" % len(data))
        async with self._lock:
            whole = await self.inject.cut(Spot.INSIDE_CHUNK_SIZE, sent, total, whole, size)
            whole = await self.inject.cut(Spot.INSIDE_JSON, sent, total, whole, size)
            await self.connection.send(whole)
