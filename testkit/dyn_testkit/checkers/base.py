"""What a checker is: a function of a history that yields findings, by itself or over each whole answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dyn_testkit import fold
from dyn_testkit.history import Arrival, Fault, History, Record

#: Where SGLang itself does not always send the same keys: a timestamp that depends on how events coalesce.
VOLATILE = frozenset({"response_sent_to_client_ts"})

#: How a request's `sampling_params.max_new_tokens` reads when it is absent (SGLang); null is no limit.
DEFAULT_BUDGET = 128

#: Seconds by which two sums that stand for the same moment may differ.
ROUNDING = 1e-6

#: Ends of an attempt that are no failure of its worker: its client's or its operator's doing, or its connection's age.
INNOCENT = (None, "left", "stale", "refused", "moved")


def prompt_of(body: Mapping[str, Any]) -> list[int]:
    """The prompt of a request in token mode; of another one, nothing."""
    ids = body.get("input_ids")
    return ids if isinstance(ids, list) else []


def sampling_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """`sampling_params` of a single request."""
    params = body.get("sampling_params")
    return params if isinstance(params, dict) else {}


@dataclass(frozen=True, slots=True)
class Finding:
    """One way in which one record (`key`), or the run as a whole, is wrong."""

    key: str
    check: str
    message: str


Checker = Callable[[History], Iterator[Finding]]


def in_effect(fault: Fault, since: float, until: float, aftermath: float) -> bool:
    """An attempt may have failed of it between two times."""
    over = fault.at if fault.until is None else fault.until
    return "attempts" in fault.harms and fault.at <= until + ROUNDING and since <= over + aftermath


def places(attempt: Mapping[str, Any]) -> list[str]:
    """The URLs of the workers that it was sent to: of a pair, decode's and prefill's."""
    prefill = attempt.get("prefill_url")
    return [attempt["url"], prefill] if prefill else [attempt["url"]]


def failed_at(attempt: Mapping[str, Any]) -> str | None:
    """The URL of the worker that failed it; None if its row does not tell which one of two (an engine's own words)."""
    urls, words = places(attempt), str(attempt.get("detail", ""))
    if len(urls) > 1 and not words:
        return None
    return urls[-1] if words.startswith("prefill: ") else urls[0]


def explained(history: History, row: Mapping[str, Any], attempt: Mapping[str, Any]) -> bool:
    """A fault of the attempt's worker was in effect during the attempt, or had only just ended."""
    began = row["time"] - history.run.began
    since, until = began + attempt["started"], began + attempt["ended"]
    return any(
        fault.target in (attempt["worker"], *places(attempt)) and in_effect(fault, since, until, history.run.aftermath)
        for fault in history.faults
    )


def asked(record: Record, arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """What workers were sent of a request, told by its prompt: no prompt of a run begins with another one."""
    prompt = prompt_of(record.body)
    return (arrival for arrival in arrivals if prompt and prompt_of(arrival.body)[: len(prompt)] == prompt)


def name_of(record: Record) -> str:
    """The rid that the router knows a request by; "" if its answer does not tell."""
    if record.body.get("rid"):
        return str(record.body["rid"])
    try:
        return str(fold.answer(record).meta.get("id") or "")
    except fold.Incomplete:
        return ""


@dataclass(frozen=True, slots=True)
class Subject:
    """A whole answer beside the uninterrupted one."""

    record: Record
    answer: fold.Answer
    reference: fold.Answer
    tolerance: float


def subjects(history: History) -> Iterator[Subject]:
    """All answers that are whole, must be, and have a reference.

    Raises `fold.Incomplete` if a reference is not whole itself.
    """
    if history.subjects is None:
        history.subjects = list(_subjects(history))
    yield from history.subjects


def _subjects(history: History) -> Iterator[Subject]:
    for key, record in history.records.items():
        if key not in history.references or record.left or record.checked:
            continue
        if history.references[key].status != 200:
            continue
        want = fold.answer(history.references[key])
        try:
            got = fold.answer(record)
        except fold.Incomplete:
            continue  # for `liveness` to judge
        yield Subject(record, got, want, history.run.tolerance)


def per_answer(name: str, check: Callable[[Subject], Iterator[str]]) -> Checker:
    """A checker out of one that looks at one answer."""

    def checker(history: History) -> Iterator[Finding]:
        for subject in subjects(history):
            yield from (Finding(subject.record.key, name, text) for text in check(subject))

    return checker
