"""Following one publisher: every batch once, in order, or from scratch.

The publisher numbers its batches from 0 (some from 1) and drops what a subscriber does not take in time; a process that
begins anew begins to count anew. So there are three cases beside "the next one":

* a number *beyond* the next: a gap. What is missing is asked for again, and if it is gone for good, all that was known
  of this cache is dropped, since any of it may have been removed meanwhile;
* a number at or below one *that the subscription has brought before*: another process;
* a number below the next that the subscription has not brought yet: known from a replay, and left out.

A restarted process may have come as far as the old count, or beyond, when its first batch arrives. Therefore a replay
begins with the last batch that was taken in: if that one is not the same bytes, its time included, another process
wrote it. The same is asked whenever the connection is a new one, and after some silence, when nothing else would tell
that the last batches were lost. Each replay has a connection of its own, so that the late answer to one reaches nobody.
Source: SGLang 0.5.23, `disaggregation/kv_events.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import trio

#: Seconds until a replay that brings nothing more is given up. The publisher looks for questions every 0.1 s.
REPLAY_TIMEOUT = 5.0
#: Seconds of silence after which it is asked whether anything was lost.
QUIET = 10.0
#: The number of the message that ends a replay.
_END = 2**64 - 1


class Wire(Protocol):
    """A message queue, as far as it is used here."""

    async def receive(self) -> list[bytes]:
        """The next message, in frames; none of them: the connection is a new one, of maybe another process."""

    def send(self, frames: list[bytes]) -> None:
        """Queue a message."""


@dataclass(frozen=True, slots=True)
class Source:
    """How one publisher is reached."""

    subscribe: Callable[[], AbstractContextManager[Wire]]
    #: Connects to ask for a replay; None if it keeps nothing.
    ask: Callable[[], AbstractContextManager[Wire]] | None
    topic: bytes = b""


@dataclass(frozen=True, slots=True)
class Follower:
    """What is done with what a publisher says."""

    #: Take in the payload of a batch.
    apply: Callable[[bytes], None]
    #: Forget all that was taken in.
    clear: Callable[[], None]
    #: The publisher is a new process; called after `clear`.
    restarted: Callable[[], None]
    #: Count what happened: "gap", "replayed", "lost", "restarted", "timeout", "garbage".
    count: Callable[[str], object]


class _Had(Enum):
    """What a replay brought."""

    SOME = auto()
    NOTHING = auto()  #: the end alone: there is nothing that new
    OTHER = auto()  #: another process's batch where the last one should be
    SILENCE = auto()  #: no answer, or none that ended


class Subscriber:
    """One publisher, followed."""

    def __init__(self, source: Source, follower: Follower, quiet: float = QUIET) -> None:
        """`quiet`: seconds of silence until it is asked whether anything was lost."""
        self._source = source
        self._follower = follower
        self._quiet = quiet if source.ask else math.inf
        self._keeps = False  # it has replayed something: it has what it published last
        self._forget()

    def _forget(self) -> None:
        self._next: int | None = None  # None: nothing was taken in yet
        self._last = b""  # payload of the batch before
        self._heard = -1  # the newest that the subscription has brought

    async def run(self) -> None:
        """Follow until cancelled."""
        with self._source.subscribe() as live:
            await self._catch_up()
            while True:
                frames: list[bytes] = []
                with trio.move_on_after(self._quiet):
                    frames = await live.receive()
                if not frames:
                    await self._catch_up()
                elif len(frames) != 3 or len(frames[1]) != 8:
                    self._follower.count("garbage")
                elif frames[0] == self._source.topic:
                    await self._hear(int.from_bytes(frames[1]), frames[2])

    async def _hear(self, number: int, payload: bytes) -> None:
        if number <= self._heard:
            self._restart()
        if number > (1 if self._next is None else self._next):
            self._follower.count("gap")
        if self._heard < 0 or self._next is None or number > self._next:
            # Also the first time: what a replay brought may be of the process before.
            sure = await self._catch_up()
            if self._heard < 0 and self._next is not None and not sure:
                self._follower.count("lost")
                self._follower.clear()
                self._forget()
        self._heard = number
        if self._next is None or number >= self._next:
            self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> None:
        if self._next is not None and number != self._next:
            self._follower.count("lost")
            self._follower.clear()
        self._follower.apply(payload)
        self._next, self._last = number + 1, payload

    def _restart(self) -> None:
        self._forget()
        self._follower.count("restarted")
        self._follower.clear()
        self._follower.restarted()

    async def _catch_up(self) -> bool:
        """Take in what the publisher still has beyond the last batch, from the beginning if it is another one.

        False if it should have told and did not.
        """
        if self._next is None:
            return await self._replay(0) is not _Had.SILENCE
        had = await self._replay(self._next - 1)
        if had is _Had.NOTHING:
            had = await self._replay(0, peek=True)
            if self._keeps and had is not _Had.SILENCE:
                had = _Had.OTHER  # it has batches, but not so many
        if had is _Had.OTHER:
            self._restart()
            had = await self._replay(0)
        return had is not _Had.SILENCE or self._source.ask is None

    async def _replay(self, since: int, *, peek: bool = False) -> _Had:
        """Take in all from `since` on; `peek`: nothing, only see whether there is something."""
        if self._source.ask is None:
            return _Had.SILENCE
        had = _Had.NOTHING
        with self._source.ask() as wire:
            wire.send([b"", since.to_bytes(8)])
            while had is not _Had.SOME or not peek:
                frames: list[bytes] = []
                with trio.move_on_after(REPLAY_TIMEOUT):
                    frames = await wire.receive()
                if not frames:
                    self._follower.count("timeout")
                    return _Had.SILENCE
                if len(frames) != 4 or len(frames[2]) != 8:
                    self._follower.count("garbage")
                    continue
                number, payload = int.from_bytes(frames[2]), frames[3]
                if number == _END:
                    break
                if frames[1] != self._source.topic:
                    continue
                had, self._keeps = _Had.SOME, True
                if peek:
                    continue
                if self._next is not None and number == self._next - 1 and payload != self._last:
                    return _Had.OTHER
                if self._next is None or number >= self._next:
                    self._follower.count("replayed")
                    self._take(number, payload)
        return had
