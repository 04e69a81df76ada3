"""Only so many at a time; the others wait in the order of coming."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import trio


class Turnstile:
    """Lets in as many as `limit()` says. It is asked anew whenever somebody comes or leaves, or `look` is called."""

    def __init__(self, limit: Callable[[], float]) -> None:
        self._limit = limit
        self._inside: set[Place] = set()
        self._waiting: dict[Place, None] = {}

    def join(self) -> Place:
        """A place at the end of the queue; its turn has come at once if there is room."""
        place = Place(self)
        self._waiting[place] = None
        self._admit()
        return place

    @property
    def inside(self) -> int:
        """How many have had their turn and have not left."""
        return len(self._inside)

    @property
    def waiting(self) -> int:
        """How many have not had their turn yet."""
        return len(self._waiting)

    @property
    def patience(self) -> float:
        """Seconds that the first in the queue has waited; 0 if nobody waits."""
        first = next(iter(self._waiting), None)
        return 0.0 if first is None else trio.current_time() - first.joined

    def look(self) -> None:
        """The limit may have become another one."""
        self._admit()

    def leave(self, place: Place) -> None:
        """Give a place up, whether its turn has come or not."""
        self._inside.discard(place)
        self._waiting.pop(place, None)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._inside) < self._limit():
            place = next(iter(self._waiting))
            del self._waiting[place]
            self._inside.add(place)
            place.turn.set()


class Place:
    """`with turnstile.join() as place: await place.turn.wait()`. Leaving twice is leaving once."""

    __slots__ = ("_turnstile", "joined", "turn")

    def __init__(self, turnstile: Turnstile) -> None:
        #: When it was taken, on the loop's clock.
        self.joined = trio.current_time()
        self.turn = trio.Event()
        self._turnstile = turnstile

    def leave(self) -> None:
        """Let the next one in."""
        self._turnstile.leave(self)

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()
