"""Requests that kill the engine that takes them."""

from __future__ import annotations

import trio

from dyn_testkit import faults
from dyn_testkit.faults import KILL_WORKER, STALL, FaultPlan, at_token, first, rid_begins
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world

POISON = {"input_ids": [5, 5000], "sampling_params": {"max_new_tokens": 4}}
REASON = "suspected_poison"


async def test_at_most_two_engines_die_and_no_bystander_suffers(autojump_clock):
    """Ten requests without a token wait on the worker that the poison kills; others have tokens."""
    options = WorkerOptions(tick=0.05)
    async with world(plans=[None] * 4, options=options, policy="round_robin") as w:
        answers, poisoned = {}, []

        async def client(rid, stream):
            body = generate(40, rid=rid, stream=stream)
            answers[rid] = judged(await w.ask(body), body, ORACLE)

        async def culprit():
            poisoned.append(await w.ask(POISON))

        async with trio.open_nursery() as clients:
            for number in range(20):
                clients.start_soon(client, f"early{number}", bool(number % 2))
            await trio.sleep(0.3)
            clients.start_soon(culprit)
            for number in range(40):
                clients.start_soon(client, f"late{number}", bool(number % 2))
        assert sum(worker.deaths for worker in w.workers) <= 2
        assert [rid for rid, wrong in answers.items() if wrong] == []
        assert len(answers) == 60
        [response] = poisoned
        assert (response.status, response.json()["reason"]) == (502, REASON)
        assert w.metric('dyn_relay_poison_total{event="convicted"}') == 1


async def test_what_a_death_before_the_first_token_leaves_is_not_tried_one_by_one(autojump_clock):
    """As at the start of a step, when all that a worker has waits for its prefill; one by one it would take 30 s."""
    hold = FaultPlan.of(faults.Fault(at_token(0), STALL, first(64)))
    settings = {"worker_urls": ["http://w1:30000"], "stall_timeout_secs": 0}
    async with world(plans=[hold, None, None], options=WorkerOptions(tick=0.5), **settings) as w:
        answers = {}

        async def client(number):
            body = generate(4, rid=f"r{number:02}", input_ids=[5, number])
            answers[number] = judged(await w.ask(body), body, ORACLE)

        async with trio.open_nursery() as clients:
            for number in range(64):
                clients.start_soon(client, number)
            await until(lambda: w.workers[0].live == 64)
            for worker in w.workers[1:]:
                w.app.fleet.add(worker.url)
            await w.ready()
            began = trio.current_time()
            w.workers[0].kill()
        assert [wrong for wrong in answers.values() if wrong] == []
        assert len(answers) == 64
        assert trio.current_time() - began < 15


async def test_a_clients_retries_cost_the_fleet_nothing(autojump_clock):
    """The same answer 60 times, and no worker sees any of them, under whatever rid; after the ttl it may try again."""
    async with world(plans=[None] * 4, health_check_interval_secs=1) as w:
        assert (await w.ask(POISON)).status == 502
        deaths = sum(worker.deaths for worker in w.workers)
        seen = sum(len(worker.generates) for worker in w.workers)
        for number in range(60):
            response = await w.ask({**POISON, "rid": f"retry{number}"})
            assert (response.status, response.json()["reason"]) == (502, REASON)
        assert sum(worker.deaths for worker in w.workers) == deaths == 2
        assert sum(len(worker.generates) for worker in w.workers) == seen
        for worker in w.workers:
            await worker.restart()
        await trio.sleep(601)
        assert (await w.ask(POISON)).json()["reason"] == REASON
        assert sum(worker.deaths for worker in w.workers) == deaths + 2


async def test_refused_requests_can_be_poison_too(autojump_clock):
    """A request that is not migratable is not retried here, but its client retries it: it is convicted all the same."""
    body = {**POISON, "sampling_params": {"max_new_tokens": 4, "frequency_penalty": 0.5}}
    async with world(plans=[None] * 4) as w:
        reasons = [(await w.ask(body)).json()["reason"] for _ in range(6)]
        assert sum(worker.deaths for worker in w.workers) == 2
        assert reasons[2:] == [REASON] * 4


async def test_two_deaths_under_a_request_with_tokens_are_no_conviction(autojump_clock):
    """Bad luck is not poison: it had tokens each time."""
    plans = [FaultPlan.in_order([(at_token(2), KILL_WORKER)]) for _ in range(3)] + [None]
    async with world(plans=plans, policy="round_robin") as w:
        response = await w.ask(generate())
        assert judged(response, generate(), ORACLE) == []


async def test_a_suspect_that_gets_a_token_is_cleared(autojump_clock):
    """A worker dies under it before the first token; the next one serves it; later deaths count afresh."""
    plan = FaultPlan.of(faults.Fault(at_token(0), KILL_WORKER, rid_begins("unlucky")))
    async with world(plans=[plan, None], policy="round_robin") as w:
        for _ in range(2):
            body = generate(rid="unlucky")
            assert judged(await w.ask(body), body, ORACLE) == []
            await w.workers[0].restart()
            await w.ready()
        assert w.metric('dyn_relay_poison_total{event="suspect"}') == 2
        assert w.metric('dyn_relay_poison_total{event="cleared"}') == 2
        assert w.metric('dyn_relay_poison_total{event="convicted"}') == 0


async def test_what_stock_would_die_of_is_refused_here(autojump_clock):
    """A negative id and a negative logprob_start_len: stock's 400, and no worker sees them."""
    async with world() as w:
        for broken in ({"input_ids": [5, -1]}, {"input_ids": [5], "return_logprob": True, "logprob_start_len": -7}):
            response = await w.ask(broken)
            assert response.status == 400
            assert list(response.json()) == ["error"]
            response = await w.ask({**broken, "stream": True})
            assert (response.status, response.values()[0]["error"]["code"]) == (200, 400)
            assert response.events()[-1] == b"[DONE]"
        assert [worker.generates for worker in w.workers] == [[], []]
