"""What a checker is: a function of a history that yields findings, by itself or over each whole answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dyn_testkit import fold
from dyn_testkit.history import History, Record

#: Where SGLang itself does not always send the same keys: a timestamp that depends on how events coalesce.
VOLATILE = frozenset({"response_sent_to_client_ts"})

#: How a request's `sampling_params.max_new_tokens` reads when it is absent (SGLang); null is no limit.
DEFAULT_BUDGET = 128


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
