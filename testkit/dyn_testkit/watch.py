"""What the clients of a run have seen so far, and a way to wait for it; a stream read line by line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio


@dataclass(slots=True)
class Watch:
    """What the clients of a load have seen so far, and a way to wait for it."""

    #: Tokens seen by the client of each stream that has had an event.
    tokens: dict[str, int] = field(default_factory=dict)
    #: Requests whose client is done, well or not.
    ended: set[str] = field(default_factory=set)
    _waiting: list[tuple[Callable[[Watch], bool], trio.Event]] = field(default_factory=list)

    async def until(self, condition: Callable[[Watch], bool]) -> None:
        """Return once `condition` holds; it is asked again after every event of every stream."""
        if not condition(self):
            event = trio.Event()
            self._waiting.append((condition, event))
            await event.wait()

    def saw(self, key: str, tokens: int) -> None:
        """A stream had an event."""
        self.tokens[key] = tokens
        self._wake()

    def finish(self, key: str) -> None:
        """A request ended."""
        self.ended.add(key)
        self._wake()

    def forget(self, key: str) -> None:
        """A request that has ended counts no more: for runs that are too long to keep all names."""
        self.tokens.pop(key, None)
        self.ended.discard(key)

    def _wake(self) -> None:
        for waiter in [waiter for waiter in self._waiting if waiter[0](self)]:
            self._waiting.remove(waiter)
            waiter[1].set()


def started(streams: int, tokens: int = 1) -> Callable[[Watch], bool]:
    """The condition that `streams` streams have at least `tokens` tokens."""
    return lambda watch: sum(seen >= tokens for seen in watch.tokens.values()) >= streams


class EventReader:
    """The lines of one stream in, what a `Record` keeps of them out."""

    def __init__(self, key: str, watch: Watch) -> None:
        self._events: list[str] = []
        self._times: list[float] = []
        self._stray: list[str] = []
        self._done = False
        self._key = key
        self._watch = watch

    def line(self, line: str, now: float) -> None:
        """Take one line, without its end, read at `now`."""
        if not line or line.startswith(":"):
            return
        if not line.startswith("data: ") or self._done:
            self._stray.append(line)
        elif line == "data: [DONE]":
            self._done = True
        else:
            self._events.append(line[6:])
            self._times.append(now)
            self._watch.saw(self._key, _tokens(line[6:]))

    def read(self) -> dict[str, Any]:
        """The fields of a record."""
        return {"events": self._events, "times": self._times, "stray": self._stray, "done": self._done}


class _Meta(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    meta_info: _Meta = msgspec.field(default_factory=_Meta)


_decoder = msgspec.json.Decoder(_Event)


def _tokens(text: str) -> int:
    """Tokens delivered as an event says; 0 if it does not."""
    try:
        return _decoder.decode(text).meta_info.completion_tokens
    except msgspec.DecodeError:
        return 0
