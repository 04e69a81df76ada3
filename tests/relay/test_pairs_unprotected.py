"""Pairs answer what cannot be continued as they answer the rest: joined, and whole; a batch, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dyn_testkit.oracle import differences
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE
from tests.relay.pairs import pairs

WHOLE = replace(ORACLE, routed_experts=True)
PENALTY = {"max_new_tokens": 5, "temperature": 0, "frequency_penalty": 0.5}


@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2, 3], [4, 5]]], ids=["one", "batch"])
@pytest.mark.parametrize("start", [{}, {"logprob_start_len": 0}], ids=["output", "prompt"])
async def test_what_is_not_protected_is_joined(autojump_clock, stream, prompts, start):
    """Law 5: logprobs and rows of the prompt are prefill's."""
    several = len(prompts) > 1
    wish = {"sampling_params": PENALTY, "return_logprob": True, "return_routed_experts": True, **start}
    async with pairs(options=WorkerOptions(routed_experts=True)) as w:
        response = await w.ask({**wish, "input_ids": prompts if several else prompts[0], "stream": stream})
    assert (response.status, response.complete) == (200, True)
    if stream:
        last = [value for value in response.values() if value["meta_info"]["finish_reason"]]
        answers = sorted(last, key=lambda value: value.get("index", 0))
    else:
        answers = response.json() if several else [response.json()]
    for prompt, answer in zip(prompts, answers, strict=True):
        answer.pop("index", None)
        assert differences(answer, WHOLE.answer({**wish, "input_ids": prompt})) == []
