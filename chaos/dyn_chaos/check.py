"""Is an answer the uninterrupted one? Each check compares one side of a record with its reference and can be run alone.

A reference is the same request's record from one engine that nobody disturbed, asked in the same mode (unary or
stream), so even the sets of keys must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dyn_chaos import fold
from dyn_chaos.history import Record

#: SGLang 0.5.23, float32, two CPU cores: an engine's own runs, and their continuations in other batches, differ for
#: numerical reasons by up to 3e-5 in the logprob of the sampled token and 6e-5 in those of its alternatives.
TOLERANCE = 1e-4

#: Where SGLang itself does not always send the same keys: a timestamp that depends on how events coalesce.
VOLATILE = frozenset({"response_sent_to_client_ts"})

#: How a request's `sampling_params.max_new_tokens` reads when it is absent (SGLang).
DEFAULT_BUDGET = 128


@dataclass(frozen=True, slots=True)
class Finding:
    """One way in which one record is wrong."""

    key: str
    check: str
    message: str


@dataclass(frozen=True, slots=True)
class Subject:
    """What a check looks at."""

    record: Record
    answer: fold.Answer
    reference: fold.Answer
    tolerance: float


def tokens(subject: Subject) -> Iterator[str]:
    """Token ids, all and in order."""
    got, want = subject.answer.ids, subject.reference.ids
    if got != want:
        same = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
        yield f"{len(got)} ids against {len(want)}; equal up to {same}"


def finish(subject: Subject) -> Iterator[str]:
    """`finish_reason` as in the reference, once, in the last event."""
    reasons = [meta.get("finish_reason") for meta in subject.answer.metas]
    if any(reason is not None for reason in reasons[:-1]):
        yield "a finish_reason before the last event"
    if reasons[-1] != subject.reference.meta["finish_reason"]:
        yield f"{reasons[-1]} against {subject.reference.meta['finish_reason']}"


def framing(subject: Subject) -> Iterator[str]:
    """Content type, nothing outside events, and a stream that never contradicts itself."""
    expected = "text/event-stream" if subject.record.streaming else "application/json"
    content_type = subject.record.headers.get("content-type", "")
    if content_type.split(";")[0].strip() != expected:
        yield f"content-type {content_type!r}"
    for line in subject.record.stray:
        yield f"a line outside the events: {line[:80]!r}"
    yield from subject.answer.defects


def dialect(subject: Subject) -> Iterator[str]:
    """The dialect of the reference, unbroken."""
    for what, got, want in (
        ("output_ids", subject.answer.dialect, subject.reference.dialect),
        ("logprobs", subject.answer.logprob_dialect, subject.reference.logprob_dialect),
    ):
        if fold.EITHER not in (got, want) and got != want:
            yield f"{what} stream {got}, the reference {want}"


def counters(subject: Subject) -> Iterator[str]:
    """Prompt and completion counts, in every event."""
    answer = subject.answer
    prompt = len(subject.record.body["input_ids"])
    if any(meta.get("prompt_tokens") != prompt for meta in answer.metas):
        yield f"prompt_tokens {sorted({meta.get('prompt_tokens') for meta in answer.metas}, key=str)}, sent {prompt}"
    running = [meta.get("completion_tokens", -1) for meta in answer.metas]
    if running != sorted(running):
        yield "completion_tokens goes back"
    if running[-1] != len(answer.ids):
        yield f"completion_tokens {running[-1]} for {len(answer.ids)} ids"
    for meta in answer.metas:
        if "output_token_logprobs_length" in meta and meta["output_token_logprobs_length"] != meta["completion_tokens"]:
            yield f"output_token_logprobs_length {meta['output_token_logprobs_length']} at {meta['completion_tokens']}"
            return
    for name in ("reasoning_tokens", "num_retractions"):
        if answer.meta.get(name) != subject.reference.meta.get(name):
            yield f"{name} {answer.meta.get(name)} against {subject.reference.meta.get(name)}"


def budget(subject: Subject) -> Iterator[str]:
    """The client's `max_new_tokens`, to the token."""
    limit = subject.record.body.get("sampling_params", {}).get("max_new_tokens", DEFAULT_BUDGET)
    reason = subject.answer.meta["finish_reason"]
    if len(subject.answer.ids) > limit:
        yield f"{len(subject.answer.ids)} tokens, {limit} asked for"
    if reason.get("type") == "length" and not len(subject.answer.ids) == limit == reason.get("length"):
        yield f"finish {reason} after {len(subject.answer.ids)} tokens, {limit} asked for"


def identity(subject: Subject) -> Iterator[str]:
    """`meta_info.id`: one, and the client's own where it named one."""
    ids = {meta.get("id") for meta in subject.answer.metas}
    own = subject.record.body.get("rid")
    if len(ids) != 1:
        yield f"{len(ids)} different ids"
    elif own is not None and ids != {own}:
        yield f"id {ids.pop()!r}, the client said {own!r}"


def output_logprobs(subject: Subject) -> Iterator[str]:
    """Output logprobs: as many, of the same tokens, of the same values within the tolerance."""
    yield from _compare(subject, fold.PER_TOKEN)
    rows = subject.answer.meta.get("output_token_logprobs")
    if rows is not None and [row[1] for row in rows] != subject.answer.ids:
        yield "output_token_logprobs are of other tokens than output_ids"


def prompt_logprobs(subject: Subject) -> Iterator[str]:
    """Prompt logprobs: the reference's, and the same in every event."""
    yield from _compare(subject, fold.PER_PROMPT_TOKEN)
    for name in fold.PER_PROMPT_TOKEN:
        first = subject.answer.metas[0].get(name)
        if any(meta.get(name) != first for meta in subject.answer.metas):
            yield f"{name} changes within the stream"


def weight_versions(subject: Subject) -> Iterator[str]:
    """`weight_versions` tiles the output: [0, n) without a gap or an overlap."""
    spans = subject.answer.meta.get("weight_versions")
    if spans is None:
        return
    position = 0
    for span in spans:
        if span["start"] != position or span["end"] <= span["start"]:
            yield f"span {span} at {position}"
            return
        position = span["end"]
    if position != len(subject.answer.ids):
        yield f"weight_versions end at {position}, {len(subject.answer.ids)} tokens"


def routed_experts(subject: Subject) -> Iterator[str]:
    """The expert rows, to the byte: who else computed them must not show."""
    got, want = (answer.meta.get("routed_experts") for answer in (subject.answer, subject.reference))
    if got != want:
        yield f"{len(got or '')} characters of base64 against {len(want or '')}" if got and want else "lost or added"


def keys(subject: Subject) -> Iterator[str]:
    """The keys that the engine sends: none lost, none added, in the first event, the last, and those between."""
    for place, got, want in zip(
        ("first", "inner", "last"), _keys(subject.answer), _keys(subject.reference), strict=True
    ):
        if got and want and got != want:
            yield f"{place} event: missing {sorted(want - got)}, added {sorted(got - want)}"


CHECKS: Mapping[str, Callable[[Subject], Iterator[str]]] = {
    check.__name__: check
    for check in (
        tokens,
        finish,
        framing,
        dialect,
        counters,
        budget,
        identity,
        output_logprobs,
        prompt_logprobs,
        weight_versions,
        routed_experts,
        keys,
    )
}


def check(record: Record, reference: Record, tolerance: float = TOLERANCE) -> list[Finding]:
    """Run all checks on one record. An answer that is not complete gives the one finding `complete`.

    Raises `fold.Incomplete` if the reference itself is no complete answer.
    """
    want = fold.answer(reference)
    try:
        got = fold.answer(record)
    except fold.Incomplete as error:
        return [Finding(record.key, "complete", str(error))]
    subject = Subject(record, got, want, tolerance)
    return [Finding(record.key, name, text) for name, run in CHECKS.items() for text in run(subject)]


def check_all(
    records: Mapping[str, Record], references: Mapping[str, Record], tolerance: float = TOLERANCE
) -> list[Finding]:
    """Check a history; a record without a reference, and a reference without a record, are findings too."""
    findings = [Finding(key, "complete", "was never answered") for key in sorted(references.keys() - records.keys())]
    for key, record in records.items():
        if key in references:
            findings += check(record, references[key], tolerance)
        else:
            findings.append(Finding(key, "complete", "has no reference"))
    return findings


def widest_difference(got: fold.Answer, want: fold.Answer) -> float:
    """The largest absolute difference between corresponding logprobs; infinite where they do not correspond."""
    widest = 0.0
    for name in (*fold.PER_TOKEN, *fold.PER_PROMPT_TOKEN):
        mine, theirs = _entries(got.meta.get(name)), _entries(want.meta.get(name))
        if len(mine) != len(theirs):
            return math.inf
        for (a, _), (b, _) in zip(mine, theirs, strict=True):
            if (a is None) != (b is None):
                return math.inf
            if a is not None and b is not None:
                widest = max(widest, abs(a - b))
    return widest


def _compare(subject: Subject, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        got, want = subject.answer.meta.get(name), subject.reference.meta.get(name)
        if got != want:
            yield from (f"{name}{text}" for text in _differences(got, want, subject.tolerance))


def _differences(got: Any, want: Any, tolerance: float) -> Iterator[str]:
    """The first difference between two lists of logprob entries, or of rows of them."""
    if got is None or want is None or len(got) != len(want):
        yield f": {_length(got)} rows against {_length(want)}"
        return
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        if (mine is None) != (theirs is None):
            yield f"[{i}]: {mine} against {theirs}"
            return
        left, right = _entries([mine]), _entries([theirs])
        if len(left) != len(right):
            yield f"[{i}]: {len(left)} entries against {len(right)}"
            return
        for (a, token), (b, other) in zip(left, right, strict=True):
            if (a is None) != (b is None) or (a is not None and b is not None and not abs(a - b) <= tolerance):
                yield f"[{i}]: {a} against {b}"
                return
            if token != other and not _tied(left, right, tolerance):
                yield f"[{i}]: token {token} against {other}"
                return


def _tied(left: list[tuple[float | None, int]], right: list[tuple[float | None, int]], tolerance: float) -> bool:
    """Top tokens may trade places where their logprobs are equal within the tolerance.

    Ranks were compared by value before, so it is enough that every token that differs has an equal in another rank.
    """
    for rank, ((value, token), (_, other)) in enumerate(zip(left, right, strict=True)):
        others = [v for at, (v, _) in enumerate(left) if at != rank]
        if token != other and not any(value is None or v is None or abs(value - v) <= 2 * tolerance for v in others):
            return False
    return True


def _entries(rows: Any) -> list[tuple[float | None, int]]:
    """(logprob, token) of all entries, rows of top logprobs flattened."""
    flat: list[tuple[float | None, int]] = []
    for row in rows or []:
        if row is None:
            continue
        entries = row if row and isinstance(row[0], list) else [row]
        flat += [(entry[0], entry[1]) for entry in entries if entry]
    return flat


def _keys(answer: fold.Answer) -> tuple[set[str], set[str], set[str]]:
    """Keys of the first event, of all inner events together, and of the last one; a lone event is only a last one."""
    named = [
        {*event, *(f"meta_info.{key}" for key in event["meta_info"])} - {f"meta_info.{key}" for key in VOLATILE}
        for event in answer.events
    ]
    first = named[0] if len(named) > 1 else set()
    return first, set().union(*named[1:-1]), named[-1]


def _length(rows: Any) -> str:
    return "no" if rows is None else str(len(rows))
