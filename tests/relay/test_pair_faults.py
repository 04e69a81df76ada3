"""A leg of a pair is killed, cut, or fails by itself, at each phase: an exact answer, and nobody works for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from dyn_testkit import faults
from dyn_testkit.faults import (
    CLOSE,
    COMMENTS_ONLY,
    EMPTY_200,
    GARBAGE,
    KILL_WORKER,
    RESET,
    FaultPlan,
    What,
    Where,
    abort_event,
    at_token,
    status,
)
from dyn_testkit.worker import MockWorker, WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged
from tests.relay.pairs import Pairs, pairs

LOGPROBS: dict[str, Any] = {"logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [3, 4]}
SHAPES = pytest.mark.parametrize(
    ("stream", "dialect"),
    [(True, "cumulative"), (True, "incremental"), (False, "cumulative")],
    ids=["cumulative", "incremental", "unary"],
)
BODIES = pytest.mark.parametrize("more", [{}, LOGPROBS], ids=["plain", "logprobs"])
BEGUN = (faults.AT_BOOTSTRAP, faults.IN_TRANSFER, faults.AFTER_TRANSFER)
EARLY = (faults.AT_HEAD, *BEGUN)
TOKENS = tuple(at_token(k) for k in (0, 1, 2, 5, 7))

#: Where in a leg, and what.
CUTS = [(where, what) for where in EARLY for what in (KILL_WORKER, CLOSE, RESET)]
SAID = [(faults.AT_HEAD, status(code)) for code in (500, 502, 503, 429)]
SAID += [(where, abort_event(code)) for where in BEGUN for code in (500, 503)]
SAID += [(faults.AT_HEAD, what) for what in (GARBAGE, EMPTY_200, COMMENTS_ONLY)]
PREFILL = [*CUTS, *SAID, *((at_token(k), what) for k in (0, 1) for what in (KILL_WORKER, CLOSE, RESET))]
DECODE = [
    *CUTS,
    *SAID,
    *((where, what) for where in TOKENS for what in (KILL_WORKER, CLOSE, RESET, GARBAGE)),
    *((where, abort_event(code)) for where in TOKENS for code in (500, 503)),
]


def spelt(fault: tuple[Where, What]) -> str:
    return str(faults.Fault(*fault))


def lively(worker: MockWorker, attempts: int = 1) -> set[str]:
    """Names of its first requests that it is still at work on."""
    return {one.json()["rid"] for one in worker.generates[:attempts]} & worker.scheduler.live.keys()


def nothing_left(w: Pairs) -> None:
    """Rooms and leases were given back; no room was used twice."""
    for side in (w.prefills, w.decodes):
        rooms = [room for one in side for room in one.rooms]
        assert len(set(rooms)) == len(rooms)
    assert len(w.app.rooms) == 0
    assert not [name for name, value in w.gauges.items() if value]
    assert [target.load for worker in w.app.fleet.workers for target in worker.targets] == [0] * len(w.workers)


async def one_fault(side: str, fault: tuple[Where, What], body: dict[str, Any], dialect: str, **config: Any) -> None:
    """The first request's leg on one side has this fault: an exact answer, and the other side's leg ends soon."""
    plan = FaultPlan.in_order([fault])
    options = WorkerOptions(tick=0.05, dialect=dialect)
    config = {"policy": "round_robin"} | config
    async with pairs(**{side: [plan, None]}, options=options, **config) as w:
        first = w.prefills[0], w.decodes[0]
        left: list[list[set[str]]] = []

        async def look() -> None:
            await plan.fired()
            await trio.sleep(1)
            left.append([lively(worker) for worker in first])

        w.nursery.start_soon(look)
        response = await w.ask(body)
        assert judged(response, body, ORACLE, dialect) == []
        await w.quiet()
        plan.verify()
        await trio.sleep(1.5)
        assert left == [[set(), set()]]
        nothing_left(w)


@SHAPES
@BODIES
@pytest.mark.parametrize("fault", PREFILL, ids=spelt)
async def test_prefill_fails(autojump_clock, stream, dialect, more, fault):
    """I1: a new pair, and a new room."""
    body = {**generate(8, stream=stream, sampling={"stream_interval": 1}), **more}
    await one_fault("prefill", fault, body, dialect)


@SHAPES
@BODIES
@pytest.mark.parametrize("fault", DECODE, ids=spelt)
async def test_decode_fails(autojump_clock, stream, dialect, more, fault):
    """I1: a new pair, and a new room; the prompt's logprobs stay the first attempt's."""
    body = {**generate(8, stream=stream, sampling={"stream_interval": 1}), **more}
    await one_fault("decode", fault, body, dialect)


@SHAPES
@pytest.mark.parametrize("what", [KILL_WORKER, CLOSE, RESET], ids=lambda what: what.kind.value)
@pytest.mark.parametrize("limit", [3, 0], ids=["protected", "unprotected"])
async def test_a_prefill_worker_that_dies_after_the_handover_harms_nobody(autojump_clock, stream, dialect, what, limit):
    """Decode has the cache, and needs nobody any more."""
    plan = FaultPlan.in_order([(faults.AFTER_TRANSFER, what)])
    options = WorkerOptions(tick=0.05, dialect=dialect)
    async with pairs(prefill=[plan, None], options=options, policy="round_robin", migration_limit=limit) as w:
        body = generate(8, stream=stream)
        assert judged(await w.ask(body), body, ORACLE, dialect) == []
        plan.verify()
        await w.quiet()
        assert sum(len(worker.generates) for worker in w.decodes) == 1
        assert [worker.failures for worker in w.app.fleet.workers] == [1, 0, 0, 0]
        nothing_left(w)


@pytest.mark.parametrize("what", [KILL_WORKER, CLOSE, RESET], ids=lambda what: what.kind.value)
@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2, 3], [4, 5]]], ids=["one", "list"])
async def test_what_it_has_not_told_of_the_prompt_is_missed_at_the_end(autojump_clock, what, prompts):
    """Nothing of an unprotected answer is seen before its end: only then it shows that it needs what was lost."""
    plan = FaultPlan.in_order([(faults.AFTER_TRANSFER, what)])
    async with pairs(prefill=[plan, None], options=WorkerOptions(tick=0.2), policy="round_robin") as w:
        wish = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 8}}
        response = await w.ask({**wish, "input_ids": prompts, "stream": False})
        assert response.status == 502
        assert b"prefill" in response.body
        plan.verify()
        await w.quiet()
        nothing_left(w)


@SHAPES
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("where", [*BEGUN, at_token(1)], ids=lambda where: where.spot.value)
@pytest.mark.parametrize("code", [500, 503])
async def test_the_engines_own_error(autojump_clock, stream, dialect, side, where, code):
    """What cannot be continued fails in the words of whichever leg has failed, with its status, and the other ends."""
    if side == "prefill" and where.spot is faults.Spot.AT_TOKEN:
        where = faults.AFTER_TRANSFER
    plan = FaultPlan.in_order([(where, abort_event(code))])
    options = WorkerOptions(tick=0.05, dialect=dialect)
    config = {"policy": "round_robin", "migration_limit": 0}
    async with pairs(**{side: [plan, None]}, options=options, **config) as w:
        response = await w.ask(generate(8, stream=stream, logprob_start_len=0))
        assert b"Injected abort" in response.body
        assert response.status == (200 if response.events() else code)
        plan.verify()
        await trio.sleep(1)
        assert [worker.live for worker in w.workers] == [0] * 4
        assert sum(len(worker.generates) for worker in w.workers) == 2
        await w.quiet()
        nothing_left(w)


@SHAPES
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("code", [401, 403])
async def test_a_key_that_one_leg_does_not_know(autojump_clock, stream, dialect, side, code):
    """The client has no part in it: another worker is asked."""
    plan = FaultPlan.in_order([(faults.AT_HEAD, status(code))])
    options = WorkerOptions(tick=0.05, dialect=dialect)
    async with pairs(**{side: [plan, None]}, options=options, policy="round_robin") as w:
        body = generate(8, stream=stream, logprob_start_len=0)
        assert judged(await w.ask(body), body, ORACLE, dialect) == []
        plan.verify()
        await w.quiet()
        assert [one["cause"] for one in w.rows[0]["attempts"]] == ["key", None]
        nothing_left(w)


@SHAPES
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_continuation_that_one_leg_refuses(autojump_clock, stream, dialect, side):
    """Another one took the request: it is this one's limit, and not the client's mistake."""
    refused = FaultPlan.in_order([(faults.AT_HEAD, status(400))])
    plans: dict[str, Any] = {
        "prefill": [None, None],
        "decode": [FaultPlan.in_order([(at_token(3), KILL_WORKER)]), None],
    }
    plans[side][1] = refused
    options = WorkerOptions(tick=0.05, dialect=dialect)
    async with pairs(**plans, options=options, policy="round_robin") as w:
        body = generate(8, stream=stream, logprob_start_len=0)
        assert judged(await w.ask(body), body, ORACLE, dialect) == []
        refused.verify()
        await w.quiet()
        assert [one["cause"] for one in w.rows[0]["attempts"]] == ["cut", "unfit", None]
        nothing_left(w)
