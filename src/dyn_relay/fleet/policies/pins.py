"""Which target a session has been sent to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

#: Sessions that are remembered; a row takes about 250 bytes.
MOST = 1 << 18
#: Seconds after its last request in which a session's cache is still worth something.
IDLE = 3600.0


class Pins:
    """Ids of targets by session, the ones asked for most recently."""

    def __init__(self, clock: Callable[[], float], idle: float = IDLE, most: int = MOST) -> None:
        """`clock` in seconds; a pin that was not asked for or set in `idle` seconds is gone."""
        self._clock = clock
        self._idle = idle
        self._most = most
        self._pins: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, key: str) -> str:
        """The id; "" if there is none."""
        name = _name(key)
        target, at = self._pins.get(name, ("", 0.0))
        if not target:
            return ""
        if self._clock() - at > self._idle:
            del self._pins[name]
            return ""
        self.set(key, target)
        return target

    def set(self, key: str, target: str) -> None:
        """The session is at the target from now on."""
        name = _name(key)
        self._pins[name] = target, self._clock()
        self._pins.move_to_end(name)
        if len(self._pins) > self._most:
            self._pins.popitem(last=False)


def _name(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()  # a client's keys may be long
