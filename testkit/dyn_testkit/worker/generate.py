"""`/generate`: admission, the token loop, streams and unary answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import trio

from dyn_relay.net import Connection, ConnectionBroken
from dyn_testkit import engine
from dyn_testkit.detokenizer import UNARY_INTERVAL, Detokenizer
from dyn_testkit.faults import Spot
from dyn_testkit.stops import StopStrings
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
from dyn_testkit.worker.jobs import Job, Reader, schedule
from dyn_testkit.worker.kv_cache import KvCache
from dyn_testkit.worker.options import WorkerOptions
from dyn_testkit.worker.render import Live, Renderer
from dyn_testkit.worker.wire import DONE, LAST_CHUNK, Reply, Request, chunk, event, json_reply, reply_bytes, stream_head

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}
#: The radix cache forgets everything beyond this many prefixes.
_CACHE_LIMIT = 1_000_000

Emit = Callable[[Live, dict[str, Any] | None], Awaitable[None]]


class _Dropped(Exception):
    """The request left the waiting queue without having run."""


@dataclass(slots=True)
class Scheduler:
    """What one engine process holds: live requests, the queue, the prefix cache, the weights' version."""

    options: WorkerOptions
    weight_version: str = ""
    live: dict[str, Live] = field(default_factory=dict)
    #: Requests that hold a slot, and those that wait for one, oldest first.
    running: int = 0
    waiting: list[Live] = field(default_factory=list)
    paused: bool = False
    #: A forward pass takes so many times as long; every new request finds the queue full.
    drag: float = 1.0
    full: bool = False
    #: Counts requests with a negative `logprob_start_len`: the second one kills.
    negative_starts: int = 0
    cache: set[int] = field(default_factory=set)
    #: The caches of whole pages, of each rank; empty if there are none.
    pages: list[KvCache] = field(default_factory=list)
    #: Requests that have ended, by rid: which weights made their tokens, (version, start, end).
    made: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    _changed: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.weight_version = self.weight_version or self.options.weight_version

    def changed(self) -> None:
        """Wake everything that waits for a slot, a continue or an abort."""
        self._changed.set()
        self._changed = trio.Event()

    def enter(self, job: Job) -> Live:
        """Register a request. Raises `Invalid` if its rid is live."""
        if job.rid in self.live:
            raise Invalid(f"Duplicate request ID detected: {job.rid}")
        options = self.options
        detokenizer = None if options.skip_tokenizer_init else Detokenizer(options.tokenizer, job.prompt, job.sampling)
        live = Live(job, trio.current_time(), detokenizer)
        self.live[job.rid] = live
        return live

    def leave(self, live: Live) -> None:
        """Forget a request."""
        self.made[live.job.rid] = [(version, start, end) for version, start, end in live.versions]
        if self.live.get(live.job.rid) is live:
            del self.live[live.job.rid]
        self.changed()

    def abort(self, rid: str, *, everything: bool = False) -> list[str]:
        """Abort by rid, as `/abort_request` does; returns what matched.

        The tokenizer manager passes on only the rid of a live request; the scheduler then matches by prefix.
        """
        if not everything and rid not in self.live:
            return []
        exact = self.options.abort_match == "exact"
        hit = [
            live
            for name, live in self.live.items()
            if everything or name == rid or (not exact and name.startswith(rid))
        ]
        for live in hit:
            live.abort = ABORTED
        self.changed()
        return [live.job.rid for live in hit]

    def pause(self, mode: str) -> None:
        """`abort` drops what runs; `retract` and `in_place` keep it for later."""
        self.paused = True
        if mode == "abort":
            self.abort("", everything=True)
        elif mode == "retract":
            for live in self.live.values():
                live.retractions += 1

    def resume(self) -> None:
        """End a pause."""
        self.paused = False
        self.changed()

    async def run(self, live: Live, inject: Injector, emit: Emit) -> None:
        """Generate one request to its end. Raises `Aborted`, `Poisoned`, `AnswerCut`."""
        job = live.job
        schedule(job, self.options)
        if job.return_logprob and job.logprob_start_len < -1:
            self.negative_starts += 1
            if self.negative_starts > 1:
                raise Poisoned("negative logprob_start_len, the second")
        try:
            await self._slot(live)
        except _Dropped:
            live.abort = ABORTED_WAITING
            return
        try:
            self._prefill(live)
            await self._decode(live, inject, emit)
        finally:
            self._keep(live, [*job.prompt, *live.ids[:-1]])
            self.running -= 1
            self.changed()

    async def _slot(self, live: Live) -> None:
        limit, queue = self.options.max_running_requests, self.options.max_queued_requests
        crowded = limit is not None and (self.running >= limit or bool(self.waiting))
        if self.full or (crowded and queue is not None and len(self.waiting) >= queue):
            raise Aborted("The request queue is full.", 503, echo=True)
        self.waiting.append(live)
        try:
            while self.paused or self.waiting[0] is not live or (limit is not None and self.running >= limit):
                if live.abort is not None:
                    raise _Dropped
                await self._changed.wait()
            self.running += 1
        finally:
            self.waiting.remove(live)
            self.changed()

    def _prefill(self, live: Live) -> None:
        """Count the longest prompt prefix in the cache (never the whole prompt), then put the prompt there."""
        if not self.options.radix_cache:
            return
        job = live.job
        most = len(job.prompt) - 1
        if job.return_logprob and job.logprob_start_len != -1:
            most = min(most, max(0, job.logprob_start_len))
        if self.pages:
            live.cached = self.pages[job.dp_rank or 0].match(job.prompt[:most])
            return
        history = engine.EMPTY
        prefixes = []
        for position, token in enumerate(job.prompt):
            history = engine.mix(history, token)
            prefixes.append(history)
            if position < most and history in self.cache:
                live.cached = position + 1
        if len(self.cache) > _CACHE_LIMIT:
            self.cache.clear()
        self.cache.update(prefixes)

    def _keep(self, live: Live, ids: Sequence[int]) -> None:
        """Its pages are in the cache from now on: after the prefill, and when it ends."""
        if self.pages and self.options.radix_cache:
            self.pages[live.job.dp_rank or 0].insert(ids)

    async def _decode(self, live: Live, inject: Injector, emit: Emit) -> None:
        options, job = self.options, live.job
        interval = job.sampling.stream_interval or options.stream_interval
        late = options.late_finish or inject.wants_late_finish  # but a stop string comes with its finish
        inject = replace(inject, budget=engine.budget(options.model, len(job.prompt), job.sampling.max_new_tokens))
        if not inject.budget:
            await self._pass(live)
            await emit(live, {"type": "length", "length": 0})
            return
        since_pass = options.tokens_per_tick
        stops = StopStrings(job.sampling.stop, options.tokenizer)
        for step in engine.generate(
            options.model, job.prompt, job.sampling, job.adapter, options.tokenizer, options.tokens_per_tick
        ):
            if since_pass == options.tokens_per_tick:
                await self._pass(live)
                since_pass = 0
            since_pass += 1
            if not live.ids:
                self._keep(live, job.prompt)
            live.add(options.model, step, self.weight_version)
            if options.radix_cache and not self.pages:
                self.cache.add(step.history)
            finish = step.finish if live.abort is None else live.abort
            count = len(live.ids)
            due = count - live.emitted >= interval if live.emitted else True
            boundary = since_pass == options.tokens_per_tick
            if not job.stream and finish is None and boundary and count % UNARY_INTERVAL == 0:
                live.tell(None)
            if finish is None and stops.begun(live.ids):
                await inject.at(Spot.AT_TOKEN, count)
                continue
            if finish is None and count != inject.splits_at and not (due and boundary):
                continue
            if finish is not None and late and live.abort is None and not isinstance(finish.get("matched"), str):
                await emit(live, None)
                await inject.at(Spot.AT_TOKEN, count)
                await inject.at(Spot.AFTER_LAST_TOKEN)
                await emit(live, finish)
                return
            await emit(live, finish)
            await inject.at(Spot.AT_TOKEN, count)
            if finish is not None:
                return

    async def _pass(self, live: Live) -> None:
        """One forward pass takes its time; a pause holds it up."""
        if self.options.tick:
            await trio.sleep(self.options.tick * self.drag)
        else:
            await trio.lowlevel.checkpoint()
        while self.paused and live.abort is None:
            await self._changed.wait()


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
