"""How wide a row is: bytes of a position's numbers, layers x chosen x 4.

Nothing but this tells half of the rows from rows of half the width, and SGLang 0.5.23 does not say it: neither its
`/server_info` nor its `/model_info` has a number of layers, or of experts chosen. So it is learnt from values. Whoever
gives too few rows, or too many, or narrower numbers, gives another width; so a width is sure once two workers have
given it, and those for different numbers of rows: a worker alone makes nothing sure, and what it then gets wrong in
another way each time does not even agree with itself.
"""

from __future__ import annotations

#: Of each worker so many numbers of rows are kept: of two, one differs from whatever another worker has.
_ENOUGH = 2
#: So many workers are kept, the newest.
_MOST = 64


class Widths:
    """Those of one field of one model. There may be several: models may share the name that they are known by."""

    __slots__ = ("_heard", "sure")

    def __init__(self) -> None:
        self.sure: set[int] = set()
        #: By worker: by the number of rows that a value was to have, the width that this makes.
        self._heard: dict[str, dict[int, int]] = {}

    def fits(self, width: int) -> bool:
        """Nothing speaks against it. A value without rows has the width 0."""
        return not self.sure or not width or width in self.sure

    def curious(self, worker: str | None, count: int) -> bool:
        """Would a value of so many rows from this worker teach anything?"""
        told = self._heard.get(worker or "", {})
        return bool(worker and count) and not self.sure and count not in told and len(told) < _ENOUGH

    def hear(self, worker: str | None, count: int, width: int) -> None:
        """A worker (what tells its process from others; None: nothing does) gave so many rows of this width."""
        if worker is None or not width or width in self.sure:
            return
        others = (told for name, told in self._heard.items() if name != worker)
        if any(one == width and rows != count for told in others for rows, one in told.items()):
            self.agree(width)
            return
        told = self._heard.pop(worker, {})
        told.pop(count, None)
        self._heard[worker] = dict([*told.items(), (count, width)][-_ENOUGH:])
        if len(self._heard) > _MOST:
            del self._heard[next(iter(self._heard))]

    def agree(self, width: int) -> None:
        """Two workers gave it, for different numbers of rows."""
        self.sure.add(width)
