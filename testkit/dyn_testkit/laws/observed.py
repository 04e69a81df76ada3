"""What a law looks at: a request under a plan of faults, and what came of it.

A `Backend` turns a `Case` into `Observed`. The same law runs on every backend: a format's exchange without any I/O,
a router over the network in memory, a router over real sockets, processes, live engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dyn_testkit.client import Response
from dyn_testkit.faults import What, Where
from dyn_testkit.laws.answers import read_answer
from dyn_testkit.laws.sglang import SGLANG
from dyn_testkit.laws.wire import Wire
from dyn_testkit.simnet import WHOLE, Fragmentation
from dyn_testkit.worker import Dialect

#: What happens to one attempt; None: nothing.
Planned = tuple[Where, What] | None


@dataclass(frozen=True, slots=True)
class Case:
    """One request and what shall happen to it."""

    #: The client's body, as it is sent.
    body: bytes
    #: What happens to the i-th attempt that reaches a worker; attempts beyond the list live.
    faults: tuple[Planned, ...] = ()
    #: How the worker of the i-th attempt streams; the last one counts for all further attempts.
    dialects: tuple[Dialect, ...] = ("cumulative",)
    #: How bytes are cut on their way (where the level can do that).
    fragmentation: Fragmentation = WHOLE
    #: The router knows what its workers say of themselves (where the level can choose).
    introduced: bool = True
    #: Of pairs: what happens to the prefill worker's part in the i-th attempt; those beyond the list live.
    prefills: tuple[Planned, ...] = ()
    #: Of pairs: so many pieces of the decode worker's answer are read before the prefill worker's is there (where the
    #: level can choose).
    late: int = 0
    #: How the body is spelled, and the answers to it.
    wire: Wire = field(default=SGLANG, repr=False)

    @property
    def request(self) -> dict[str, Any]:
        """The body, parsed."""
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def streaming(self) -> bool:
        """The client asks for server-sent events."""
        return self.request.get("stream") is True

    def dialect(self, attempt: int) -> Dialect:
        """The dialect of an attempt's worker."""
        return self.dialects[min(attempt, len(self.dialects) - 1)]

    def fault(self, attempt: int) -> Planned:
        """What happens to an attempt."""
        return self.faults[attempt] if attempt < len(self.faults) else None

    def prefill(self, attempt: int) -> Planned:
        """What happens to the prefill worker's part in an attempt."""
        return self.prefills[attempt] if attempt < len(self.prefills) else None


@dataclass(slots=True)
class Attempt:
    """One dispatch, as the worker saw it."""

    #: The body that the worker got.
    body: bytes
    #: None: the backend has only one.
    dialect: Dialect | None = None
    fault: Planned = None
    #: The fault has happened.
    fired: bool = False
    #: The bytes that the worker sent back; what of it arrived is another matter (a reset drops what is on its way).
    wire: bytes = b""

    @property
    def sent(self) -> dict[str, Any]:
        """The body, parsed."""
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def answer(self) -> Response:
        """What the worker sent, as far as it came."""
        return read_answer(self.wire)


@dataclass(slots=True)
class Observed:
    """A case and what came of it."""

    case: Case
    #: What the client got.
    response: Response
    #: The dispatches that workers saw, in order.
    attempts: list[Attempt] = field(default_factory=list)
    #: Trace rows that the router wrote meanwhile; None if it keeps none.
    rows: Sequence[Mapping[str, Any]] | None = None
    #: What must be 0 once all is over, by name; None if the router does not tell.
    gauges: Mapping[str, float] | None = None
    #: Of pairs: what prefill workers saw, in order; `attempts` is what decode workers saw.
    prefills: list[Attempt] = field(default_factory=list)

    @property
    def request(self) -> dict[str, Any]:
        """The client's body, parsed."""
        return self.case.request

    def resumed(self, attempt: int) -> int:
        """Tokens that an attempt took for delivered: what its prompt is longer than the client's."""
        wire = self.case.wire
        return len(wire.prompt(self.attempts[attempt].body)) - len(wire.prompt(self.case.body))

    def prefill_of(self, attempt: int) -> Attempt | None:
        """What the prefill worker of an attempt saw; None if it saw nothing."""
        room = self.attempts[attempt].sent.get("bootstrap_room")
        return next((leg for leg in self.prefills if leg.sent.get("bootstrap_room") == room), None)

    def redialled(self, attempt: int) -> bool:
        """The attempt before this one died without a byte, as on an aged connection, and was sent again as it was."""
        before = self.attempts[attempt - 1] if attempt else None
        return before is not None and not before.wire and before.body == self.attempts[attempt].body

    @property
    def all_fired(self) -> bool:
        """No attempt was left alone."""
        return all(attempt.fired for attempt in self.attempts)

    def __str__(self) -> str:
        """For the message of a law that does not hold."""
        lines = [f"  {self.case!r}"]
        for number, attempt in enumerate(self.attempts):
            fired = "its fault fired" if attempt.fired else "left alone"
            what = f"attempt {number}, {attempt.dialect}" if attempt.dialect else f"attempt {number}"
            lines.append(f"  {what}, {fired}: {attempt.body.decode('utf-8', 'replace')}")
        for number, leg in enumerate(self.prefills):
            fired = f"{leg.fault} fired" if leg.fired else "left alone"
            lines.append(f"  prefill {number}, {fired}: {leg.body.decode('utf-8', 'replace')}")
        got = self.response
        ended = "complete" if got.complete else got.broken or "incomplete"
        lines.append(f"  the client got {got.status}, {ended}: {got.body[-600:]!r}")
        return "\n".join(lines)


class Backend(Protocol):
    """Anything that answers requests while its workers fail."""

    def observe(self, case: Case) -> Observed:
        """Send the request, let the faults happen, and come back when all is over."""
