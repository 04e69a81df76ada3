"""Prompt and completion counts, in every event."""

from __future__ import annotations

from collections.abc import Iterator

from dyn_testkit.checkers.base import Subject, per_answer


def _counters(subject: Subject) -> Iterator[str]:
    answer = subject.answer
    prompt = subject.reference.meta.get("prompt_tokens")
    if any(meta.get("prompt_tokens") != prompt for meta in answer.metas):
        found = sorted({meta.get("prompt_tokens") for meta in answer.metas}, key=str)
        yield f"prompt_tokens {found} against {prompt}"
    running = [meta["completion_tokens"] for meta in answer.metas]
    if running != sorted(running):
        yield "completion_tokens goes back"
    if running[-1] != len(answer.ids):
        yield f"completion_tokens {running[-1]} for {len(answer.ids)} ids"
    for meta in answer.metas:
        if "output_token_logprobs_length" in meta and meta["output_token_logprobs_length"] != meta["completion_tokens"]:
            yield f"output_token_logprobs_length {meta['output_token_logprobs_length']} at {meta['completion_tokens']}"
            return
    for name in ("reasoning_tokens", "num_retractions"):
        if name in subject.reference.meta and answer.meta.get(name) != subject.reference.meta[name]:
            yield f"{name} {answer.meta.get(name)} against {subject.reference.meta[name]}"


check = per_answer("counters", _counters)
