"""A kill anywhere, any number of times: the client gets the answer that it would have got."""

from __future__ import annotations

import itertools
import re

import pytest

from dyn_testkit import faults
from dyn_testkit.client import fetch
from dyn_testkit.faults import CLOSE, RESET, FaultPlan, at_token
from dyn_testkit.simnet import Fragmentation
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world

DIALECTS = ("cumulative", "incremental", "mixed")
N = 8
FULL = {"top_logprobs_num": 2, "logprob_start_len": 0, "token_ids_logprob": [3, 4], "return_prompt_token_ids": True}

dialects = pytest.mark.parametrize("dialect", DIALECTS)
both = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


@both
@dialects
@pytest.mark.parametrize("late", [False, True], ids=["finish-with-token", "late-finish"])
async def test_kill_at_every_token(autojump_clock, stream, dialect, late):
    request = generate(N, stream=stream, **FULL)
    options = WorkerOptions(dialect=dialect, late_finish=late)
    for k, what in itertools.product(range(N + 1), (CLOSE, RESET)):
        plan = FaultPlan.in_order([(at_token(k), what)])
        async with world(plans=[plan, None], options=options, policy="round_robin") as w:
            response = await w.ask(request)
            assert judged(response, request, ORACLE, dialect) == [], (k, what)
            plan.verify()
            await w.quiet()
            assert w.metric("dyn_relay_attempts_in_flight") == 0


@both
@dialects
async def test_two_and_three_kills(autojump_clock, stream, dialect):
    """E4: nothing delivered is lost. Each attempt lives for a few tokens; all combinations of small numbers."""
    request = generate(12, stream=stream, **FULL)
    options = WorkerOptions(dialect=dialect)
    for lives in [*itertools.product(range(4), repeat=2), *itertools.product((0, 1, 3), repeat=3)]:
        plans = [FaultPlan.in_order([(at_token(k), RESET)]) for k in lives]
        async with world(plans=[*plans, None], options=options, policy="round_robin") as w:
            response = await w.ask(request)
            assert judged(response, request, ORACLE, dialect) == [], lives
            for plan in plans:
                plan.verify()


@both
@pytest.mark.parametrize("first", DIALECTS)
@pytest.mark.parametrize("second", DIALECTS)
async def test_the_clients_dialect_outlives_its_worker(autojump_clock, stream, first, second):
    """F3: the continuation's worker speaks another dialect; the client's stays.

    After one event, which reads alike in all of them, the worker's own word counts; of `mixed` there is none.
    """
    request = generate(N, stream=stream, **FULL)
    options = [WorkerOptions(dialect=first), WorkerOptions(dialect=second)]
    for k in range(2 if "mixed" in (first, second) else 1, N):
        plan = FaultPlan.in_order([(at_token(k), CLOSE)])
        async with world(plans=[plan, None], options=options, policy="round_robin") as w:
            response = await w.ask(request)
            assert judged(response, request, ORACLE, first) == [], k
            plan.verify()


@both
@dialects
async def test_a_cut_at_any_byte(autojump_clock, stream, dialect):
    """D4: at the head, inside a chunk size, inside the JSON, after the last token, after the finish, after [DONE]."""
    request = generate(N, stream=stream)
    places = [
        faults.AT_HEAD,
        *(faults.inside_chunk_size(k) for k in (1, 4, N)),
        *(faults.inside_json(k, byte) for k in (1, 4, N) for byte in (0, 1, 15, 40, 200, 10_000)),
        faults.AFTER_LAST_TOKEN,
    ]
    finished = [faults.AFTER_FINISH, faults.BEFORE_LAST_CHUNK, faults.AFTER_DONE]
    for where, what in itertools.product([*places, *finished], (CLOSE, RESET)):
        plan = FaultPlan.in_order([(where, what)])
        async with world(
            plans=[plan, None],
            options=WorkerOptions(dialect=dialect),
            policy="round_robin",
            upstream_pool_idle_timeout_secs=0,
        ) as w:
            response = await w.ask(request)
            assert judged(response, request, ORACLE, dialect) == [], (where, what)
            await w.quiet()
            plan.verify()
            # Where nothing was left to generate, nobody was asked to.
            done = where in finished or where == faults.AFTER_LAST_TOKEN
            assert len(w.workers[1].generates) == (0 if done else 1), where


async def test_unary_resumes_instead_of_starting_again(autojump_clock):
    """D3: a unary request is streamed from its worker: a late death costs only what came since the last event."""
    plan = FaultPlan.in_order([(at_token(3000), RESET)])
    options = WorkerOptions(dialect="incremental")
    async with world(plans=[plan, None], options=options, policy="round_robin") as w:
        request = generate(4096, stream=False)
        response = await w.ask(request)
        assert judged(response, request, ORACLE) == []
        continuation = w.workers[1].generates[0].json()
        assert len(continuation["input_ids"]) == 3 + 3000
        assert continuation["sampling_params"]["max_new_tokens"] == 1096


async def test_a_unary_answer_costs_a_cumulative_worker_little(autojump_clock):
    """F4: coarse events: what a cumulative worker sends is at most about eight times the final answer."""
    async with world(plans=[None]) as w:
        request = generate(3000, stream=False)
        response = await w.ask(request)
        sent = w.workers[0].generates[0].json()["sampling_params"]["stream_interval"]
        assert sent == 200
        assert judged(response, request, ORACLE) == []
    async with world(plans=[None], options=WorkerOptions(version="0.5.0")) as w:
        response = await w.ask(generate(30, stream=False))
        assert "stream_interval" not in w.workers[0].generates[0].json()["sampling_params"]
        assert response.status == 200


@both
async def test_budgets_shrink(autojump_clock, stream):
    """E1, E2, C9: max and min are reduced; an absent max is 128, or what the worker prefers."""
    cases = [
        ({"max_new_tokens": 24}, None, 9, 15, None),
        ({"max_new_tokens": 24, "min_new_tokens": 20}, None, 8, 16, 12),
        ({"max_new_tokens": 40, "min_new_tokens": 20}, None, 30, 10, 0),
        ({}, None, 100, 28, None),
        ({}, {"max_new_tokens": 50}, 20, 30, None),
    ]
    for sampling, preferred, k, left, minimum in cases:
        options = WorkerOptions(
            dialect="incremental", preferred_sampling_params=preferred, min_new_tokens_needs_tokenizer=False
        )
        plan = FaultPlan.in_order([(at_token(k), CLOSE)])
        async with world(plans=[plan, None], options=options, policy="round_robin") as w:
            params = {"ignore_eos": True, "stream_interval": 1, **sampling}
            request = {"input_ids": [5, 6], "stream": stream, "sampling_params": params}
            response = await w.ask(request)
            assert response.complete
            sent = w.workers[1].generates[0].json()
            assert sent["sampling_params"]["max_new_tokens"] == left
            assert len(sent["input_ids"]) == 2 + k
            if minimum is not None:
                assert sent["sampling_params"].get("min_new_tokens", 0) == minimum


@both
async def test_no_call_for_nothing(autojump_clock, stream):
    """E1, E9: the budget was spent when the cut came: a `length` finish, and no second call."""
    plan = FaultPlan.in_order([(faults.AFTER_LAST_TOKEN, CLOSE)])
    async with world(plans=[plan, None], policy="round_robin") as w:
        response = await w.ask(generate(N, stream=stream))
        assert judged(response, generate(N, stream=stream), ORACLE) == []
        value = response.values()[-1] if stream else response.json()
        assert value["meta_info"]["finish_reason"] == {"type": "length", "length": N}
        assert value["meta_info"]["e2e_latency"] >= 0
        assert w.workers[1].generates == []
        await w.quiet()
        assert w.metric('dyn_relay_requests_total{outcome="completed_here"}') == 1


@both
async def test_prompt_metadata_is_the_first_attempts(autojump_clock, stream):
    """F6, M2: two deaths: prompt_tokens, cached_tokens, input logprobs stay attempt 0's."""
    plans = [FaultPlan.in_order([(at_token(k), CLOSE)]) for k in (2, 3)]
    async with world(plans=[*plans, None], policy="round_robin") as w:
        request = generate(N, stream=stream, logprob_start_len=0)
        response = await w.ask(request)
        values = response.values() if stream else [response.json()]
        for value in values:
            meta = value["meta_info"]
            assert (meta["prompt_tokens"], meta["cached_tokens"]) == (3, 0)
            assert len(meta["input_token_logprobs"]) == 3
        assert judged(response, request, ORACLE) == []
        for worker in w.workers[1:]:
            assert worker.generates[0].json()["logprob_start_len"] == -1


@both
@dialects
async def test_weight_versions_tile_the_answer(autojump_clock, stream, dialect):
    """H2: tokens 0..5 come from version 7, the rest from version 8: spans say so, the scalar is the last."""
    plan = FaultPlan.in_order([(at_token(5), CLOSE)])
    options = [WorkerOptions(dialect=dialect, weight_version=version) for version in ("7", "8")]
    async with world(plans=[plan, None], options=options, policy="round_robin") as w:
        response = await w.ask(generate(N, stream=stream, sampling={"stream_interval": 1}))
        meta = (response.values()[-1] if stream else response.json())["meta_info"]
        spans = [{"version": "7", "start": 0, "end": 5}, {"version": "8", "start": 5, "end": N}]
        assert meta["weight_versions"] == spans
        assert meta["weight_version"] == "8"


async def test_without_a_fault_the_bytes_are_the_workers(autojump_clock):
    """F5, E10, E13: passthrough, both ways: the body as the client wrote it, the events as the worker wrote them."""
    raw = b'{"rid":"a","unknown":[1e2, 1.50],"input_ids":[5,6,7],"stream":true,"sampling_params":{"max_new_tokens":4}}'
    async with world(policy="round_robin") as w:
        response = await w.ask(raw)
        [recorded] = w.workers[0].generates
        assert recorded.request.body == raw
        direct = await fetch(w.network, w.workers[1].url, "/generate", raw)
        strip = [event for event in direct.events() if b"response_sent" not in event and b"e2e" not in event]
        assert [event for event in response.events() if event in strip] == strip


async def test_a_long_stream_is_byte_equal(autojump_clock):
    """C7: a thousand events through the proxy, through small buffers and odd reads: the worker's bytes, all of them."""
    raw = b'{"rid":"a","input_ids":[5,6,7],"stream":true,"sampling_params":{"max_new_tokens":1000,"ignore_eos":true}}'
    cuts = Fragmentation(largest=700)
    async with world(policy="round_robin", fragmentation=cuts, buffer=2048) as w:
        response = await w.ask(raw)
        direct = await fetch(w.network, w.workers[1].url, "/generate", raw)
        assert len(direct.events()) == 1001

        def timeless(data):
            return re.sub(rb'"(response_sent_to_client_ts|e2e_latency)":[^,}]+', b"", data)

        assert [timeless(event) for event in response.events()] == [timeless(event) for event in direct.events()]


@both
async def test_a_seeded_sample_goes_on_as_it_would_have(autojump_clock, stream):
    """E12: the engine's draw depends on (seed, position): kills at every token change nothing."""
    request = generate(N, stream=stream, sampling={"temperature": 1.0, "sampling_seed": 7, "stream_interval": 1})
    for k in range(N + 1):
        plan = FaultPlan.in_order([(at_token(k), CLOSE)])
        async with world(plans=[plan, None], policy="round_robin") as w:
            assert judged(await w.ask(request), request, ORACLE) == [], k


async def test_a_session_outlives_its_worker(autojump_clock):
    """A3: two turns of one session; the worker dies between them."""
    async with world() as w:
        key = {"x-smg-routing-key": "session-1"}
        for turn in range(2):
            assert judged(await w.ask(generate(), headers=key), generate(), ORACLE) == [], turn
            if not turn:
                next(worker for worker in w.workers if worker.generates).kill()
