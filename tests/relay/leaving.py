"""What tests of workers that are to be empty need."""

from __future__ import annotations

import pytest
import trio

from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions

SLOW = WorkerOptions(tick=1.0)
BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


def options(dialect="cumulative", **changes):
    return WorkerOptions(tick=1.0, dialect=dialect, **changes)


async def during(w, body, meanwhile):
    """The answer to a request, and something that is done while it is under way."""
    answers = []

    async def client():
        answers.append(await w.ask(body))

    async with trio.open_nursery() as clients:
        clients.start_soon(client)
        await until(lambda: any(worker.generates for worker in w.workers))
        await meanwhile()
    await w.quiet()
    return answers[0]


async def made(worker, tokens):
    """Return once it has made so many tokens of the one request that it has, or has ended it."""
    lives = worker.scheduler.live
    await until(lambda: not lives or any(len(live.ids) >= tokens for live in lives.values()))


def causes(w):
    [row] = w.rows
    return [(attempt["worker"], attempt["cause"]) for attempt in row["attempts"]]
