"""What SGLang's tokenizer manager does for every wire: a body in, the values of its answer out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from dyn_relay.net import ConnectionBroken
from dyn_testkit.faults import Spot
from dyn_testkit.grpc import CallGone
from dyn_testkit.worker.contract import Aborted, Poisoned
from dyn_testkit.worker.inject import AnswerCut, Injector
from dyn_testkit.worker.jobs import Job, Reader
from dyn_testkit.worker.render import Live, Renderer
from dyn_testkit.worker.scheduler import ABORTED_WAITING, Scheduler

#: Sends one event, which carries tokens `sent + 1 .. total` of its answer.
Send = Callable[[dict[str, Any], int, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Manager:
    """Runs the generations of one worker."""

    scheduler: Scheduler
    reader: Reader
    renderer: Renderer

    async def stream(self, body: Mapping[str, Any], inject: Injector, send: Send) -> None:
        """Send event after event; a request that the scheduler drops ends with an event, too.

        Raises `Invalid`, `Unhandled`, `AnswerCut`, `Poisoned`, and what `send` raises.
        """

        async def run(live: Live) -> None:
            await self._stream_one(live, inject, send)

        await self._each(self.reader.jobs(body), run)

    async def unary(self, body: Mapping[str, Any], inject: Injector) -> tuple[list[dict[str, Any]], bool]:
        """The values of the whole answer, and whether it is for one request alone, without samples.

        Raises `Invalid`, `Unhandled`, `Aborted`, `AnswerCut`, `Poisoned`.
        """
        values: list[tuple[int, dict[str, Any]]] = []

        async def run(live: Live) -> None:
            values.append((live.job.index or 0, await self._unary_one(live, inject)))

        jobs = self.reader.jobs(body)
        await self._each(jobs, run)
        return [value for _, value in sorted(values, key=lambda pair: pair[0])], len(jobs) == 1 and jobs[
            0
        ].index is None

    async def _unary_one(self, live: Live, inject: Injector) -> dict[str, Any]:
        version = self.scheduler.weight_version
        values: list[dict[str, Any]] = []

        async def emit(live: Live, finish: dict[str, Any] | None) -> None:
            if finish is None:
                live.emitted = len(live.ids)
            else:
                values.append(self.renderer.answer(live, self.scheduler.weight_version, finish, unary=True))

        try:
            await inject.at(Spot.AT_TOKEN, 0)
            await self.scheduler.run(live, inject, emit)
        except Aborted as exc:
            if exc.status_code is not None:
                raise
            return self.renderer.answer(live, version, exc.finish, unary=True)
        if live.abort is ABORTED_WAITING:
            return self.renderer.echo(live, version, ABORTED_WAITING)
        [value] = values
        return value

    async def _stream_one(self, live: Live, inject: Injector, send: Send) -> None:
        scheduler, renderer = self.scheduler, self.renderer

        async def emit(live: Live, finish: dict[str, Any] | None) -> None:
            sent = live.emitted
            value = renderer.answer(live, scheduler.weight_version, finish, unary=False)
            await send(value, sent, len(live.ids))

        try:
            await inject.at(Spot.AT_TOKEN, 0)
            await scheduler.run(live, inject, emit)
        except Aborted as exc:
            version = scheduler.weight_version
            if exc.echo:
                value = renderer.echo(live, version, exc.finish)
            elif exc.refused:
                value = renderer.refusal(live.job, version, exc.finish, live.started)
            else:
                value = renderer.answer(live, version, exc.finish, unary=False)
            await send(value, 0, 0)
        else:
            if live.abort is ABORTED_WAITING:
                await send(renderer.echo(live, scheduler.weight_version, ABORTED_WAITING), 0, 0)

    async def _each(self, jobs: list[Job], run: Callable[[Live], Awaitable[None]]) -> None:
        """Run all jobs side by side; the first failure ends the others."""
        scheduler = self.scheduler
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
                except (Aborted, Poisoned, AnswerCut, ConnectionBroken, CallGone) as exc:
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
