"""What all connections from one host to another share."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import trio

from dyn_testkit.simnet.bell import Bell
from dyn_testkit.simnet.dice import Dice
from dyn_testkit.simnet.link import Link

if TYPE_CHECKING:
    from dyn_testkit.simnet.connection import SimConnection


class Lane:
    """The way from one host to another; the way back is another lane."""

    def __init__(self, seed: int, source: str, target: str, link: Link) -> None:
        self.link = link
        #: Nothing comes through.
        self.cut = False
        #: What is written has arrived. Kept, not computed: it is asked for each write.
        self.direct = link.instant
        #: The ends that write into this lane, of connections that somebody still has open; oldest first.
        self.ends: dict[SimConnection, None] = {}
        self._key = (seed, source, target)
        self._opened = 0
        self._dice = self.dice()
        self._changed = Bell()

    def dice(self) -> Dice:
        """For the next connection; the first ones are the lane's own, for its dials."""
        self._opened += 1
        return Dice(*self._key, self._opened)

    def delay(self, dice: Dice) -> float:
        """How long the next packet takes, in s: `inf` if it is lost."""
        if self.cut:
            return inf
        link = self.link
        return link.latency + dice.random("jitter").uniform(0, link.jitter) if link.jitter else link.latency

    def relink(self, link: Link) -> bool:
        """Another link, for what is written from now on. False if it is the same."""
        if link == self.link:
            return False
        self.link = link
        self._update()
        for end in self.ends:
            end.outgoing.writable.ring()  # the buffer may be larger
        return True

    def set_cut(self, cut: bool) -> bool:
        """Cut or heal. False if it was so before."""
        if cut == self.cut:
            return False
        self.cut = cut
        self._update()
        for end in self.ends:
            end.resend()
        self._changed.ring()
        return True

    def _update(self) -> None:
        self.direct = self.link.instant and not self.cut

    async def cross(self) -> None:
        """Return when a packet that is sent now has come through; it is sent again if it got lost."""
        while not self.direct:
            arrival = trio.current_time() + self.delay(self._dice)
            await self._changed.wait(arrival)
            if trio.current_time() >= arrival:
                return
