"""The generations that came over gRPC and have not ended, by rid: how others end them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from dyn_relay.grpc.status import Code
from dyn_testkit.grpc import Status
from dyn_testkit.worker.scheduler import Scheduler


@dataclass(slots=True)
class Channel:
    """One generation's way out. Nothing for `timeout` seconds ends it."""

    timeout: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    #: Why it was ended; None: it was not.
    ending: Status | None = None

    def end(self, status: Status) -> None:
        """End it at its next checkpoint."""
        self.ending = self.ending or status
        self.scope.cancel()

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Generate within. Raises `Status` if it was ended meanwhile."""
        self.moved()
        with self.scope:
            yield
        if self.ending is not None:
            raise self.ending
        if self.scope.cancelled_caught:
            raise Status(Code.DEADLINE_EXCEEDED, "Stream chunk timed out")

    def moved(self) -> None:
        """A message went out: its time begins anew."""
        self.scope.deadline = trio.current_time() + self.timeout

    def held(self) -> None:
        """A message is on its way out: this is the client's time."""
        self.scope.deadline = math.inf


@dataclass(frozen=True, slots=True)
class Channels:
    """All of one life of a worker."""

    live: dict[str, Channel] = field(default_factory=dict)

    @contextmanager
    def open(self, rid: str, timeout: float) -> Iterator[Channel]:
        """A channel for this rid. Raises `Status` if there is one."""
        if rid in self.live:
            why = f"RuntimeError: Duplicate active gRPC request id: {rid}"
            raise Status(Code.INTERNAL, f"Failed to submit request: {why}")
        channel = self.live[rid] = Channel(timeout)
        try:
            yield channel
        finally:
            del self.live[rid]

    def abort(self, scheduler: Scheduler, rid: str, *, everything: bool) -> None:
        """End one, or all: the engine is told, too, but not of a rid that did not come over gRPC.

        Raises `Status`.
        """
        if not everything and not rid.strip():
            raise Status(Code.INVALID_ARGUMENT, "Abort requires a non-empty rid unless abort_all is true")
        hit = list(self.live) if everything else [rid] if rid in self.live else []
        if everything or hit:
            scheduler.abort(rid, everything=everything)
        for name in hit:
            self.live[name].end(Status(Code.CANCELLED, f"Request aborted: {name}"))
