"""Bytes on their way in one direction of a connection."""

from __future__ import annotations

import enum
from collections import deque
from math import inf

import trio

from dyn_testkit.simnet.bell import Bell
from dyn_testkit.simnet.fragmentation import Cutter
from dyn_testkit.simnet.lane import Lane

#: Bytes that travel together where the bandwidth is limited.
_SEGMENT = 1460


class Signal(enum.Enum):
    """What travels behind the bytes."""

    END = enum.auto()  #: FIN: the writer writes no more
    GONE = enum.auto()  #: the writer has closed: a FIN, and what the reader still writes to it finds nobody
    RESET = enum.auto()  #: RST


class Pipe:
    """One direction: a window of bytes, each stamped with the time of its arrival.

    Nothing moves by itself: `settle` lets arrive what is due, and is called before anything is looked at.
    """

    __slots__ = (
        "_cutter",
        "_dice",
        "_flight",
        "_flying",
        "_sent_off",
        "broken",
        "data",
        "ended",
        "gone",
        "lane",
        "readable",
        "writable",
    )

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        #: Arrived, not read yet.
        self.data = bytearray()
        #: FIN has arrived, or more.
        self.ended = False
        #: The writer's end is known to be closed: what is written to it finds nobody.
        self.gone = False
        #: RST has arrived.
        self.broken = False
        #: For the reading end: something is there, or is on its way.
        self.readable = Bell()
        #: For the writing end: there may be room, or nobody to write to.
        self.writable = Bell()
        #: In the order of writing: what is due before its predecessor arrives with it.
        self._flight: deque[tuple[float, bytes | Signal]] = deque()
        #: Bytes in `_flight`.
        self._flying = 0
        #: When the last byte so far has been sent off, where the bandwidth is limited.
        self._sent_off = 0.0
        self._dice = lane.dice()
        self._cutter = Cutter(self._dice)

    @property
    def due(self) -> float:
        """When something arrives, in s of trio's clock; `inf` if nothing does."""
        return self._flight[0][0] if self._flight else inf

    @property
    def room(self) -> int:
        """How many bytes may be written now. Negative after the buffer was made smaller."""
        return self.lane.link.buffer - len(self.data) - self._flying

    def settle(self) -> None:
        """Let arrive what is due."""
        if self._flight:
            now = trio.current_time()
            while self._flight and self._flight[0][0] <= now:
                self._land(self._flight.popleft()[1])

    def put(self, data: memoryview) -> int:
        """Write what fits; says how much that was."""
        count = min(len(data), self.room)
        if count <= 0:
            return 0
        if self._flight or not self.lane.direct:
            idle = not self._flight
            self._flying += count
            self._launch(bytes(data[:count]))
            if idle:  # else the reader knows when to look again
                self.readable.ring()
        else:
            self.data += data[:count]
            self.readable.ring()
        return count

    def get(self, most: int) -> bytes:
        """Read up to so many bytes of what is there."""
        data = self.data
        count = min(most, self._cutter.take(self.lane.link.fragmentation, len(data)))
        taken = bytes(data[:count])
        del data[:count]
        self.writable.ring()
        return taken

    def signal(self, what: Signal) -> None:
        """Send it behind the bytes."""
        if self._flight or not self.lane.direct:
            self._launch(what)
        else:
            self._land(what)
        self.readable.ring()

    def resend(self) -> None:
        """The lane was cut or healed: what has not arrived is sent again now, as TCP does."""
        self.settle()
        if self._flight:
            lost, self._flight = self._flight, deque()
            self._sent_off = 0.0
            for _, item in lost:
                self._launch(item)
            self.readable.ring()

    def discard(self) -> None:
        """The reader has closed. Who waits for room has it now, and looks when it will learn that nobody reads."""
        self.data.clear()
        self._drop_flight()
        self.readable.ring()
        self.writable.ring()

    def reset(self) -> None:
        """An RST out of nowhere, now: what has arrived (see `settle`) can still be read, the rest never arrives."""
        self._drop_flight()
        self._land(Signal.RESET)
        self.readable.ring()
        self.writable.ring()

    def _drop_flight(self) -> None:
        self._flight.clear()
        self._flying = 0

    def _launch(self, item: bytes | Signal) -> None:
        now, bandwidth = trio.current_time(), self.lane.link.bandwidth
        if bandwidth is None or isinstance(item, Signal):
            self._stamp(now, item)
            return
        self._sent_off = max(now, self._sent_off)
        for at in range(0, len(item), _SEGMENT):
            segment = item[at : at + _SEGMENT]
            self._sent_off += len(segment) / bandwidth
            self._stamp(self._sent_off, segment)

    def _stamp(self, sent_off: float, item: bytes | Signal) -> None:
        self._flight.append((sent_off + self.lane.delay(self._dice), item))

    def _land(self, item: bytes | Signal) -> None:
        if isinstance(item, bytes):
            self._flying -= len(item)
            self.data += item
            return
        self.ended = True
        self.gone = self.gone or item is not Signal.END
        self.broken = self.broken or item is Signal.RESET
