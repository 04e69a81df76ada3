"""What is between two hosts."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from dyn_testkit.simnet.fragmentation import WHOLE, Fragmentation


@dataclass(frozen=True, slots=True)
class Link:
    """How bytes travel between two hosts, the same in both directions. Raises `ValueError` for what cannot be.

    All of it holds for each direction of each connection by itself: connections do not share the bandwidth.
    """

    #: s, one way. A dial takes two of them.
    latency: float = 0.0
    #: s. Each write takes 0 to this much longer, uniformly; it never overtakes what was written before.
    jitter: float = 0.0
    #: Bytes/s; None: no limit. Bytes then come in segments of up to 1460.
    bandwidth: float | None = None
    #: How reads cut what has arrived.
    fragmentation: Fragmentation = WHOLE
    #: Bytes written and not yet read, on their way or arrived, before the writer has to wait. It is also a window:
    #: no more than this is on its way at a time, so a long way limits the throughput to `buffer / latency`.
    buffer: int = 65536

    def __post_init__(self) -> None:
        for name in ("latency", "jitter"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not a number of seconds from 0 on")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"bandwidth: {self.bandwidth!r} bytes/s would let nothing through; use a partition")
        if self.buffer < 1:
            raise ValueError(f"buffer: {self.buffer!r} bytes would let nothing through; use a partition")

    @property
    def instant(self) -> bool:
        """What is written has arrived."""
        return not self.latency and not self.jitter and self.bandwidth is None
