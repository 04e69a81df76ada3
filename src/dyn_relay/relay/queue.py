"""`--max-concurrent-requests`: whoever comes when the limit is reached waits in line, or is turned away."""

from __future__ import annotations

import math
from types import TracebackType

import trio

from dyn_relay.config import Config
from dyn_relay.observe.metrics import Metrics
from dyn_relay.relay.turnstile import Place, Turnstile

#: Paths of SGLang 0.5.23 that put an engine to work as the format's own do. Whatever else is bridged never waits:
#: probes, infos, an operator's orders.
GENERATING = frozenset(
    {
        "/api/chat",
        "/api/generate",
        "/classify",
        "/encode",
        "/generate_from_file",
        "/invocations",
        "/v1/audio/transcriptions",
        "/v1/chat/completions",
        "/v1/classify",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/vertex_generate",
    }
)


class Crowded(Exception):
    """A request is turned away. `retry_after`: seconds that it may be worth to wait before the next try."""

    def __init__(self, status: int, reason: str, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


class Queue:
    """Lets `max_concurrent_requests` in; `queue_size` more may wait, each for `queue_timeout_secs` at most."""

    def __init__(self, config: Config, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._turnstile = Turnstile(lambda: config.max_concurrent_requests)
        metrics.queue_depth.set_function(lambda: self._turnstile.waiting)

    def join(self) -> Entry | None:
        """The way in of one client request; None if there is no limit."""
        return Entry(self, self._place()) if self._config.max_concurrent_requests > 0 else None

    def _place(self) -> Place | None:
        """None if the queue is full."""
        place = self._turnstile.join()
        if place.turn.is_set() or self._turnstile.waiting <= self._config.queue_size:
            return place
        place.leave()
        return None

    async def admit(self, place: Place | None) -> None:
        """Return when the turn of the place has come; None is turned away. Raises `Crowded`."""
        limits = f"{self._config.max_concurrent_requests} requests are being served"
        if place is None:
            raise self._crowded(429, "queue_full", f"{limits}, and {self._config.queue_size} wait already")
        with trio.CancelScope(deadline=place.joined + self._config.queue_timeout_secs):
            await place.turn.wait()
        if not place.turn.is_set():
            waited = f"{self._config.queue_timeout_secs:g} s in the queue were not enough"
            raise self._crowded(503, "queue_timeout", f"{limits}, and {waited}")

    def told(self, refusal: Crowded | None, waited: float) -> None:
        """A request was turned away, or let in, after so many seconds."""
        if refusal is not None:
            self._metrics.queue_refusals_total(refusal.reason).inc()
        else:
            self._metrics.queue_wait_seconds.observe(waited)

    def _crowded(self, status: int, reason: str, message: str) -> Crowded:
        # It takes that long at least, as the first in the queue knows.
        return Crowded(status, reason, message, max(1, math.ceil(self._turnstile.patience)))


class Entry:
    """One client request's way in, shared by the answers that it is split into: `with entry: await entry.wait()`."""

    __slots__ = ("_place", "_queue", "_since", "_told")

    def __init__(self, queue: Queue, place: Place | None) -> None:
        self._queue = queue
        self._place = place
        self._since = trio.current_time()
        self._told = False

    async def wait(self) -> None:
        """Return when the request may be served. Raises `Crowded`."""
        try:
            await self._queue.admit(self._place)
        except Crowded as exc:
            self._tell(exc)
            raise
        self._tell(None)

    def _tell(self, refusal: Crowded | None) -> None:
        """For the metrics: once, however many answers wait."""
        if not self._told:
            self._told = True
            self._queue.told(refusal, trio.current_time() - self._since)

    def __enter__(self) -> Entry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._place is not None:
            self._place.leave()
