"""Prefill and decode workers behind one proxy: what the client gets is what one worker would have given."""

from __future__ import annotations

import pytest

from dyn_testkit.faults import CLOSE, KILL_WORKER, FaultPlan, at_token
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged
from tests.relay.pairs import pairs

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [3, 4]}


@BOTH
@pytest.mark.parametrize("more", [{}, LOGPROBS], ids=["plain", "logprobs"])
async def test_an_answer_of_two_workers(autojump_clock, stream, more):
    """Law 5."""
    async with pairs() as w:
        body = {**generate(8, stream=stream), **more}
        assert judged(await w.ask(body), body, ORACLE) == []
        await w.quiet()
        assert sum(len(one.generates) for one in w.prefills) == 1
        assert sum(len(one.generates) for one in w.decodes) == 1
        assert len(w.app.rooms) == 0


@BOTH
@pytest.mark.parametrize("what", [CLOSE, KILL_WORKER], ids=["cut", "killed"])
@pytest.mark.parametrize("token", [1, 3, 7])
async def test_decode_dies(autojump_clock, stream, what, token):
    plan = FaultPlan.in_order([(at_token(token), what)])
    async with pairs(decode=[plan, None], policy="round_robin") as w:
        body = {**generate(8, stream=stream, sampling={"stream_interval": 1}), **LOGPROBS}
        assert judged(await w.ask(body), body, ORACLE) == []
        plan.verify()
        await w.quiet()
        rooms = [room for one in w.prefills for room in one.rooms]
        assert len(set(rooms)) == len(rooms) == 2
        assert len(w.app.rooms) == 0
