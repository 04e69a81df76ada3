"""From what a client read to one answer: find the stream's dialect, join its events, name its defects."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec

from dyn_testkit.history import Record

#: `meta_info` lists with one entry an output token.
PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
#: `meta_info` lists with one entry a prompt token; every event repeats them whole (SGLang 0.5.23).
PER_PROMPT_TOKEN = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")

EITHER = "either"
CUMULATIVE = "cumulative"
INCREMENTAL = "incremental"
BROKEN = "broken"


#: [logprob, token, text]
Logprob = tuple[float | None, int, str | None]
#: A row a token: the entries of its alternatives. The first token of a prompt has none.
Alternatives = list[list[Logprob] | None]


class Span(TypedDict):
    """Output tokens [start, end) are of one version of the weights."""

    version: str
    start: int
    end: int


class _Always(TypedDict):
    """What `meta_info` has in every event."""

    finish_reason: dict[str, Any] | None
    completion_tokens: int


class Meta(_Always, total=False):
    """`meta_info`, as far as checkers read it (SGLang 0.5.23)."""

    #: Not in an oracle's answer to a request without a rid.
    id: str
    prompt_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    num_retractions: int
    weight_version: str
    weight_versions: list[Span]
    input_token_logprobs: list[Logprob]
    input_top_logprobs: Alternatives
    input_token_ids_logprobs: Alternatives
    output_token_logprobs: list[Logprob]
    output_token_logprobs_length: int
    output_top_logprobs: Alternatives
    output_token_ids_logprobs: Alternatives
    routed_experts: str
    indexer_topk: str


class _Event(TypedDict):
    output_ids: list[int]
    meta_info: Meta


class Event(_Event, total=False):
    """An event of a stream, or a unary answer."""

    prompt_token_ids: list[int]
    text: str


#: How `Incomplete` begins where a stream ends with the engine's own error in place of a finish (SGLang 0.5.23).
ENGINE_ERROR = "the engine's error"


class Incomplete(Exception):
    """The record holds no complete answer; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer, unary or folded."""

    ids: list[int]
    #: The last event's `meta_info`, its `PER_TOKEN` lists joined over the stream.
    meta: dict[str, Any]
    #: All events as decoded, but for what there is of each token: that is in `ids` and `meta`, once. A unary answer is
    #: one event.
    events: list[dict[str, Any]]
    #: How `output_ids` and the first `PER_TOKEN` list stream: `CUMULATIVE`, `INCREMENTAL`, `EITHER` or `BROKEN`.
    dialect: str
    logprob_dialect: str
    #: Contradictions inside the stream itself.
    defects: list[str] = field(default_factory=list)
    #: The whole text; None if answers carry none.
    text: str | None = None

    @property
    def metas(self) -> list[dict[str, Any]]:
        """Each event's own `meta_info`."""
        return [event["meta_info"] for event in self.events]


def answer(record: Record) -> Answer:
    """Fold a record. Raises `Incomplete` if the client saw an error, a truncated answer, or something else than one."""
    if record.error:
        raise Incomplete(record.error)
    if record.status != 200:
        raise Incomplete(f"status {record.status}: {record.text[:200]}")
    events = list(_decode(record))
    if not events:
        raise Incomplete("no event")
    if record.streaming and not record.done:
        raise Incomplete("no [DONE]")
    if events[-1]["meta_info"].get("finish_reason") is None:
        raise Incomplete("no finish_reason in the last event")
    return _fold(events)


def delivered(record: Record) -> list[int]:
    """The tokens of a record that need not be whole, as far as its events can be read."""
    events: list[dict[str, Any]] = []
    try:
        events.extend(_decode(record))
    except Incomplete:
        pass  # cut in the middle of an event; what was before it stays
    return _fold(events).ids if events else []


def _decode(record: Record) -> Iterator[dict[str, Any]]:
    for text in record.events if record.streaming else [record.text]:
        try:
            event = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise Incomplete(f"not JSON ({error}): {text[:80]!r}") from error
        if not isinstance(event, dict):
            raise Incomplete(f"not a JSON object: {text[:80]!r}")
        if "error" in event:
            raise Incomplete(f"error event: {event['error']}")
        failure = _failure(event)
        if failure is not None:
            raise Incomplete(f"{ENGINE_ERROR}: {failure}")
        try:
            msgspec.convert(event, Event)
        except msgspec.ValidationError as error:
            raise Incomplete(f"not an answer: {error}") from error
        yield event


def _failure(event: dict[str, Any]) -> dict[str, Any] | None:
    """The finish by which an engine says that it failed; its event has no counters if nothing had begun."""
    meta = event.get("meta_info")
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    failed = isinstance(finish, dict) and finish.get("type") == "abort" and finish.get("status_code") is not None
    return finish if failed else None


def _fold(events: list[dict[str, Any]]) -> Answer:
    defects: list[str] = []
    metas = [event["meta_info"] for event in events]
    totals = [meta["completion_tokens"] for meta in metas]
    ids, dialect = _join("output_ids", [event["output_ids"] for event in events], totals, defects)
    meta = dict(metas[-1])
    logprob_dialect = EITHER
    for name in PER_TOKEN:
        if name in meta:
            meta[name], found = _join(name, [each.get(name) or [] for each in metas], totals, defects)
            logprob_dialect = found if logprob_dialect == EITHER else logprob_dialect
            if found not in (EITHER, logprob_dialect):
                defects.append(f"{name} streams {found}, the other logprobs {logprob_dialect}")
    text = _text(events, dialect, defects)
    for event in events:  # a cumulative stream repeats them all in each
        event["output_ids"] = []
        event["meta_info"] |= {name: [] for name in PER_TOKEN if name in event["meta_info"]}
    return Answer(ids, meta, events, dialect, logprob_dialect, defects, text)


def _text(events: Sequence[dict[str, Any]], dialect: str, defects: list[str]) -> str | None:
    """The text that the events add up to: deltas where the ids are."""
    told = [event["text"] for event in events if "text" in event]
    if not told:
        return None
    if dialect == INCREMENTAL:
        return "".join(told)
    if not all(after.startswith(before) for before, after in itertools.pairwise(told)):
        defects.append("text: an event takes back what was sent")
    return str(told[-1])


def _join(name: str, parts: Sequence[list[Any]], totals: Sequence[int], defects: list[str]) -> tuple[list[Any], str]:
    """Join one list over the events, by the only reading that agrees with the running `completion_tokens`."""
    sums, running = [], 0
    for part in parts:
        running += len(part)
        sums.append(running)
    cumulative = [len(part) for part in parts] == list(totals)
    incremental = sums == list(totals)
    if cumulative:
        for before, after in itertools.pairwise(parts):
            if after[: len(before)] != before:
                defects.append(f"{name}: an event takes back what was sent ({len(before)} entries)")
                break
        return list(parts[-1]), EITHER if incremental else CUMULATIVE
    if not incremental:
        lengths = [len(part) for part in parts]
        defects.append(f"{name}: neither dialect; lengths {_brief(lengths)} under completion_tokens {_brief(totals)}")
    return [entry for part in parts for entry in part], INCREMENTAL if incremental else BROKEN


def _brief(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6]))
    return f"[{shown}, ... {numbers[-1]}]" if len(numbers) > 6 else f"[{shown}]"
