"""The client's `max_new_tokens`, to the token; and no continuation asks for more than is left of it."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import DEFAULT_BUDGET, Finding, Subject, asked, per_answer
from dyn_testkit.history import History
from dyn_testkit.laws.numbers import left_of


def _budget(subject: Subject) -> Iterator[str]:
    limit = (subject.record.body.get("sampling_params") or {}).get("max_new_tokens", DEFAULT_BUDGET)
    reason = subject.answer.meta["finish_reason"]
    if len(subject.answer.ids) > limit:
        yield f"{len(subject.answer.ids)} tokens, {limit} asked for"
    if reason.get("type") == "length" and not len(subject.answer.ids) == limit == reason.get("length"):
        yield f"finish {reason} after {len(subject.answer.ids)} tokens, {limit} asked for"


_answers = per_answer("budget", _budget)


def check(history: History) -> Iterator[Finding]:
    """Answers; and, where the workers told what they were asked for, continuations."""
    yield from _answers(history)
    for key, record in history.records.items():
        prompt, limits = record.body["input_ids"], record.body.get("sampling_params") or {}
        for arrival in asked(record, history.arrivals):
            taken = len(arrival.body["input_ids"]) - len(prompt)
            left = left_of(limits, taken)
            got = {name: (arrival.body.get("sampling_params") or {}).get(name) for name in left}
            if taken and got != left:
                yield Finding(
                    key, "budget", f"{arrival.worker} was asked for {got} after {taken} tokens, {left} is left"
                )
            if taken and left.get("max_new_tokens") == 0:
                yield Finding(key, "budget", f"{arrival.worker} was asked though nothing is left")
