"""Workers that could serve, but not now, or not this; and names that would collide on a worker."""

from __future__ import annotations

import pytest
import trio

from dyn_testkit import faults
from dyn_testkit.faults import CLOSE, KILL_WORKER, RESET, FaultPlan, at_token, every, first, status
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


@BOTH
async def test_tokens_wait_for_a_busy_survivor(autojump_clock, stream):
    """B8: the only survivor's queue is full for a while: what was delivered is not thrown away."""
    plans = [
        FaultPlan.in_order([(at_token(3), KILL_WORKER)]),
        FaultPlan.of(faults.Fault(faults.AT_HEAD, status(503), first(6))),
    ]
    async with world(plans=plans, policy="round_robin") as w:
        response = await w.ask(generate(stream=stream))
        assert judged(response, generate(stream=stream), ORACLE) == []
        plans[1].verify()
        assert w.metric('dyn_relay_migrations_total{reason="cut"}') == 1
        assert w.metric("dyn_relay_tokens_saved_total") == 3


async def test_but_not_for_ever(autojump_clock):
    """After --busy-patience-secs the failure is loud."""
    plans = [
        FaultPlan.in_order([(at_token(3), KILL_WORKER)]),
        FaultPlan.of(faults.Fault(faults.AT_HEAD, status(503), every)),
    ]
    async with world(plans=plans, policy="round_robin", busy_patience_secs=20) as w:
        begin = trio.current_time()
        response = await w.ask(generate(stream=False))
        assert (response.status, response.json()["delivered"]) == (503, 3)
        assert 19 < trio.current_time() - begin < 30


@BOTH
async def test_a_worker_that_cannot_take_the_continuation_is_passed_over(autojump_clock, stream):
    """Another one took this request, so a 400 to its continuation is about the worker: the next is asked."""
    plans = [FaultPlan.in_order([(at_token(3), CLOSE)]), None, None]
    options = [WorkerOptions(lora_adapters=adapters) for adapters in (("a",), (), ("a",))]
    async with world(plans=plans, options=options, policy="round_robin") as w:
        body = generate(stream=stream, lora_path="a")
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        assert [len(worker.generates) for worker in w.workers] == [1, 1, 1]
        assert [worker.state for worker in w.app.fleet.workers][1:] == ["ready", "ready"]


async def test_if_nobody_takes_the_continuation_it_is_said(autojump_clock):
    plans = [FaultPlan.in_order([(at_token(3), KILL_WORKER)]), None]
    options = [WorkerOptions(lora_adapters=adapters) for adapters in (("a",), ())]
    async with world(plans=plans, options=options, policy="round_robin") as w:
        response = await w.ask(generate(stream=False, lora_path="a"))
        assert (response.status, response.json()["reason"]) == (502, "continuation_refused")
        assert response.json()["delivered"] == 3
        assert "w2: unfit" in response.json()["message"]


async def test_no_abort_of_ours_hits_a_namesake(autojump_clock):
    """C3: `job-1` is lost and aborted at its worker, where `job-10` lives: SGLang matches aborts by prefix."""
    plan = FaultPlan.of(faults.Fault(at_token(5), RESET, lambda seen: seen.index == 1))
    options = WorkerOptions(tick=0.05)
    async with world(plans=[plan, None], options=options, policy="round_robin") as w:
        answers = {}

        async def client(rid):
            body = generate(60, rid=rid)
            response = await w.ask(body)
            answers[rid] = judged(response, body, ORACLE)
            assert {value["meta_info"]["id"] for value in response.values()} == {rid}

        async with trio.open_nursery() as clients:
            for rid in ("job-10", "other", "job-1", "job-100"):
                clients.start_soon(client, rid)
                await trio.sleep(0.1)
        plan.verify()
        assert answers == {"job-10": [], "other": [], "job-1": [], "job-100": []}


async def test_odd_targets_are_bridged(autojump_clock):
    """An absolute-form target, and `OPTIONS *`."""
    async with world() as w:
        response = await w.ask(None, "http://proxy/v1/models?a=b", method="GET")
        assert response.json()["object"] == "list"
        assert (await w.ask(None, "*", method="OPTIONS")).status == 204


async def test_a_worker_that_cannot_exist_is_refused(autojump_clock):
    async with world() as w:
        for url in ("http://a..b:80", f"http://{'a' * 70}.com", "ftp://x", "http://", 5):
            response = await w.ask({"url": url}, "/workers")
            assert response.status == 400, url
            assert "url" in response.json()["message"]
        assert (await w.ask(b'{"a":' + b"[" * 100_000, "/workers")).status == 400
        assert len(w.app.fleet.workers) == 2


async def test_rejected_requests_have_their_row(autojump_clock):
    """M3: rows == requests."""

    async with world() as w:
        await w.ask({"input_ids": [-1]})
        await w.ask(generate(stream=False))
        await w.ask(generate(stream=False, sampling={"frequency_penalty": 1.0}))
        await w.quiet()
    assert [(row["outcome"], row["completion_tokens"]) for row in w.rows] == [
        ("rejected", 0),
        ("done", 8),
        ("done", None),
    ]
