"""Runs of trio that are a function of their seed: virtual time, and no order that memory or luck decides.

trio shuffles the tasks of a batch on purpose; with a seed it does so in the same way each time. What else a program
must keep: random numbers from seeded generators, time from trio's clock, and no order from a set of objects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio
from trio import _core
from trio.testing import MockClock

T = TypeVar("T")


#: Steps of tasks at one instant of virtual time: far more than any run needs; some seconds of the processor's.
MOST_STEPS = 200_000


class Livelock(Exception):
    """Tasks are busy, and virtual time does not go on."""


class _Steps(trio.abc.Instrument):
    """Counts steps of tasks at one instant, and ends the run if they do not end."""

    def __init__(self, scope: trio.CancelScope) -> None:
        self._scope = scope
        self._instant = -1.0
        self._steps = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        now = trio.current_time()
        if now != self._instant:
            self._instant, self._steps = now, 0
        self._steps += 1
        if self._steps == MOST_STEPS:
            self._scope.cancel()


def run_seeded(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """`trio.run(main)` in virtual time; every scheduling decision comes from the seed. Raises `Livelock`."""

    async def watched() -> T:
        with trio.CancelScope() as scope:
            trio.lowlevel.add_instrument(_Steps(scope))
            return await main()
        raise Livelock(f"{MOST_STEPS} steps of tasks at {trio.current_time():g} s")

    with seeded(seed):
        return trio.run(watched, clock=MockClock(autojump_threshold=0))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block, also that of a task, every scheduling decision of trio comes from the seed.

    trio has no public switch for it: the same two names serve its own tests and Hypothesis (trio 0.35).
    """
    scheduler: Any = _core._run
    before, state = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r.getstate()
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before
        scheduler._r.setstate(state)
