"""`/generate`: admission, streams and unary answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio

from dyn_relay.net import Connection, ConnectionBroken
from dyn_testkit.faults import Spot
from dyn_testkit.worker.contract import (
    INTERNAL_ERROR,
    Aborted,
    Invalid,
    Poisoned,
    Refused,
    Unhandled,
    error_object,
    parse_body,
    value_error,
)
from dyn_testkit.worker.inject import AnswerCut, Injector
from dyn_testkit.worker.jobs import Job, Reader
from dyn_testkit.worker.render import Live, Renderer
from dyn_testkit.worker.scheduler import ABORTED_WAITING, Scheduler
from dyn_testkit.worker.wire import DONE, LAST_CHUNK, Reply, Request, chunk, event, json_reply, reply_bytes, stream_head


@dataclass(frozen=True, slots=True)
class Generator:
    """Serves `/generate` requests of one worker."""

    scheduler: Scheduler
    reader: Reader
    renderer: Renderer

    async def serve(self, connection: Connection, request: Request, inject: Injector, keep: bool) -> None:
        """Answer one request. Raises `AnswerCut`, `Poisoned`, `dyn_relay.net.ConnectionBroken`."""
        answer = _Answer(self, connection, inject, keep)
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

    generator: Generator
    connection: Connection
    inject: Injector
    keep: bool
    _lock: trio.Lock = field(default_factory=trio.Lock)

    async def reply(self, reply: Reply) -> None:
        """Send a whole answer."""
        wall = self.generator.renderer.wall()
        head = reply_bytes(reply, wall, self.keep, with_body=False)
        await self.connection.send(await self.inject.cut_reply(head, reply.body))
        for spot in (Spot.AFTER_FINISH, Spot.BEFORE_LAST_CHUNK, Spot.AFTER_DONE):
            await self.inject.at(spot)

    async def unary(self, body: dict[str, Any]) -> None:
        """A JSON object, or a list for batches and samples."""
        scheduler, renderer = self.generator.scheduler, self.generator.renderer
        values: list[tuple[int, dict[str, Any]]] = []

        async def emit(live: Live, finish: dict[str, Any] | None) -> None:
            if finish is None:
                live.emitted = len(live.ids)
            else:
                version = scheduler.weight_version
                values.append((live.job.index or 0, renderer.answer(live, version, finish, unary=True)))

        async def run(live: Live) -> None:
            version = scheduler.weight_version
            try:
                await self.inject.at(Spot.AT_TOKEN, 0)
                await scheduler.run(live, self.inject, emit)
            except Aborted as exc:
                if exc.status_code is not None:
                    raise
                values.append((live.job.index or 0, renderer.answer(live, version, exc.finish, unary=True)))
            if live.abort is ABORTED_WAITING:
                values.append((live.job.index or 0, renderer.echo(live, version, ABORTED_WAITING)))

        try:
            jobs = self.generator.reader.jobs(body)
            await self._each(jobs, run)
        except Invalid as exc:
            await self.reply(value_error(str(exc)))
        except Unhandled:
            await self.reply(INTERNAL_ERROR)
        except Aborted as exc:
            await self._aborted_unary(exc)
        else:
            ordered = [value for _, value in sorted(values, key=lambda pair: pair[0])]
            single = len(jobs) == 1 and jobs[0].index is None
            await self.reply(json_reply(ordered[0] if single else ordered))

    async def _aborted_unary(self, exc: Aborted) -> None:
        status = exc.status_code or 500
        await self.reply(value_error(exc.message) if status < 500 else error_object(status, exc.message))

    async def stream(self, body: dict[str, Any]) -> None:
        """Server-sent events, then `[DONE]`."""
        await self.connection.send(stream_head(self.generator.renderer.wall(), self.keep))
        try:
            await self._each(self.generator.reader.jobs(body), self._stream_one)
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

    async def _stream_one(self, live: Live) -> None:
        scheduler, renderer = self.generator.scheduler, self.generator.renderer
        try:
            await self.inject.at(Spot.AT_TOKEN, 0)
            await scheduler.run(live, self.inject, self._emit)
        except Aborted as exc:
            version = scheduler.weight_version
            if exc.echo:
                value = renderer.echo(live, version, exc.finish)
            elif exc.refused:
                value = renderer.refusal(live.job, version, exc.finish, live.started)
            else:
                value = renderer.answer(live, version, exc.finish, unary=False)
            await self._send(value, 0, 0)
        else:
            if live.abort is ABORTED_WAITING:
                await self._send(renderer.echo(live, scheduler.weight_version, ABORTED_WAITING), 0, 0)

    async def _emit(self, live: Live, finish: dict[str, Any] | None) -> None:
        sent = live.emitted
        version = self.generator.scheduler.weight_version
        value = self.generator.renderer.answer(live, version, finish, unary=False)
        await self._send(value, sent, len(live.ids))

    async def _send(self, value: dict[str, Any], sent: int, total: int) -> None:
        data = event(msgspec.json.encode(value))
        whole = chunk(data)
        size = len(b"%x" % len(data))
        async with self._lock:
            whole = await self.inject.cut(Spot.INSIDE_CHUNK_SIZE, sent, total, whole, size)
            whole = await self.inject.cut(Spot.INSIDE_JSON, sent, total, whole, size)
            await self.connection.send(whole)

    async def _each(self, jobs: list[Job], run: Callable[[Live], Awaitable[None]]) -> None:
        """Run all jobs side by side; the first failure ends the others."""
        scheduler = self.generator.scheduler
        lives: list[Live] = []
        try:
            lives.extend(scheduler.enter(job) for job in jobs)
            if len(lives) == 1:
                await run(lives[0])
                return
            failures: list[Exception] = []

            async def guarded(live: Live) -> None:
                try:
                    await run(live)
                except (Aborted, Poisoned, AnswerCut, ConnectionBroken) as exc:
                    failures.append(exc)
                    nursery.cancel_scope.cancel()

            async with trio.open_nursery() as nursery:
                for live in lives:
                    nursery.start_soon(guarded, live)
            if failures:
                raise failures[0]
        finally:
            for live in lives:
                scheduler.leave(live)
