"""What happened in a run, as data: what clients sent and read, what befell the fleet, what the router says it did.

A history is a file of JSON objects, one a line, each an `Entry` with its kind under `entry`: first the `Run`, at last
an `End`. Checkers read nothing else, so a run can be checked again at any time, by other checks than those of its day.
Times are seconds since the run began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import msgspec


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="entry"):
    """One line of a history."""


class Run(Entry, frozen=True, tag="run"):
    """What was run, and what its checkers must know."""

    name: str = ""
    seed: int = 0
    commit: str = ""
    #: Absolute, for logprobs: how much engines differ from themselves. The engine model does not.
    tolerance: float = 0.0
    #: The router's rows are all here; the workers' arrivals are all here.
    traced: bool = False
    tapped: bool = False
    #: The workers' URLs, if they are the same throughout the run (but for leases), and each can take every request.
    workers: list[str] = []
    #: Those of prefill workers, if workers are pairs: the others are decode workers then.
    prefills: list[str] = []
    #: Those, of both, whose engines are asked over gRPC: a gateway says how they are, and answers also when they hang.
    grpc: list[str] = []
    #: The router's clock of rows at the beginning of the run.
    began: float = 0.0
    #: Migrations that a request may have before it may fail loudly; None: no request may fail.
    migration_limit: int | None = None
    #: Seconds after the end of a fault in which an attempt may still fail of it.
    aftermath: float = 0.0
    #: Seconds within which every request must have ended after the last fault was undone; None: no matter.
    patience: float | None = None
    #: Seconds within which a worker's bad health must have been noticed, and its good health, too; None: no matter.
    notice: float | None = None
    #: Seconds in which a worker that has failed a request gets no other one.
    inhibited: float = 0.0
    #: Seconds of a worker's silence, in everything, after which nobody waits for it any more; None: no matter.
    silence: float | None = None
    settings: dict[str, Any] = {}


class Record(Entry, frozen=True, tag="request"):
    """One request as its client saw it.

    Events are kept whole, so a cumulative stream of n tokens with logprobs costs about 30 * n^2 bytes: 2 MB at 256.
    """

    #: Joins this record with its reference; unique in a history.
    key: str
    #: The request's JSON, as sent.
    body: dict[str, Any]
    #: HTTP status; 0 if there was no head.
    status: int = 0
    #: Response headers, names in lower case.
    headers: dict[str, str] = {}
    #: Streams: the data of each event in order, `[DONE]` left out, and when each was read.
    events: list[str] = []
    times: list[float] = []
    #: Streams: `[DONE]` was seen.
    done: bool = False
    #: Streams: lines that belong to no event, or came after `[DONE]`. SSE comments are not kept.
    stray: list[str] = []
    #: Unary: the whole body.
    text: str = ""
    #: What the HTTP client raised; "" if nothing.
    error: str = ""
    #: The client left by itself before the end, or asked for an abort: what it has need not be whole.
    left: bool = False
    #: When it was asked to be aborted.
    aborted: float | None = None
    #: It was checked against its reference when it ended, nothing was found, and what the client read was left out.
    checked: bool = False
    #: Then: how many tokens it had.
    tokens: int = 0
    sent: float = 0.0
    ended: float = 0.0

    @property
    def streaming(self) -> bool:
        """The client asked for server-sent events."""
        return self.body.get("stream") is True

    @property
    def first(self) -> float | None:
        """When the first event of a stream was read."""
        return self.times[0] if self.times else None


def without_answer(record: Record, tokens: int) -> Record:
    """What remains of a record of so many tokens that was checked and found right; its reference may go, too."""
    return msgspec.structs.replace(record, headers={}, events=[], times=[], text="", checked=True, tokens=tokens)


class Reference(Record, frozen=True, tag="reference"):
    """What an undisturbed engine says to the request of the same key, in the same mode or whole; be it a refusal."""

    @classmethod
    def of(cls, record: Record) -> Reference:
        """The same as a reference."""
        return cls(**msgspec.structs.asdict(record))


#: Attempts that are under way or begin may fail; it does not say that it is well; answers under way stop; new
#: connections fail; clients do not take what is there; its lease may lapse, or be given back;
#: its engine is no longer there, and whoever stands before it sees that.
Harm = Literal["attempts", "health", "answers", "dials", "clients", "lease", "engine"]


class Fault(Entry, frozen=True, tag="fault"):
    """Something that was done to the fleet, or to the network, on purpose."""

    kind: str
    #: The worker or link that it befell.
    target: str
    at: float
    #: When it was undone; None if it was not.
    until: float | None = None
    #: How it is known to have happened.
    proof: str = ""
    #: What else was chosen.
    choice: dict[str, Any] = {}
    #: What of its worker suffers, as long as it lasts.
    harms: tuple[Harm, ...] = ("attempts",)


class Row(Entry, frozen=True, tag="row"):
    """One row of the router's trace; its own times are since its own request began. A `RowFields`, and more."""

    row: dict[str, Any]


class AttemptFields(TypedDict):
    """What checkers read of an attempt."""

    number: int
    worker: str
    url: str
    rid: str
    started: float
    first_token: float | None
    last_token: float | None
    ended: float
    #: Tokens that were delivered before it, and those that it gave.
    resumed_from: int
    tokens: int
    #: Why it ended; None: as it should.
    cause: str | None
    #: Its prefill worker, if there is one, and that is told; and why it ended, in words.
    prefill_url: NotRequired[str | None]
    detail: NotRequired[str]


class RowFields(TypedDict):
    """What checkers read of a row."""

    #: Seconds on the router's clock.
    time: float
    duration: float
    rid: str
    outcome: str
    #: What the client saw; 0: none.
    status: int
    migratable: bool
    #: Why it is not.
    reason: str
    #: Why it failed; "" if it did not.
    error: str
    prompt_tokens: int
    #: None if they were not counted.
    completion_tokens: int | None
    cached_tokens: int | None
    attempts: list[AttemptFields]


class Arrival(Entry, frozen=True, tag="arrival"):
    """A generation that a worker has read, as it was sent to it."""

    worker: str
    at: float
    body: dict[str, Any]
    #: Which weights made the tokens of its answer: (version, start, end); None: not told.
    made: list[tuple[str, int, int]] | None = None
    #: When the worker had done with it; None: not told.
    left: float | None = None


class Order(Entry, frozen=True, tag="order"):
    """An order to abort, as a worker has read it."""

    worker: str
    at: float
    rid: str


class Lease(Entry, frozen=True, tag="lease"):
    """What the router has read of a worker's lease: it takes one, or renews it; of 0 seconds: it gives it back."""

    worker: str
    at: float
    seconds: float


class Sample(Entry, frozen=True, tag="sample"):
    """Some numbers at a time, by name: gauges of the router, its memory, its descriptors."""

    at: float
    values: dict[str, float]


class End(Entry, frozen=True, tag="end"):
    """The run came to its end: what is not before this did not happen. Without it, the run was broken off."""

    #: With what the router's process ended before it was told to, negative for a signal; None: it did not.
    died: int | None = None


_Line = Run | Record | Reference | Fault | Row | Arrival | Order | Lease | Sample | End


@dataclass(slots=True)
class History:
    """All entries of a run, sorted by kind."""

    run: Run = field(default_factory=Run)
    records: dict[str, Record] = field(default_factory=dict)
    references: dict[str, Record] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    end: End | None = None
    #: What checkers have worked out of the above, for each other; a history that is checked no longer grows.
    subjects: list[Any] | None = field(default=None, repr=False, compare=False)

    def add(self, entry: Entry) -> None:
        """Take one entry.

        Raises `ValueError` if a key comes twice, or anything after the end, `msgspec.ValidationError` if a row lacks
        something.
        """
        if self.end:
            raise ValueError("an entry after the end")
        match entry:
            case Run():
                self.run = entry
            case Reference():
                _put(self.references, entry)
            case Record():
                _put(self.records, entry)
            case Fault():
                self.faults.append(entry)
            case Row():
                msgspec.convert(entry.row, RowFields)
                self.rows.append(entry.row)
            case Arrival():
                self.arrivals.append(entry)
            case Order():
                self.orders.append(entry)
            case Lease():
                self.leases.append(entry)
            case Sample():
                self.samples.append(entry)
            case End():
                self.end = entry

    def entries(self) -> Iterator[Entry]:
        """All entries, in the order in which they are saved."""
        yield self.run
        yield from self.faults
        yield from map(Reference.of, self.references.values())
        yield from self.records.values()
        yield from self.arrivals
        yield from self.orders
        yield from self.leases
        yield from map(Row, self.rows)
        yield from self.samples
        if self.end:
            yield self.end


def _put(records: dict[str, Record], record: Record) -> None:
    if record.key in records:
        raise ValueError(f"{record.key!r} is there twice")
    records[record.key] = record


def of_records(records: Mapping[str, Record], references: Mapping[str, Record], tolerance: float = 0.0) -> History:
    """A history of answers alone, all of them."""
    return History(Run(tolerance=tolerance), dict(records), dict(references), end=End())


def save(path: Path, entries: Iterable[Entry]) -> None:
    """Write a history, one entry a line."""
    with path.open("wb") as file:
        for entry in entries:
            file.write(msgspec.json.encode(entry) + b"\n")


def load(path: Path) -> History:
    """Read a history, whole or broken off.

    Raises `ValueError` if a line is no entry, if the first one, or any other, is not, or is, a run, or if a key comes
    twice.
    """
    history = History()
    decoder = msgspec.json.Decoder(_Line)
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = decoder.decode(line)
                if isinstance(entry, Run) is not (number == 1):
                    raise ValueError("a history has one run, which comes first")
                history.add(entry)
            except (msgspec.DecodeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    if not number:
        raise ValueError(f"{path}: nothing is in it")
    return history
