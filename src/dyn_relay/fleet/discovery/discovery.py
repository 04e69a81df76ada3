"""Following the sources: what each names joins the fleet, what none names any more leaves it in peace.

Only a source's *changes* act. A worker that an operator has removed stays away although its source still names it; it
comes back when the source has dropped it and names it again.

A source that fails keeps its last answer: a name server or a file that is gone says nothing about engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import structlog
import trio

from dyn_relay.fleet.discovery.base import Source, SourceError
from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.stage import Named
from dyn_relay.http11.origin import Origin

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("discovery")

#: Seconds until a source that failed is run again: doubled with each failure in a row, up to the second.
PAUSE, LONGEST_PAUSE = 1.0, 30.0


class Discovery:
    """All sources of one fleet."""

    def __init__(self, fleet: Fleet, sources: Iterable[Source]) -> None:
        self._followed = [_Followed(source, fleet) for source in sources]

    def samples(self) -> list[tuple[str, bool, int]]:
        """Of each source: its name, whether its last answer is a good one, the workers that it names."""
        return [(one.source.name, one.up, len(one.named)) for one in self._followed]

    def named(self) -> dict[str, list[str]]:
        """Whom each source names, by its name: URLs."""
        return {one.source.name: list(map(str, one.named)) for one in self._followed}

    def recall(self, named: Mapping[str, Iterable[str]]) -> None:
        """Before `run`: what sources have said to another process, which has acted on it."""
        for one in self._followed:
            one.named = dict.fromkeys(map(Origin.parse, named.get(one.source.name, ())))

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow all sources until cancelled. Started once each has answered or failed for the first time."""
        async with trio.open_nursery() as nursery:
            for one in self._followed:
                nursery.start_soon(one.run)
            for one in self._followed:
                await one.heard.wait()
            task_status.started()


class _Followed:
    """One source, and whom it names."""

    def __init__(self, source: Source, fleet: Fleet) -> None:
        self.source = source
        #: In the source's order, which is that of joining.
        self.named: dict[Origin, None] = {}
        self.up = False
        #: It has answered or failed once.
        self.heard = trio.Event()
        self._fleet = fleet
        self._pause = PAUSE
        self._cause = ""

    async def run(self) -> None:
        while True:
            try:
                await self.source.run(self._take)
            except SourceError as exc:
                self._failed(str(exc))
            except Exception as exc:
                # One source's defect must neither end the others nor the proxy.
                self._failed(repr(exc), exc)
            await trio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _take(self, origins: Iterable[Origin]) -> None:
        before, self.named = self.named, dict.fromkeys(origins)
        # Those that join come first, so that a fleet which is exchanged is never empty.
        for origin in self.named:
            if origin not in before:
                one = self.source.named.get(origin, Named(origin))
                self._fleet.add(str(origin), self.source.name, one.role, one.bootstrap_port, back=one.back)
        for origin in before:
            if origin not in self.named:
                self._fleet.withdraw(str(origin), by=self.source.name)
        if self._cause:
            log.info("discovery works again", source=self.source.name, workers=len(self.named))
        self.up, self._pause, self._cause = True, PAUSE, ""
        self.heard.set()

    def _failed(self, cause: str, defect: Exception | None = None) -> None:
        if cause != self._cause:
            log.error(
                "discovery fails; its last answer stays",
                source=self.source.name,
                cause=cause,
                workers=len(self.named),
                exc_info=defect,
            )
        self.up, self._cause = False, cause
        self.heard.set()
