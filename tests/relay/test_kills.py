"""A kill anywhere, any number of times: the client gets the answer that it would have got."""

from __future__ import annotations

import pytest

from dyn_testkit import faults
from dyn_testkit.engine import Model
from dyn_testkit.faults import CLOSE, RESET, FaultPlan
from dyn_testkit.oracle import Oracle
from dyn_testkit.worker import WorkerOptions
from tests.relay.harness import judged, world

MODEL = Model()
ORACLE = Oracle(MODEL)
DIALECTS = ("cumulative", "incremental", "mixed")
N = 8


def body(stream: bool, **extra: object) -> dict[str, object]:
    return {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": N, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 0,
        "stream": stream,
        **extra,
    }


@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("late", [False, True], ids=["finish-with-token", "late-finish"])
async def test_kill_at_every_token(autojump_clock, stream, dialect, late):
    request = body(stream)
    for k in range(N + 1):
        for what in (CLOSE, RESET):
            plan = FaultPlan.in_order([(faults.at_token(k), what)])
            options = WorkerOptions(dialect=dialect, late_finish=late)
            async with world(plans=[plan, None], options=options, policy="round_robin") as w:
                response = await w.ask(request)
                assert judged(response, request, ORACLE, dialect) == [], (k, what)
                plan.verify()
                await w.quiet()
