"""What can be told of a simulated network: one `NetEvent` for each thing that happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import trio

#: Of connections; `source` and `target` are `host:port`, source is who did it or whose bytes they are:
#:  - dial: source asks target for a connection; connected, refused: and got it, or was told that it gets none
#:  - accepted: target's listener gave out the connection that source had dialled
#:  - sent: source handed `size` bytes over; received: target read `size` bytes that source had sent
#:  - shut: source sends no more (FIN) but still reads; closed: source closed in good order
#:  - eof: target read the end of what source sent
#:  - reset: source aborted, or `SimNetwork.reset` broke the connection at both ends
#:
#: Of faults, named as the methods of `SimNetwork`, only if they changed something:
#:  - partition, heal: bytes from host source to host target; link: the link between the two
#:  - refuse, hang, accept, deafen, hear: the address target; source is empty
Kind = Literal[
    "dial",
    "connected",
    "refused",
    "accepted",
    "sent",
    "received",
    "shut",
    "closed",
    "eof",
    "reset",
    "partition",
    "heal",
    "link",
    "refuse",
    "hang",
    "accept",
    "deafen",
    "hear",
]


@dataclass(frozen=True, slots=True)
class NetEvent:
    """Something happened. A function of the seed and the program: no ids, no wall time."""

    #: s of trio's clock: virtual time under `MockClock`, which starts at 0. 0 for what is done before trio runs.
    time: float
    kind: Kind
    source: str
    target: str
    #: Bytes; 0 for what is neither sent nor received.
    size: int = 0


#: Called at once for each event, from within the network: it must neither block nor call back.
Observer = Callable[[NetEvent], None]


class Trace:
    """Puts the time to what is told."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe

    def __call__(self, kind: Kind, source: str, target: str, size: int = 0) -> None:
        try:
            now = trio.current_time()
        except RuntimeError:
            now = 0.0
        self._observe(NetEvent(now, kind, source, target, size))
