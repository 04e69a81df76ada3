"""What the first attempt said of the prompt, in every event: its ids, and how much of it was in a cache."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Subject, per_answer


def _snapshot(subject: Subject) -> Iterator[str]:
    prompt = subject.reference.events[-1].get("prompt_token_ids")
    if any(event.get("prompt_token_ids", prompt) != prompt for event in subject.answer.events):
        yield "prompt_token_ids are not the prompt's"
    for name in ("cached_tokens", "cached_tokens_details"):
        first = subject.answer.metas[0].get(name)
        if any(meta.get(name, first) != first for meta in subject.answer.metas):
            yield f"{name} changes within the stream"
    cached, length = (subject.answer.meta.get(name, 0) for name in ("cached_tokens", "prompt_tokens"))
    if not 0 <= cached <= length:
        yield f"{cached} tokens of {length} were cached"


check = per_answer("snapshot", _snapshot)
