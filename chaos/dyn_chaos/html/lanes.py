"""What the report's page draws, out of a history: a lane a request, the faults, rates and samples, as plain data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dyn_chaos import measures
from dyn_chaos.measures import Row
from dyn_testkit import fold
from dyn_testkit.checkers import Finding
from dyn_testkit.fold import PER_PROMPT_TOKEN, PER_TOKEN
from dyn_testkit.history import Fault, History, Record

#: Points of one lane's curve of tokens, about: enough for its shape, while no pause is lost.
POINTS = 120
#: Parts of the run over which tokens a second are counted.
BINS = 160
#: Entries of a list, and characters of a text, that are shown of a request's body.
SHOWN_ENTRIES = 6
SHOWN_CHARACTERS = 400


class Attempt(msgspec.Struct, frozen=True):
    """One dispatch of a request. Times in seconds since the run began."""

    worker: str
    url: str
    rid: str
    started: float
    first: float | None
    ended: float
    tokens: int
    resumed: int
    cause: str | None
    #: It came to grief: see `measures.failed`.
    cut: bool
    detail: str


class Lane(msgspec.Struct, frozen=True):
    """One request."""

    key: str
    rid: str
    #: whole; refused, as an undisturbed engine refuses it; left, by its client before the end; or failed.
    status: str
    #: Why it is not whole; "" if it is.
    why: str
    http: int
    streaming: bool
    sent: float
    ended: float
    tokens: int
    #: More than one attempt was made.
    moved: bool
    pause: float | None
    attempts: list[Attempt]
    #: When a stream's client had how many tokens; thinned out.
    times: list[float]
    totals: list[int]
    findings: list[tuple[str, str]]
    #: Of the last event's `meta_info`, what is not there once a token; of the row, what is not of attempts.
    meta: dict[str, Any]
    row: dict[str, Any]
    headers: dict[str, str]
    #: The request's fields as JSON, long ones cut short.
    body: dict[str, str]


class Band(msgspec.Struct, frozen=True):
    """One fault. `target` is a worker's name, where rows tell it."""

    kind: str
    target: str
    url: str
    at: float
    until: float | None
    proof: str
    choice: str


class Series(msgspec.Struct, frozen=True):
    """One number over time. `label` tells series of one name apart; `worker` is the one whose number it is, if any."""

    name: str
    label: str
    worker: str
    at: list[float]
    values: list[float]


class Drawing(msgspec.Struct, frozen=True):
    """All that the page draws."""

    begin: float
    end: float
    lanes: list[Lane]
    workers: list[str]
    faults: list[Band]
    #: Tokens a second in equal parts of the run: of streams, and of unary answers.
    streams: list[float]
    unary: list[float]
    samples: list[Series]


def draw(history: History, findings: Sequence[Finding]) -> Drawing:
    """A history with what was found in it."""
    rows = measures.rows_by_key(history)
    names = {row["rid"]: key for key, row in rows.items()}
    of_key: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for finding in findings:
        of_key[_key(finding, history, names)].append((finding.check, finding.message))
    records = sorted(history.records.values(), key=lambda record: record.sent)
    lanes = [_lane(record, history, rows.get(record.key), of_key[record.key]) for record in records]
    hosts = {attempt.url: attempt.worker for lane in lanes for attempt in lane.attempts}
    begin, end = measures.span(history)
    streams, unary = (
        [_short(rate) for rate in measures.throughput(given, begin, end, BINS)]
        for given in measures.deliveries(history)
    )
    return Drawing(
        begin=begin,
        end=end,
        lanes=lanes,
        workers=sorted(set(hosts.values()), key=lambda name: (len(name), name)),
        faults=[_band(fault, hosts) for fault in sorted(history.faults, key=lambda fault: fault.at)],
        streams=streams,
        unary=unary,
        samples=_samples(history),
    )


def places(drawing: Drawing) -> dict[str, int]:
    """Which lane has a request of this key, or of this rid."""
    found = {lane.rid: number for number, lane in enumerate(drawing.lanes) if lane.rid}
    return found | {lane.key: number for number, lane in enumerate(drawing.lanes)}


def _key(finding: Finding, history: History, names: Mapping[str, str]) -> str:
    """The key of the request that a finding is about: some checks name a request by its rid."""
    return finding.key if finding.key in history.records else names.get(finding.key, finding.key)


def _lane(record: Record, history: History, row: Row | None, findings: list[tuple[str, str]]) -> Lane:
    status, why, meta = "whole", "", dict[str, Any]()
    if not record.checked:
        try:
            meta = _once(fold.answer(record).meta)
        except fold.Incomplete as error:
            status, why = _short_of_whole(record, history), str(error)
    attempts = [_attempt(attempt, row["time"] - history.run.began) for attempt in row["attempts"]] if row else []
    points = _thin(measures.progress(record))
    return Lane(
        key=record.key,
        rid=str(row["rid"] if row else record.body.get("rid") or ""),
        status=status,
        why=why,
        http=record.status,
        streaming=record.streaming,
        sent=_short(record.sent),
        ended=_short(record.ended),
        tokens=measures.tokens(record),
        moved=len(attempts) > 1,
        pause=measures.longest_pause(record),
        attempts=attempts,
        times=[_short(at) for at, _ in points],
        totals=[total for _, total in points],
        findings=findings,
        meta=meta,
        row={name: value for name, value in (row or {}).items() if name not in ("time", "rid", "attempts")},
        headers=record.headers,
        body={name: _json(_brief(value)) for name, value in record.body.items()},
    )


def _short_of_whole(record: Record, history: History) -> str:
    reference = history.references.get(record.key)
    if reference is not None and reference.status == record.status != 200:
        return "refused"
    return "left" if record.left else "failed"


def _attempt(row: Row, offset: float) -> Attempt:
    first = row["first_token"]
    return Attempt(
        worker=row["worker"],
        url=row["url"],
        rid=row["rid"],
        started=_short(offset + row["started"]),
        first=None if first is None else _short(offset + first),
        ended=_short(offset + row["ended"]),
        tokens=row["tokens"],
        resumed=row["resumed_from"],
        cause=row["cause"],
        cut=measures.failed(row),
        detail=row["detail"],
    )


def _once(meta: Mapping[str, Any]) -> dict[str, Any]:
    """An answer's `meta_info` without what there is of each token."""
    left_out = (*PER_TOKEN, *PER_PROMPT_TOKEN, "routed_experts", "id")
    return {name: value for name, value in meta.items() if name not in left_out}


def _thin(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Fewer points. Those on both sides of a pause stay, and the last one."""
    if len(points) <= POINTS:
        return points
    apart = (points[-1][0] - points[0][0]) / POINTS
    kept = points[:1]
    for number, point in enumerate(points[1:-1], 1):
        if point[0] - kept[-1][0] >= apart or points[number + 1][0] - point[0] >= apart:
            kept.append(point)
    return [*kept, points[-1]]


def _brief(value: Any) -> Any:
    """Any JSON with its long lists and texts cut short."""
    match value:
        case dict():
            return {str(name): _brief(item) for name, item in value.items()}
        case list() if len(value) > SHOWN_ENTRIES + 1:
            return [*map(_brief, value[:SHOWN_ENTRIES]), f"... {len(value) - SHOWN_ENTRIES} more"]
        case list():
            return [_brief(item) for item in value]
        case str() if len(value) > SHOWN_CHARACTERS:
            return f"{value[:SHOWN_CHARACTERS]}... {len(value) - SHOWN_CHARACTERS} more"
    return value


def _band(fault: Fault, hosts: Mapping[str, str]) -> Band:
    choice = _json(fault.choice) if fault.choice else ""
    target = hosts.get(fault.target, fault.target)
    return Band(fault.kind, target, fault.target, fault.at, fault.until, fault.proof, choice)


def _samples(history: History) -> list[Series]:
    at: defaultdict[str, list[float]] = defaultdict(list)
    values: defaultdict[str, list[float]] = defaultdict(list)
    for sample in history.samples:
        for name, value in sample.values.items():
            at[name].append(_short(sample.at))
            values[name].append(value)
    made = []
    for full in at:
        name, _, label = full.removesuffix("}").partition("{")
        worker = label.removeprefix('worker="').removesuffix('"') if label.startswith('worker="') else ""
        made.append(Series(name, label, worker, at[full], values[full]))
    return made


def _json(value: Any) -> str:
    """On one line, with spaces at which it may break."""
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _short(number: float) -> float:
    """Tenths of a millisecond are enough to draw with."""
    return round(number, 4)
