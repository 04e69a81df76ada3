"""How many tokens there may be."""

from __future__ import annotations

from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import Inapplicable, check, equal

#: What a request without `max_new_tokens` may generate.
_DEFAULT = 128
#: Tokens left in the context of an almost full prompt.
_ROOM = 12


@check("§3.1, §4.6")
async def finish_length(worker: Subject) -> None:
    """At the limit the finish is `{"type":"length","length":N}`, nothing else."""
    for stream in (False, True):
        value = await worker.answer(worker.body(5, sampling={"stop_token_ids": []}), stream=stream)
        equal("finish_reason", value["meta_info"]["finish_reason"], {"type": "length", "length": 5})


@check("§3, recorded")
async def budget_of_zero(worker: Subject) -> None:
    """`max_new_tokens` 0 is answered at once: no tokens, finish `length` 0, one span from 0 to 0."""
    for stream in (False, True):
        value = await worker.answer(worker.body(0), stream=stream)
        meta = value["meta_info"]
        equal("output_ids", value["output_ids"], [])
        equal("finish_reason", meta["finish_reason"], {"type": "length", "length": 0})
        equal("completion_tokens", meta["completion_tokens"], 0)
        spans = [(span["start"], span["end"]) for span in meta["weight_versions"]]
        equal("weight_versions", spans, [(0, 0)])


@check("§3")
async def budget_of_one(worker: Subject) -> None:
    """`max_new_tokens` 1 gives the first token of any longer answer."""
    first = (await worker.ids(worker.body(3)))[:1]
    for stream in (False, True):
        value = await worker.answer(worker.body(1), stream=stream)
        equal("output_ids", value["output_ids"], first)
        equal("finish_reason", value["meta_info"]["finish_reason"], {"type": "length", "length": 1})


@check("§3, sampling_params.py:147")
async def default_budget(worker: Subject) -> None:
    """Without `max_new_tokens` there are 128 tokens."""
    if "max_new_tokens" in (worker.facts.defaults or {}):
        raise Inapplicable("the worker prefers a max_new_tokens of its own")
    if (worker.facts.context_length or _DEFAULT) < _DEFAULT + len(worker.prompt) + _ROOM:
        raise Inapplicable("the context is too short for them")
    took = _DEFAULT * worker.facts.pace
    if took > worker.patience:
        raise Inapplicable(f"they take {took:.3g} s here: give answer_timeout=")
    value = await worker.unary(worker.body(sampling={"max_new_tokens": ...}))
    equal("output_ids, counted", len(value["output_ids"]), _DEFAULT)
    equal("finish_reason", value["meta_info"]["finish_reason"], {"type": "length", "length": _DEFAULT})


@check("§3.1, scheduler.py:2693")
async def null_budget(worker: Subject) -> None:
    """`max_new_tokens` null goes on to the end of the context: prompt and output are two less than its length."""
    length = worker.facts.context_length
    if length is None or length > worker.longest_prompt:
        raise Inapplicable(f"context length {length}; prompts are {worker.longest_prompt} tokens at most")
    prompt = filled(worker, length - 2 - _ROOM)
    for stream in (False, True):
        value = await worker.answer(worker.body(input_ids=prompt, sampling={"max_new_tokens": None}), stream=stream)
        equal("output_ids, counted", len(value["output_ids"]), _ROOM)
        equal("finish_reason", value["meta_info"]["finish_reason"], {"type": "length", "length": _ROOM})


def filled(worker: Subject, length: int) -> list[int]:
    """A prompt of this length, made of the given one."""
    return (list(worker.prompt) * (length // len(worker.prompt) + 1))[:length]
