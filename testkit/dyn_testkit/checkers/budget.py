"""The client's `max_new_tokens`, to the token; and no continuation asks for more than is left of it."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import DEFAULT_BUDGET, Finding, Subject, asked, per_answer, prompt_of, sampling_of
from dyn_testkit.history import History
from dyn_testkit.laws.numbers import left_of


def _budget(subject: Subject) -> Iterator[str]:
    limit = sampling_of(subject.record.body).get("max_new_tokens", DEFAULT_BUDGET)
    reason = subject.answer.meta["finish_reason"]
    if limit is not None and len(subject.answer.ids) > limit:
        yield f"{len(subject.answer.ids)} tokens, {limit} asked for"
    # It may be less than what was asked for: a context ends, too.
    if reason.get("type") == "length" and reason.get("length") != len(subject.answer.ids):
        yield f"finish {reason} after {len(subject.answer.ids)} tokens"


_answers = per_answer("budget", _budget)


def check(history: History) -> Iterator[Finding]:
    """Answers; and, where the workers told what they were asked for, continuations."""
    yield from _answers(history)
    for key, record in history.records.items():
        prompt, limits = prompt_of(record.body), sampling_of(record.body)
        if limits.get("max_new_tokens", DEFAULT_BUDGET) is None:
            continue
        for arrival in asked(record, history.arrivals):
            taken = len(prompt_of(arrival.body)) - len(prompt)
            left = left_of(limits, taken)
            got = {name: sampling_of(arrival.body).get(name) for name in left}
            if taken and got != left:
                yield Finding(
                    key, "budget", f"{arrival.worker} was asked for {got} after {taken} tokens, {left} is left"
                )
            if taken and left.get("max_new_tokens") == 0:
                yield Finding(key, "budget", f"{arrival.worker} was asked though nothing is left")
