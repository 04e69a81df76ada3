"""Faults of one worker, request by request: where in the answer, what happens, and proof that it happened.

A `FaultPlan` is given to a mock worker. Each `Fault` names a place in the answer, what happens there, and for which
requests. When one fires the plan records it and wakes whoever waits in `fired`, so that tests wait on events and never
on time. `verify` raises if a listed fault never happened: a test whose fault did not fire has tested nothing.

Tokens are counted from 1 within the attempt; `at_token` also counts back from the end of its budget. Requests to
`/generate` (and connections, for `BEFORE_ACCEPT`) are counted from 0.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import trio


class Spot(enum.Enum):
    """Places in an answer, in the order in which they are passed."""

    BEFORE_ACCEPT = "before_accept"  #: the connection is accepted by the system but never read
    AT_HEAD = "head"  #: the request was read, nothing was answered
    AT_BOOTSTRAP = "bootstrap"  #: P/D: the room is taken, the leg has not looked for the other one yet
    IN_TRANSFER = "transfer"  #: P/D: some of what prefill gives to decode is on its way, not all
    AFTER_TRANSFER = "transferred"  #: P/D: all of it is there; no token was answered
    AT_TOKEN = "token"  #: the event with token k is out; k = 0: the head is out, no event
    INSIDE_CHUNK_SIZE = "chunk_size"  #: the chunk-size line of the event with token k is out in part
    INSIDE_JSON = "json"  #: the event with token k is out up to a byte of its JSON
    AFTER_LAST_TOKEN = "last_token"  #: all tokens are out (in events without a finish), the finish is not
    AFTER_FINISH = "finish"  #: the event with the finish is out, `[DONE]` is not
    BEFORE_LAST_CHUNK = "last_chunk"  #: `[DONE]` is out, the terminating chunk is not
    AFTER_DONE = "done"  #: the whole answer is out; the connection would now be kept alive


@dataclass(frozen=True, slots=True)
class Where:
    """A place. `token` is the k of the token spots, `byte` an offset into the JSON text (clipped to its length).

    A unary answer has no events: the token spots come before its first byte; `INSIDE_CHUNK_SIZE` cuts its head,
    `INSIDE_JSON` its body, and the last three come after the body.
    """

    spot: Spot
    token: int = 0
    byte: int = 0


BEFORE_ACCEPT = Where(Spot.BEFORE_ACCEPT)
AT_HEAD = Where(Spot.AT_HEAD)
AT_BOOTSTRAP = Where(Spot.AT_BOOTSTRAP)
IN_TRANSFER = Where(Spot.IN_TRANSFER)
AFTER_TRANSFER = Where(Spot.AFTER_TRANSFER)
AFTER_LAST_TOKEN = Where(Spot.AFTER_LAST_TOKEN)
AFTER_FINISH = Where(Spot.AFTER_FINISH)
BEFORE_LAST_CHUNK = Where(Spot.BEFORE_LAST_CHUNK)
AFTER_DONE = Where(Spot.AFTER_DONE)


def at_token(token: int) -> Where:
    """After the event with this token; 0: after the head; -k: when k tokens of the budget are left, of more than k."""
    return Where(Spot.AT_TOKEN, token)


def inside_json(token: int, byte: int) -> Where:
    """In the JSON of the event with this token."""
    return Where(Spot.INSIDE_JSON, token, byte)


def inside_chunk_size(token: int) -> Where:
    """In the chunk-size line before the event with this token."""
    return Where(Spot.INSIDE_CHUNK_SIZE, token)


class Kind(enum.Enum):
    """What can happen."""

    RESET = "reset"  #: RST
    CLOSE = "close"  #: FIN
    STALL = "stall"  #: silence with the socket open, until `FaultPlan.release`
    KILL_WORKER = "kill"  #: the whole worker dies, with all its connections
    STATUS = "status"  #: an HTTP error instead of the answer; only at the head
    ABORT_EVENT = "abort"  #: the scheduler aborts the request with a status code (None: as if somebody asked)
    GARBAGE = "garbage"  #: bytes that are not the protocol of the place, then silence
    EMPTY_200 = "empty_200"  #: a clean, complete 200 without a body; only at the head
    COMMENTS_ONLY = "comments"  #: a clean, complete stream of SSE comments; only at the head
    DELAY = "delay"  #: silence for `code` milliseconds, then it goes on

    # Of gRPC alone; requests over HTTP never get them.
    GRPC_STATUS = "grpc"  #: the call ends with this status code
    RST_STREAM = "rst_stream"  #: the call ends with RST_STREAM and this HTTP/2 error code
    GOAWAY = "goaway"  #: GOAWAY with this HTTP/2 error code, and the connection closes with all its calls
    DRAIN = "drain"  #: GOAWAY that spares all calls so far, this one included: it goes on
    UNPROCESSED = "unprocessed"  #: GOAWAY that spares earlier calls: this one and later ones were not processed
    BAD_LENGTH = "bad_length"  #: a length prefix beyond all limits, then the status OK
    TRUNCATED = "truncated"  #: half of a message, then the status OK
    COMPRESSED = "compressed"  #: a message whose flag says that it is compressed, then the status OK
    NOT_PROTOBUF = "not_protobuf"  #: a message that is none, then the status OK
    NO_TRAILERS = "no_trailers"  #: the end without a status


#: Only possible instead of an answer.
_HEAD_ONLY = frozenset({Kind.STATUS, Kind.EMPTY_200, Kind.COMMENTS_ONLY})
#: Can be injected where a well-formed event may stand.
_EVENT_SPOTS = frozenset(
    {Spot.AT_TOKEN, Spot.AFTER_LAST_TOKEN, Spot.AT_BOOTSTRAP, Spot.IN_TRANSFER, Spot.AFTER_TRANSFER}
)
#: Requests over HTTP have no such thing.
GRPC_ONLY = frozenset(
    {
        Kind.GRPC_STATUS,
        Kind.RST_STREAM,
        Kind.GOAWAY,
        Kind.DRAIN,
        Kind.UNPROCESSED,
        Kind.BAD_LENGTH,
        Kind.TRUNCATED,
        Kind.COMPRESSED,
        Kind.NOT_PROTOBUF,
        Kind.NO_TRAILERS,
    }
)
#: All that can happen to a connection nobody has read.
_CONNECTION_KINDS = frozenset({Kind.RESET, Kind.CLOSE, Kind.STALL, Kind.KILL_WORKER, Kind.DELAY})


@dataclass(frozen=True, slots=True)
class What:
    """What happens; `code` is the number that the kind names, `retry_after` the header of `STATUS`."""

    kind: Kind
    code: int | None = None
    retry_after: str | None = None


RESET = What(Kind.RESET)
CLOSE = What(Kind.CLOSE)
STALL = What(Kind.STALL)
KILL_WORKER = What(Kind.KILL_WORKER)
GARBAGE = What(Kind.GARBAGE)
EMPTY_200 = What(Kind.EMPTY_200)
COMMENTS_ONLY = What(Kind.COMMENTS_ONLY)
GOAWAY = What(Kind.GOAWAY)
DRAIN = What(Kind.DRAIN)
UNPROCESSED = What(Kind.UNPROCESSED)
BAD_LENGTH = What(Kind.BAD_LENGTH)
TRUNCATED = What(Kind.TRUNCATED)
COMPRESSED = What(Kind.COMPRESSED)
NOT_PROTOBUF = What(Kind.NOT_PROTOBUF)
NO_TRAILERS = What(Kind.NO_TRAILERS)


def status(code: int, retry_after: str | None = None) -> What:
    """An HTTP error with this status."""
    return What(Kind.STATUS, code, retry_after)


def abort_event(code: int | None) -> What:
    """A scheduler abort with this status code."""
    return What(Kind.ABORT_EVENT, code)


def delay(milliseconds: int) -> What:
    """A pause."""
    return What(Kind.DELAY, milliseconds)


def grpc_status(code: int) -> What:
    """A gRPC status."""
    return What(Kind.GRPC_STATUS, code)


def rst_stream(code: int) -> What:
    """RST_STREAM with this HTTP/2 error code."""
    return What(Kind.RST_STREAM, code)


def goaway(code: int) -> What:
    """GOAWAY with this HTTP/2 error code, and the end of the connection."""
    return What(Kind.GOAWAY, code)


@dataclass(frozen=True, slots=True)
class Seen:
    """A request, as a selector sees it: its number on this worker, its rid and its body (empty for a connection)."""

    index: int
    rid: str = ""
    body: bytes = b""
    #: It came over gRPC; its body is the one that HTTP would have had.
    grpc: bool = False


Selector = Callable[[Seen], bool]


def every(seen: Seen) -> bool:
    """All requests."""
    return True


def nth(index: int) -> Selector:
    """One request, counted from 0."""
    return lambda seen: seen.index == index


def first(count: int) -> Selector:
    """The first requests; later ones work."""
    return lambda seen: seen.index < count


def rid_begins(prefix: str) -> Selector:
    """Requests by the beginning of their rid."""
    return lambda seen: seen.rid.startswith(prefix)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Raises `ValueError` if it cannot happen at its place."""

    where: Where
    what: What
    on: Selector = every

    def __post_init__(self) -> None:
        kind, spot = self.what.kind, self.where.spot
        possible = (
            (kind not in _HEAD_ONLY or spot is Spot.AT_HEAD)
            and (kind is not Kind.ABORT_EVENT or spot in _EVENT_SPOTS)
            and (spot is not Spot.BEFORE_ACCEPT or kind in _CONNECTION_KINDS)
            and (self.where.token >= 0 or spot is Spot.AT_TOKEN)
        )
        if not possible:
            raise ValueError(f"{kind.value} cannot happen at {spot.value}")

    def __str__(self) -> str:
        code = "" if self.what.code is None else f"({self.what.code})"
        return f"{self.what.kind.value}{code}@{self.where.spot.value}:{self.where.token}:{self.where.byte}"


@dataclass(frozen=True, slots=True)
class Firing:
    """A fault that happened, to which request."""

    fault: Fault
    seen: Seen


class FaultNeverHappened(AssertionError):
    """A listed fault did not fire."""


@dataclass(slots=True)
class FaultPlan:
    """The faults of one worker. The first one whose selector takes a request is that request's fault."""

    faults: tuple[Fault, ...] = ()
    firings: list[Firing] = field(default_factory=list)
    revoked: set[Fault] = field(default_factory=set)
    _changed: trio.Event = field(default_factory=trio.Event)
    _released: trio.Event = field(default_factory=trio.Event)

    @classmethod
    def of(cls, *faults: Fault) -> FaultPlan:
        """A plan of these faults."""
        return cls(faults)

    @classmethod
    def in_order(cls, faults: Iterable[tuple[Where, What] | None]) -> FaultPlan:
        """The i-th request gets the i-th entry (None: no fault); requests beyond the list work."""
        numbered = enumerate(faults)
        return cls(tuple(Fault(entry[0], entry[1], nth(index)) for index, entry in numbered if entry is not None))

    def add(self, fault: Fault) -> None:
        """One more fault, behind the others. Raises `TypeError` for what is none."""
        if not isinstance(fault, Fault):
            raise TypeError(f"a Fault is wanted, not {fault!r}: Fault(where, what)")
        self.faults = (*self.faults, fault)

    def revoke(self, fault: Fault) -> None:
        """From now on it does not happen, not even to a request that it has been chosen for."""
        self.revoked.add(fault)

    def for_request(self, seen: Seen) -> Fault | None:
        """The fault of a request."""

        def eligible(fault: Fault) -> bool:
            return fault.where.spot is not Spot.BEFORE_ACCEPT and (seen.grpc or fault.what.kind not in GRPC_ONLY)

        return self._pick(seen, eligible)

    def for_connection(self, index: int) -> Fault | None:
        """The fault of a connection that was just accepted."""
        return self._pick(Seen(index), lambda fault: fault.where.spot is Spot.BEFORE_ACCEPT)

    def _pick(self, seen: Seen, eligible: Callable[[Fault], bool]) -> Fault | None:
        armed = (fault for fault in self.faults if fault not in self.revoked)
        return next((fault for fault in armed if eligible(fault) and fault.on(seen)), None)

    def record(self, fault: Fault, seen: Seen) -> None:
        """Called by the worker at the moment a fault happens."""
        self.firings.append(Firing(fault, seen))
        self._changed.set()
        self._changed = trio.Event()

    def count(self, fault: Fault | None = None) -> int:
        """How often a fault (or any) has happened."""
        return sum(fault is None or firing.fault == fault for firing in self.firings)

    async def fired(self, fault: Fault | None = None, times: int = 1) -> None:
        """Return once a fault (or any) has happened this often."""
        while self.count(fault) < times:
            await self._changed.wait()

    def release(self) -> None:
        """Let stalled answers go on, now and later."""
        self._released.set()

    async def released(self) -> None:
        """Wait for `release`."""
        await self._released.wait()

    @property
    def missing(self) -> list[Fault]:
        """The listed faults that have not happened."""
        return [fault for fault in self.faults if not self.count(fault)]

    def verify(self) -> None:
        """Raise `FaultNeverHappened` if a listed fault never fired."""
        if self.missing:
            raise FaultNeverHappened(", ".join(map(str, self.missing)))


#: Spelled with a number behind the word.
_NUMBERED = {kind.value: kind for kind in (Kind.DELAY, Kind.GRPC_STATUS, Kind.RST_STREAM, Kind.GOAWAY)}
_HEADER_KINDS = {kind.value: kind for kind in Kind if kind not in (Kind.STATUS, Kind.ABORT_EVENT)}
_HEADER_SPOTS = {
    "head": AT_HEAD,
    "bootstrap": AT_BOOTSTRAP,
    "transfer": IN_TRANSFER,
    "transferred": AFTER_TRANSFER,
    "last_token": AFTER_LAST_TOKEN,
    "finish": AFTER_FINISH,
    "last_chunk": BEFORE_LAST_CHUNK,
    "done": AFTER_DONE,
}


def parse_fault(text: str) -> Fault:
    """A fault in the short spelling of the `x-mock-fault` header: `kill@12`, `reset@head`, `503@head`, `abort503@3`.

    Of gRPC also `grpc14@3`, `rst_stream7@head`, `goaway11@5`. A number is a token, otherwise `head`, `last_token`,
    `finish`, `last_chunk` or `done`; of the legs of a pair also `bootstrap`, `transfer` or `transferred`.
    Raises `ValueError`.
    """
    name, sign, place = text.strip().partition("@")
    if not sign:
        raise ValueError(f"not a fault: {text!r} (want WHAT@WHERE)")
    where = _HEADER_SPOTS.get(place) or at_token(int(place))
    if name.isdigit():
        return Fault(where, status(int(name)))
    if name.startswith("abort"):
        return Fault(where, abort_event(int(name[5:]) if name[5:] else None))
    word = name.rstrip("0123456789")
    if word in _NUMBERED and word != name:
        return Fault(where, What(_NUMBERED[word], int(name[len(word) :])))
    if name not in _HEADER_KINDS or (word in _NUMBERED and word != Kind.GOAWAY.value):
        known = sorted(_HEADER_KINDS.keys() - _NUMBERED.keys() | {Kind.GOAWAY.value})
        numbered = ", ".join(f"{word}CODE" for word in sorted(_NUMBERED))
        raise ValueError(f"unknown fault {name!r}, one of {', '.join(known)}, a status, abortCODE, {numbered}")
    return Fault(where, What(_HEADER_KINDS[name]))
