"""Numbers of a history: pauses of streams, recoveries from cuts, tokens a second. Functions of data, without I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from dyn_testkit.history import Fault, History, Record

#: Seconds between the sending of a request and the beginning of its row, if only time tells which row is its own.
NEAR = 2.0

BEFORE, DURING, AFTER = "before", "during", "after"
#: The only phase of a run without faults.
UNDISTURBED = "undisturbed"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a request got nothing."""

    key: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Spread:
    """Some numbers in short."""

    count: int
    p50: float
    p90: float
    p99: float
    worst: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """How requests fared in one phase of a run; None where there was nothing to measure."""

    phase: str
    #: The longest pause between two events, of each stream.
    pauses: Spread | None
    #: From a cut to the first token of the continuation.
    resumptions: Spread | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that came between two times, evenly; at once if the two are the same."""

    begin: float
    end: float
    count: int


class _Meta(msgspec.Struct):
    id: str | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    meta_info: _Meta = msgspec.field(default_factory=_Meta)


_decoder = msgspec.json.Decoder(_Event)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them do not exceed. Raises `ValueError` if there is none.

    `share` is in (0, 1].
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[math.ceil(share * len(values)) - 1]


def spread(values: Iterable[float]) -> Spread | None:
    """Percentiles of some numbers; None if there are none."""
    given = sorted(values)
    if not given:
        return None
    return Spread(len(given), percentile(given, 0.5), percentile(given, 0.9), percentile(given, 0.99), given[-1])


def progress(record: Record) -> list[tuple[float, int]]:
    """When each event of a stream came, and how many tokens its client had then, as the events count them."""
    made, total = [], 0
    for at, text in zip(record.times, record.events, strict=False):
        total = max(total, _meta(text).completion_tokens or 0)
        made.append((at, total))
    return made


def tokens(record: Record) -> int:
    """How many tokens a client got, as its answer counts them."""
    if record.checked:
        return record.tokens
    texts = record.events if record.streaming else [record.text]
    return max((_meta(text).completion_tokens or 0 for text in texts), default=0)


def pauses(record: Record) -> Iterator[Gap]:
    """The times between any two events of a stream."""
    for begin, end in pairwise(record.times):
        yield Gap(record.key, begin, end)


def resumptions(key: str, row: Row, began: float = 0.0) -> Iterator[Gap]:
    """From each cut of an answer that had begun to the first token of its continuation, whichever attempt gave it.

    `began`: `Run.began`. An answer that did not go on has no gap here.
    """
    offset = row["time"] - began
    cut: float | None = None
    for attempt in row["attempts"]:
        if cut is not None and attempt["first_token"] is not None:
            yield Gap(key, offset + cut, offset + attempt["first_token"])
            cut = None
        if cut is None and failed(attempt) and attempt["resumed_from"] + attempt["tokens"]:
            cut = attempt["ended"]


def failed(attempt: Row) -> bool:
    """An attempt of a row came to grief: it did not end well, was not given up, nor refused by the engine."""
    return attempt["cause"] not in (None, "left", "refused")


def window(faults: Iterable[Fault]) -> tuple[float, float] | None:
    """From the first fault's beginning to the end of the last one; one that was not undone has none."""
    spans = [(fault.at, math.inf if fault.until is None else fault.until) for fault in faults]
    return (min(begin for begin, _ in spans), max(end for _, end in spans)) if spans else None


def phase(gap: Gap, faults: tuple[float, float] | None) -> str:
    """Where a gap lies beside the faults' `window`; one that overlaps it at all is `DURING`."""
    if faults is None:
        return UNDISTURBED
    return BEFORE if gap.end < faults[0] else AFTER if gap.begin > faults[1] else DURING


def recovery(history: History) -> list[Recovery]:
    """The gaps of a run before, during and after its faults."""
    faults = window(history.faults)
    phases = (BEFORE, DURING, AFTER) if faults else (UNDISTURBED,)
    longest: dict[str, dict[str, float]] = {name: {} for name in phases}
    resumed: dict[str, list[float]] = {name: [] for name in phases}
    rows = rows_by_key(history)
    for key, record in history.records.items():
        for gap in pauses(record):
            of_phase = longest[phase(gap, faults)]
            of_phase[key] = max(of_phase.get(key, 0.0), gap.seconds)
        for gap in resumptions(key, rows[key], history.run.began) if key in rows else ():
            resumed[phase(gap, faults)].append(gap.seconds)
    return [Recovery(name, spread(longest[name].values()), spread(resumed[name])) for name in phases]


def longest_pause(record: Record) -> float | None:
    """The longest time between two events of a stream; None if it has not two."""
    return max((gap.seconds for gap in pauses(record)), default=None)


def rows_by_key(history: History) -> dict[str, Row]:
    """The router's row of each request: by its rid, else by the id in its answer, else by its time and its prompt."""
    named: dict[str, Row] = {row["rid"]: row for row in history.rows}
    found: dict[str, Row] = {}
    nameless: list[Record] = []
    for key, record in history.records.items():
        row = named.pop(_name(record), None)
        if row is not None:
            found[key] = row
        else:
            nameless.append(record)
    for record in nameless:
        row = _nearest(record, named.values(), history.run.began)
        if row is not None:
            found[record.key] = named.pop(row["rid"])
    return found


def deliveries(history: History) -> tuple[list[Tokens], list[Tokens]]:
    """The tokens of all streams, as their clients read them, and those of unary answers.

    A unary answer's tokens, and those of an answer that was not kept, came to the router between each attempt's first
    token and its end; if there is no row, at any time since the request was sent.
    """
    rows = rows_by_key(history)
    streams: list[Tokens] = []
    unary: list[Tokens] = []
    for key, record in history.records.items():
        given = streams if record.streaming else unary
        if record.streaming and not record.checked:
            had = 0
            for at, total in progress(record):
                given.append(Tokens(at, at, total - had))
                had = total
        elif key in rows:
            offset = rows[key]["time"] - history.run.began
            given += (
                Tokens(offset + attempt["first_token"], offset + attempt["ended"], attempt["tokens"])
                for attempt in rows[key]["attempts"]
                if attempt["first_token"] is not None
            )
        else:
            given.append(Tokens(record.sent, record.ended, tokens(record)))
    return streams, unary


def throughput(given: Iterable[Tokens], begin: float, end: float, bins: int) -> list[float]:
    """Tokens a second in each of some equal parts of the time from `begin` to `end`, a later time than it."""
    step = (end - begin) / bins
    sums = [0.0] * bins

    def place(time: float) -> int:
        return min(max(int((time - begin) / step), 0), bins - 1)

    for each in given:
        first, last = place(each.begin), place(each.end)
        if first == last:
            sums[first] += each.count
            continue
        for number in range(first, last + 1):
            low, high = begin + number * step, begin + (number + 1) * step
            share = (min(high, each.end) - max(low, each.begin)) / (each.end - each.begin)
            sums[number] += each.count * share
    return [total / step for total in sums]


def span(history: History) -> tuple[float, float]:
    """From the beginning of a run to the last thing that is known of it; never empty."""
    ends = [record.ended for record in history.records.values()]
    ends += [fault.at if fault.until is None else fault.until for fault in history.faults]
    ends += [sample.at for sample in history.samples]
    begins = [0.0, *(record.sent for record in history.records.values()), *(fault.at for fault in history.faults)]
    begin, end = min(begins), max(ends, default=0.0)
    return begin, end if end > begin else begin + 1.0


def _meta(text: str) -> _Meta:
    try:
        return _decoder.decode(text).meta_info
    except msgspec.DecodeError:
        return _Meta()


def _name(record: Record) -> str:
    """The rid by which the router knows a request; "" if nothing tells."""
    if record.body.get("rid"):
        return str(record.body["rid"])
    texts = record.events[:1] if record.streaming else [record.text]
    return next((named for text in texts if (named := _meta(text).id)), "")


def _nearest(record: Record, rows: Iterable[Row], began: float) -> Row | None:
    prompt = record.body.get("input_ids")
    if record.body.get("rid") or not isinstance(prompt, list):
        return None

    def apart(row: Row) -> float:
        return abs(float(row["time"]) - began - record.sent)

    near = [row for row in rows if row["prompt_tokens"] == len(prompt) and apart(row) <= NEAR]
    return min(near, key=apart, default=None)
