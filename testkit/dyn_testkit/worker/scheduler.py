"""The scheduler of one engine process: slots, the queue, the prefix cache, the token loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from dyn_testkit import engine
from dyn_testkit.detokenizer import UNARY_INTERVAL, Detokenizer
from dyn_testkit.faults import Spot
from dyn_testkit.stops import StopStrings
from dyn_testkit.worker.contract import Aborted, Invalid, Poisoned
from dyn_testkit.worker.inject import Injector
from dyn_testkit.worker.jobs import Job, schedule
from dyn_testkit.worker.kv_cache import KvCache
from dyn_testkit.worker.options import WorkerOptions
from dyn_testkit.worker.render import Live

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}
#: The radix cache forgets everything beyond this many prefixes.
_CACHE_LIMIT = 1_000_000

Emit = Callable[[Live, dict[str, Any] | None], Awaitable[None]]


class Dropped(Exception):
    """The request left the waiting queue without having run."""


#: Generates one request in its own way: one leg of a pair. Raises what `Scheduler.run` does, and `Dropped`.
Leg = Callable[["Scheduler", Live, Injector, Emit], Awaitable[None]]


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
    #: When requests have ended, by rid and bootstrap room; seconds of trio's clock.
    left: dict[tuple[str, int | None], float] = field(default_factory=dict)
    #: What it does with a request that has passed its checks; None: all of it.
    leg: Leg | None = None
    _changed: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self.weight_version = self.weight_version or self.options.weight_version

    @property
    def caches(self) -> bool:
        """Does it keep prefixes? A decode worker is given them each time (its radix cache is off unless asked for)."""
        return self.options.radix_cache and self.options.disaggregation != "decode"

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
        self.left[live.job.rid, live.job.bootstrap_room] = trio.current_time()
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

    def flush(self) -> bool:
        """Forget all prefixes; False if something is live, and nothing was done."""
        if self.live:
            return False
        self.cache.clear()
        for cache in self.pages:
            cache.clear()
        return True

    async def wait_changed(self) -> None:
        """Return when something has begun, ended, paused, gone on or been aborted."""
        await self._changed.wait()

    def pause(self, mode: str) -> None:
        """`abort` drops what runs; `retract` and `in_place` keep it for later."""
        self.paused = True
        self.changed()
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
            if self.leg is not None:
                await self.leg(self, live, inject, emit)
                return
            async with self.slot(live):
                self.prefill(live)
                await self.decode(live, inject, emit, self.options.model, job.prompt)
        except Dropped:
            live.abort = ABORTED_WAITING

    @asynccontextmanager
    async def slot(self, live: Live) -> AsyncIterator[None]:
        """Hold one of the running slots; its turn may come late. Raises `Aborted`, `Dropped`."""
        await self._take_slot(live)
        try:
            yield
        finally:
            self.keep(live, [*live.job.prompt, *live.ids[:-1]])
            self.running -= 1
            self.changed()

    async def idle(self) -> None:
        """Return once no request is live."""
        while self.live:
            await self._changed.wait()

    async def aborted(self, live: Live) -> None:
        """Return once somebody has aborted it."""
        while live.abort is None:
            await self._changed.wait()

    async def _take_slot(self, live: Live) -> None:
        limit, queue = self.options.max_running_requests, self.options.max_queued_requests
        crowded = limit is not None and (self.running >= limit or bool(self.waiting))
        if self.full or (crowded and queue is not None and len(self.waiting) >= queue):
            raise Aborted("The request queue is full.", 503, echo=True)
        self.waiting.append(live)
        try:
            while self.paused or self.waiting[0] is not live or (limit is not None and self.running >= limit):
                if live.abort is not None:
                    raise Dropped
                await self._changed.wait()
            self.running += 1
        finally:
            self.waiting.remove(live)
            self.changed()

    def prefill(self, live: Live) -> None:
        """Count the longest prompt prefix in the cache (never the whole prompt), then put the prompt there."""
        if not self.caches:
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

    def keep(self, live: Live, ids: Sequence[int]) -> None:
        """Its pages are in the cache from now on: after the prefill, and when it ends."""
        if self.pages and self.caches:
            self.pages[live.job.dp_rank or 0].insert(ids)

    async def decode(
        self, live: Live, inject: Injector, emit: Emit, model: engine.Model, prompt: Sequence[int]
    ) -> None:
        """Generate what follows the prompt, to the end."""
        options, job = self.options, live.job
        interval = job.sampling.stream_interval or options.stream_interval
        inject = replace(inject, budget=engine.budget(options.model, len(job.prompt), job.sampling.max_new_tokens))
        if not inject.budget:
            await self.forward(live)
            await emit(live, {"type": "length", "length": 0})
            return
        since_pass = options.tokens_per_tick
        stops = StopStrings(job.sampling.stop, options.tokenizer)
        for step in engine.generate(
            model, prompt, job.sampling, job.adapter, options.tokenizer, options.tokens_per_tick
        ):
            if since_pass == options.tokens_per_tick:
                await self.forward(live)
                since_pass = 0
            since_pass += 1
            if not live.ids:
                self.keep(live, job.prompt)
            live.add(options.model, step, self.weight_version)
            if self.caches and not self.pages:
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
            if finish is not None:
                await self.conclude(live, inject, emit, finish)
                return
            await emit(live, None)
            await inject.at(Spot.AT_TOKEN, count)

    async def conclude(self, live: Live, inject: Injector, emit: Emit, finish: dict[str, Any]) -> None:
        """Emit the last token with its finish, or before it; but a stop string comes with its finish."""
        late = self.options.late_finish or inject.wants_late_finish
        apart = late and live.abort is None and not isinstance(finish.get("matched"), str)
        await emit(live, None if apart else finish)
        await inject.at(Spot.AT_TOKEN, len(live.ids))
        if apart:
            await inject.at(Spot.AFTER_LAST_TOKEN)
            await emit(live, finish)

    async def forward(self, live: Live) -> None:
        """One forward pass takes its time; a pause holds it up."""
        if self.options.tick:
            await trio.sleep(self.options.tick * self.drag)
        else:
            await trio.lowlevel.checkpoint()
        while self.paused and live.abort is None:
            await self._changed.wait()
