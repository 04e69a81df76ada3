"""A counted claim on a worker.

The claim is taken before the dial and given back once, whatever happens: a load that is only counted when an answer
begins lets every request of a burst see an idle worker, and one that is given back twice makes a busy worker look idle.
It weighs what the engine has to generate: an attempt for eight prompts with two samples each is a load of sixteen.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from dyn_relay.fleet.worker import Worker


class Lease:
    """`with fleet.lease(worker):`. Usable once; entering or releasing it twice raises `RuntimeError`."""

    __slots__ = ("_generations", "_held", "_on_release", "_used", "worker")

    def __init__(self, worker: Worker, on_release: Callable[[Worker], None], generations: int = 1) -> None:
        self.worker = worker
        self._generations = generations
        self._on_release = on_release
        self._used = False
        self._held = False

    def __enter__(self) -> Lease:
        if self._used:
            raise RuntimeError("a lease is taken once")
        self._used = self._held = True
        self.worker.in_flight += 1
        self.worker.load += self._generations
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the claim back. The `with` block does it."""
        if not self._held:
            raise RuntimeError("this lease is not held")
        self._held = False
        self.worker.in_flight -= 1
        self.worker.load -= self._generations
        self._on_release(self.worker)
