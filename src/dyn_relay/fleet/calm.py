"""After an abort that nobody explains, with `--on-abort resume`: when may answers go on?

A trainer that updates weights aborts everything at every engine, again and again until nothing runs there, and then
pauses them. What is resumed into that is aborted once more, and keeps the drain from ending. So nothing is resumed
until the last abort is some time ago and no worker says that it is paused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

#: Seconds between two questions whether anybody is still paused.
LOOK_INTERVAL = 1.0


class Calm:
    """Who waits for it may go on."""

    def __init__(self, settle: float, clock: Callable[[], float], unpaused: Callable[[], Awaitable[bool]]) -> None:
        """`settle`: seconds without an abort. `unpaused` asks the workers."""
        self._settle = settle
        self._clock = clock
        self._unpaused = unpaused
        #: The last abort; None once it is over.
        self._disturbed: float | None = None
        self._looking = trio.Lock()

    def disturb(self) -> None:
        """An engine has aborted a request, and nobody told us why."""
        self._disturbed = self._clock()

    @property
    def disturbed(self) -> bool:
        """There is something to wait for."""
        return self._disturbed is not None

    async def wait(self) -> None:
        """Return as soon as answers may go on."""
        while self._disturbed is not None:
            async with self._looking:  # one looks for all
                await self._look()

    async def _look(self) -> None:
        while (since := self._disturbed) is not None:
            left = since + self._settle - self._clock()
            if left > 0:
                await trio.sleep(left)
            elif not await self._unpaused():
                await trio.sleep(LOOK_INTERVAL)
            elif self._disturbed == since:
                self._disturbed = None
