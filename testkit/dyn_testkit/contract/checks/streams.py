"""How the events of one stream follow each other."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from dyn_testkit.contract.facts import dialect_of
from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import Broken, Inapplicable, check, equal, expect

_COUNT = 12


@check("§4.3, tokenizer_manager.py:258")
async def dialect(worker: Subject) -> None:
    """Every event of every stream is spelled alike: all so far, deltas, or delta ids with all logprobs so far."""
    found = []
    variants: tuple[dict[str, Any], ...] = ({}, {"top_logprobs_num": 1}, {"logprob_start_len": 0})
    for more in variants:
        events = await worker.events(worker.body(_COUNT, return_logprob=True, **more))
        spelled = dialect_of(events)
        if spelled is None and len(events) > 1:
            sizes = [(len(event["output_ids"]), event["meta_info"]["completion_tokens"]) for event in events]
            raise Broken(f"neither cumulative nor incremental nor mixed: (output_ids, completion_tokens) are {sizes}")
        if spelled is not None:
            found.append(spelled)
    if not found:
        raise Inapplicable(f"each stream of {_COUNT} tokens came in one event")
    expected = worker.facts.dialect or found[0]
    expect(set(found) == {expected}, f"streams are {', '.join(sorted(set(found)))}; expected {expected}")


@check("§4.3, serving.py:274")
async def dialect_is_declared(worker: Subject) -> None:
    """`/server_info` says `incremental_streaming_output` if and only if `output_ids` are deltas."""
    declared = worker.facts.says("incremental_streaming_output")
    if declared is None or worker.facts.dialect is None:
        raise Inapplicable("the dialect is unknown, or /server_info does not tell it")
    equal("incremental_streaming_output", declared, worker.facts.dialect != "cumulative")


@check("§4.3")
async def counters_grow(worker: Subject) -> None:
    """`completion_tokens` never falls, the tokens sent so far are never taken back, all events have one `id`."""
    events = await worker.events(worker.body(_COUNT))
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    equal("completion_tokens, event by event", counts, sorted(counts))
    if worker.facts.dialect == "cumulative":
        lists = [event["output_ids"] for event in events]
        for before, after in pairwise(lists):
            equal("the beginning of a later event", after[: len(before)], before)
    equal("how many ids", len({event["meta_info"]["id"] for event in events}), 1)
    prompts = [event["meta_info"]["prompt_tokens"] for event in events]
    equal("prompt_tokens, event by event", prompts, [len(worker.prompt)] * len(events))


@check("§4.4, §4.6")
async def one_finish(worker: Subject) -> None:
    """`finish_reason` is null in every event but the last one."""
    reasons = [event["meta_info"]["finish_reason"] for event in await worker.events(worker.body(_COUNT))]
    equal("finish_reason before the last event", reasons[:-1], [None] * (len(reasons) - 1))
    equal("finish_reason of the last event", reasons[-1], {"type": "length", "length": _COUNT})


@check("§3, output_streamer.py:454")
async def stream_interval(worker: Subject) -> None:
    """`stream_interval` makes events coarser and changes nothing else."""
    every = await worker.answer(worker.body(_COUNT), stream=True)
    events = await worker.events(worker.body(_COUNT, sampling={"stream_interval": 5}))
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    steps = [after - before for before, after in pairwise(sorted(set(counts))[:-1])]
    expect(all(step >= 5 for step in steps), f"completion_tokens of the events: {counts}")
    equal("tokens", worker.folded(events)["output_ids"], every["output_ids"])


@check("§4.5, §4.3")
async def input_logprobs_in_every_event(worker: Subject) -> None:
    """The prompt's logprobs are whole in every event, in every dialect."""
    events = await worker.events(worker.body(4, return_logprob=True, logprob_start_len=0))
    rows = [len(event["meta_info"]["input_token_logprobs"]) for event in events]
    equal("input_token_logprobs, event by event", rows, [len(worker.prompt)] * len(rows))
