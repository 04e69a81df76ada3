"""Pairs and what a trainer replays: the prompt's rows are the first prefill's, whatever dies."""

from __future__ import annotations

from typing import Any

import pytest

from dyn_testkit.faults import CLOSE, KILL_WORKER, FaultPlan, at_token
from dyn_testkit.oracle import Oracle
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import MODEL, generate
from tests.relay.harness import judged
from tests.relay.pairs import pairs

ORACLE = Oracle(MODEL, routed_experts=True)
SHAPES = pytest.mark.parametrize(
    ("stream", "dialect"),
    [(True, "cumulative"), (True, "incremental"), (False, "cumulative")],
    ids=["cumulative", "incremental", "unary"],
)


def body(tokens: int, stream: bool, start: int | None) -> dict[str, Any]:
    more = {} if start is None else {"routed_experts_start_len": start}
    return generate(
        tokens,
        stream=stream,
        sampling={"stream_interval": 1},
        return_routed_experts=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        **more,
    )


@SHAPES
@pytest.mark.parametrize("start", [None, 1, 2, 3], ids="start-{}".format)
@pytest.mark.parametrize("tokens", [1, 2, 9])
async def test_rows_of_two_workers(autojump_clock, stream, dialect, start, tokens):
    """Law 5, and an answer of one token, whose rows are all the prefill worker's."""
    async with pairs(options=WorkerOptions(dialect=dialect, routed_experts=True)) as w:
        request = body(tokens, stream, start)
        assert judged(await w.ask(request), request, ORACLE, dialect) == []
        await w.quiet()
        assert len(w.app.rooms) == 0


@SHAPES
@pytest.mark.parametrize("start", [None, 2], ids="start-{}".format)
@pytest.mark.parametrize("cuts", [(3,), (1,), (3, 2), (1, 1), (8,), (4, 4)], ids=str)
async def test_rows_after_cuts(autojump_clock, stream, dialect, start, cuts):
    """Law 1: rows and the prompt's logprobs are exact after one cut and after two."""
    plans = [FaultPlan.in_order([(at_token(token), KILL_WORKER)]) for token in cuts]
    options = WorkerOptions(dialect=dialect, routed_experts=True)
    async with pairs(decode=[*plans, None], options=options, policy="round_robin") as w:
        request = body(9, stream, start)
        assert judged(await w.ask(request), request, ORACLE, dialect) == []
        for plan in plans:
            plan.verify()
        await w.quiet()
        assert len(w.app.rooms) == 0


@SHAPES
async def test_rows_after_the_last_token(autojump_clock, stream, dialect):
    """All tokens are there, the rows are not: a pair is asked for these alone."""
    plan = FaultPlan.in_order([(at_token(9), CLOSE)])
    options = WorkerOptions(dialect=dialect, routed_experts=True, late_finish=True)
    async with pairs(decode=[plan, None], options=options, policy="round_robin") as w:
        request = body(9, stream, None)
        assert judged(await w.ask(request), request, ORACLE, dialect) == []
        plan.verify()
        await w.quiet()


@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
async def test_each_event_tells_of_the_prompt(autojump_clock, dialect):
    """As the events of one worker do; those that only bring more tokens are no other."""
    async with pairs(options=WorkerOptions(dialect=dialect)) as w:
        more = {"logprob_start_len": 0, "token_ids_logprob": [3, 5], "sampling": {"stream_interval": 1}}
        request = generate(12, stream=True, **more)
        response = await w.ask(request)
        assert judged(response, request, ORACLE, dialect) == []
        told = [value["meta_info"] for value in response.values()]
        assert len(told) >= 10
        prompt = len(request["input_ids"])
        assert [len(meta["input_token_logprobs"]) for meta in told] == [prompt] * len(told)
        assert None not in [row for meta in told for row in meta["output_token_ids_logprobs"]]
        await w.quiet()
