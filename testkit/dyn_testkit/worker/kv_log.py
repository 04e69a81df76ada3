"""The batches of one rank: numbered, kept for a replay, and what can go wrong with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio

from dyn_testkit.worker.kv_cache import Event, KvCache, KvOptions


@dataclass(slots=True)
class KvFaults:
    """What goes wrong with the batches of one worker; numbers are those of batches, of any rank."""

    #: Never sent, but replayed.
    skip: set[int] = field(default_factory=set)
    #: Neither sent nor replayed.
    lose: set[int] = field(default_factory=set)
    #: A replay is answered when this is set, with what there was when it was asked for; None: at once.
    late: trio.Event | None = None


class KvLog:
    """What one rank publishes."""

    def __init__(self, rank: int, options: KvOptions, faults: KvFaults) -> None:
        self.options = options
        self.faults = faults
        #: The number of the next batch.
        self.next = options.first
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=options.buffer_steps)
        #: Called with each batch that is sent.
        self.listeners: list[Callable[[int, bytes], None]] = []
        self.cache = KvCache(options.page_size, options.capacity, self.publish, coalesce=options.coalesce)
        self._rank = rank

    def begin_anew(self) -> None:
        """As a new process: an empty cache, of which nothing is told, and numbers from the first on."""
        self.next = self.options.first
        self.kept.clear()
        self.cache.forget()

    def publish(self, events: list[Event]) -> None:
        """Number a batch, keep it, and send it."""
        number, self.next = self.next, self.next + 1
        told: list[Any] = [list(event.values()) for event in events] if self.options.arrays else list(events)
        payload = msgspec.msgpack.encode([trio.current_time(), told, self._rank])
        if number not in self.faults.lose:
            self.kept.append((number, payload))
        if number not in self.faults.skip | self.faults.lose:
            for listener in self.listeners:
                listener(number, payload)
