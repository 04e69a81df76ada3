"""The workers that name themselves, each for as long as it renews its lease: sidecars do (`POST /workers`).

A lease that is not renewed lapses: whoever held it is dead, or cannot reach this proxy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec
import structlog
import trio

from dyn_relay.fleet.discovery.base import Report, Source
from dyn_relay.fleet.stage import Named
from dyn_relay.fleet.worker import Role
from dyn_relay.http11.origin import Origin
from dyn_relay.net import STOPPED

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("discovery")

#: So many URLs that have had a lease are remembered, the last ones.
REMEMBERED = 4096


class Held(msgspec.Struct):
    """One lease, as another process of the proxy is told of it."""

    url: str
    role: Role | None
    bootstrap_port: int | None
    #: Seconds that are left of it.
    left: float
    instance: str = ""


class Leases(msgspec.Struct):
    """All of them, and the URLs that had one."""

    held: list[Held]
    ended: list[str]


class Leased(Source):
    """Whoever has a lease. `clock` gives seconds.

    A URL that had one and gets another is *back*: it may be another process, with other weights (see `rejoin.py`).
    """

    name = "lease"

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self.named: dict[Origin, Named] = {}
        self._ends: dict[Origin, float] = {}
        #: Seconds, as it was last said.
        self._lengths: dict[Origin, float] = {}
        self._ended: dict[Origin, None] = {}
        self._report: Report = _nobody
        self._clock = clock
        self._sooner = trio.Event()

    async def run(self, report: Report) -> None:
        self._report = report
        report(self.named)
        while True:
            self._sooner = trio.Event()
            due = min(self._ends.values(), default=math.inf)
            with trio.move_on_after(due - self._clock()):
                await self._sooner.wait()
            if self._clock() - due > STOPPED:
                log.warning("this process did not run; all leases begin anew", seconds=round(self._clock() - due, 1))
                self._ends = {origin: self._clock() + self._lengths[origin] for origin in self._ends}
            for origin in [one for one, end in self._ends.items() if end <= self._clock()]:
                log.warning("a worker has not renewed its lease", url=str(origin))
                self.end(origin)

    def renew(self, worker: Named, seconds: float) -> None:
        """It has so many from now on: the same lease, unless it is another instance, or for something else.

        Raises `ValueError` for what it cannot be for.
        """
        origin, known = worker.origin, self.named.get(worker.origin)
        if known is not None and known._replace(back=False) != worker:
            self.end(origin)
        if origin not in self._ends:
            self.named[origin] = worker._replace(back=origin in self._ended)
            try:
                self._report(self.named)
            except ValueError:
                del self.named[origin]
                self._report(self.named)
                raise
        self._ends[origin], self._lengths[origin] = self._clock() + seconds, seconds
        self._sooner.set()

    def give_back(self, origin: Origin, instance: str) -> bool:
        """Its lease is over, if it has one."""
        known = self.named.get(origin)
        return known is not None and known.instance == instance and self.end(origin)

    def end(self, origin: Origin) -> bool:
        """Whoever has it, the lease is over."""
        if self._ends.pop(origin, None) is None:
            return False
        del self.named[origin], self._lengths[origin]
        self._remember(origin)
        self._report(self.named)
        return True

    def tell(self) -> Leases:
        """As of now."""
        now = self._clock()
        held = [
            Held(str(at), one.role, one.bootstrap_port, self._ends[at] - now, one.instance)
            for at, one in self.named.items()
        ]
        return Leases(held, list(map(str, self._ended)))

    def recall(self, told: Leases) -> None:
        """Before `run`: those of another process, which has acted on them."""
        for url in told.ended:
            self._remember(Origin.parse(url))
        for one in told.held:
            origin = Origin.parse(one.url)
            self.named[origin] = Named(origin, one.role, one.bootstrap_port, instance=one.instance)
            self._ends[origin], self._lengths[origin] = self._clock() + one.left, one.left

    def _remember(self, origin: Origin) -> None:
        self._ended.pop(origin, None)
        self._ended[origin] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]


def _nobody(origins: Iterable[Origin]) -> None:
    """Nothing is reported before it runs."""
