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


def run_seeded(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """`trio.run(main)` in virtual time; every scheduling decision comes from the seed."""
    with seeded(seed):
        return trio.run(main, clock=MockClock(autojump_threshold=0))


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
