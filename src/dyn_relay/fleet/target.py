"""Where an attempt can go: a worker, or one data-parallel rank of it, and the claims on it.

A claim, a `Lease`, is taken before the dial and given back once, whatever happens: a load that is only counted when an
answer begins lets every request of a burst see an idle worker, and one that is given back twice makes a busy worker
look idle. It lasts as long as its attempt, be that hours.

Load is counted twice: in answers, since an attempt for eight prompts with two samples each is sixteen for the engine,
and in tokens that it holds for them, prompts and what was made so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dyn_relay.fleet.worker import Worker


def no_tokens() -> int:
    """What an attempt holds whose tokens are not known."""
    return 0


@dataclass(slots=True, eq=False)
class Target:
    """A worker; with `--dp-aware`, a rank of it."""

    worker: Worker
    rank: int | None = None
    #: Live attempts.
    in_flight: int = 0
    #: Answers that they ask for.
    load: int = 0
    #: Tokens that the engine holds for them, as of the last `recount`.
    tokens: int = 0
    #: Its queue was full, and is taken to be until then, in seconds of the fleet's clock.
    full_until: float = -math.inf
    _leases: set[Lease] = field(default_factory=set)

    @property
    def id(self) -> str:
        """`w1`, or `w1@3` for its rank 3."""
        return self.worker.id if self.rank is None else f"{self.worker.id}@{self.rank}"

    @property
    def url(self) -> str:
        """Where it is, as other proxies know it, too: the worker's URL, with `@3` for its rank 3."""
        return self.worker.url if self.rank is None else f"{self.worker.url}@{self.rank}"

    @property
    def order(self) -> tuple[int, int]:
        """Targets in the order of joining, a worker's ranks one after the other."""
        return self.worker.number, self.rank or 0

    def full(self, now: float) -> bool:
        """It has said that its queue is full, and not long ago."""
        return now < self.full_until

    def recount(self) -> None:
        """Bring `tokens` up to date: live answers grow."""
        for lease in self._leases:
            self.tokens += lease.recount()

    def take(self, lease: Lease) -> None:
        """Count a claim."""
        self._leases.add(lease)
        self.in_flight += 1
        self.load += lease.generations
        self.tokens += lease.recount()

    def give_back(self, lease: Lease) -> None:
        """Count it no more."""
        self._leases.remove(lease)
        self.in_flight -= 1
        self.load -= lease.generations
        self.tokens -= lease.counted


class Lease:
    """`with fleet.lease(target):`. Usable once; entering or releasing it twice raises `RuntimeError`."""

    __slots__ = ("_held", "_on_release", "_tokens", "_used", "counted", "generations", "target")

    def __init__(
        self,
        target: Target,
        on_release: Callable[[Target], None],
        generations: int = 1,
        tokens: Callable[[], int] = no_tokens,
    ) -> None:
        """`tokens`: what the engine holds for it at the moment."""
        self.target = target
        self.generations = generations
        self.counted = 0
        self._tokens = tokens
        self._on_release = on_release
        self._used = False
        self._held = False

    @property
    def held(self) -> bool:
        """Taken, and not given back yet."""
        return self._held

    def recount(self) -> int:
        """Tokens that have come since the last time."""
        before, self.counted = self.counted, self._tokens()
        return self.counted - before

    def __enter__(self) -> Lease:
        if self._used:
            raise RuntimeError("a lease is taken once")
        self._used = self._held = True
        self.target.take(self)
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
        self.target.give_back(self)
        self._on_release(self.target)
