"""How tasks learn that something changed."""

from __future__ import annotations

from math import inf

import trio


class Bell:
    """Wakes whoever waits now; costs nothing if nobody does."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: trio.Event | None = None

    def ring(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self, until: float = inf) -> None:
        """Return at the next ring, or at the time `until`, in s of trio's clock. Look again at what is waited for."""
        if self._event is None:
            self._event = trio.Event()
        if until == inf:
            await self._event.wait()
        else:
            with trio.CancelScope(deadline=until):
                await self._event.wait()
