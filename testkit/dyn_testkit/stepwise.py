"""Trio for synchronous code that takes turns with it: a run in virtual time that stands still between two steps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dyn_testkit.determinism import seeded

T = TypeVar("T")


class Stepwise:
    """A run of trio that goes on only within `step`, so that no time passes between two steps. All of it is seeded.

    It is a guest of the calling thread (`trio.lowlevel.start_guest_run`): nothing runs in another thread, and what was
    started in `nursery` by one step goes on in the next ones. To be closed by `close`, in the thread that made it.
    """

    def __init__(self, seed: int) -> None:
        self.nursery: trio.Nursery
        self._ticks: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._wanted: Callable[[], Awaitable[object]] | None = None
        self._closing = False
        #: Gives what the last step gave, or raises it.
        self._stepped: Callable[[], Any] | None = None
        self._over = False
        self._scheduling = ExitStack()
        self._scheduling.enter_context(seeded(seed))
        trio.lowlevel.start_guest_run(
            self._run,
            run_sync_soon_threadsafe=self._ticks.put,
            done_callback=self._done,
            host_uses_signal_set_wakeup_fd=True,
            clock=MockClock(autojump_threshold=0),
        )

    def step(self, work: Callable[..., Awaitable[T]], *args: Any, within: float = 86400.0) -> T:
        """Run `work` to its end, and all that it has set off until everything waits. Returns or raises what it does.

        Raises `trio.TooSlowError` if that takes more than `within` virtual seconds, and what ends the run.
        """
        self._wanted, self._stepped = partial(_settled, work, args, within), None
        while self._stepped is None:
            self._tick()
        result: T = self._stepped()
        return result

    def close(self) -> None:
        """Cancel all that runs. Raises what ends the run."""
        self._closing = True
        try:
            while not self._over:
                self._ticks.get()()
        finally:
            self._scheduling.close()

    def _tick(self) -> None:
        if self._over:
            raise RuntimeError("the run has ended")
        self._ticks.get()()

    def _done(self, outcome: Any) -> None:
        self._over = True
        outcome.unwrap()  # raises in the tick that ended the run

    async def _run(self) -> None:
        async with trio.open_nursery() as self.nursery:
            while not self._closing:
                wanted, self._wanted = self._wanted, None
                if wanted is not None:
                    self._stepped = await _caught(wanted)
                # Always runnable between two steps: an idle run would jump to the next deadline.
                await trio.lowlevel.checkpoint()
            self.nursery.cancel_scope.cancel()


async def _settled(work: Callable[..., Awaitable[T]], args: tuple[Any, ...], within: float) -> T:
    with trio.fail_after(within):
        result = await work(*args)
    await wait_all_tasks_blocked()
    return result


async def _caught(work: Callable[[], Awaitable[T]]) -> Callable[[], T]:
    try:
        result = await work()
    except Exception as exc:
        return partial(_raise, exc)
    return lambda: result


def _raise(exc: Exception) -> Any:
    raise exc
