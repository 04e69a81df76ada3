"""Somebody wishes a request to a pair to end, or a leg says nothing: both legs end, and the right one is blamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from dyn_testkit import faults
from dyn_testkit.client import Response, fetch
from dyn_testkit.faults import KILL_WORKER, STALL, FaultPlan, Where, at_token
from dyn_testkit.relay import until
from dyn_testkit.simnet import CLIENT, Link
from dyn_testkit.worker import MockWorker, Phase, WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged
from tests.relay.pairs import Pairs, pairs

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
UNPROTECTED: dict[str, Any] = {"sampling": {"frequency_penalty": 0.5}}
KINDS = pytest.mark.parametrize(
    "more", [{}, {"logprob_start_len": 0}, UNPROTECTED], ids=["plain", "logprobs", "unprotected"]
)
EARLY = (faults.AT_HEAD, faults.AT_BOOTSTRAP, faults.IN_TRANSFER, faults.AFTER_TRANSFER)
#: Seconds after the sending, with passes of half a second: prefill computes, hands over, decode goes through tokens.
MOMENTS = (0.0, 0.1, 0.6, 1.1, 1.6, 3.2)
SLOW = WorkerOptions(tick=0.5)


def finish(response: Response) -> str:
    values = response.values() or [response.json()]
    reason: dict[str, Any] = values[-1]["meta_info"]["finish_reason"]
    return str(reason["type"])


def live(w: Pairs) -> list[int]:
    return [worker.live for worker in w.workers]


def phase_of(worker: MockWorker) -> Phase | None:
    return worker.phases[-1][1] if worker.phases else None


def unblamed(w: Pairs) -> None:
    """Nobody has failed, nothing is held."""
    assert [worker.failures for worker in w.app.fleet.workers] == [0] * len(w.workers)
    assert not [name for name, value in w.gauges.items() if value]
    assert len(w.app.rooms) == 0


@BOTH
@KINDS
@pytest.mark.parametrize("moment", MOMENTS)
async def test_an_abort_ends_both_legs(autojump_clock, stream, more, moment):
    """I6, H1: what an engine says of a leg that it was told to abort is no failure, and the client gets an abort."""
    async with pairs(options=SLOW) as w:
        answers: list[Response] = []

        async def client() -> None:
            answers.append(await w.ask(generate(40, stream=stream, rid="R", **more)))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: sum(live(w)) == 2)
            await trio.sleep(moment)
            await w.ask({"rid": "R"}, "/abort_request")
            await trio.sleep(1)
            assert live(w) == [0, 0, 0, 0]
        assert answers[0].status == 200, (answers[0].body, w.rows)
        assert answers[0].complete
        assert finish(answers[0]) == "abort"
        assert sum(len(worker.generates) for worker in w.workers) == 2
        await w.quiet()
        unblamed(w)
        assert [row["outcome"] for row in w.rows] == ["aborted"]


@BOTH
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("where", EARLY, ids=lambda where: where.spot.value)
async def test_an_abort_while_one_leg_hangs(autojump_clock, stream, side, where):
    """I6: the other leg is free within a second, and the client has its answer."""
    plan = FaultPlan.in_order([(where, STALL)])
    async with pairs(**{side: [plan]}, **{"decode" if side == "prefill" else "prefill": [None]}) as w:
        answers: list[Response] = []

        async def client() -> None:
            answers.append(await w.ask(generate(8, stream=stream, rid="R", logprob_start_len=0)))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await plan.fired()
            await w.ask({"rid": "R"}, "/abort_request")
            other = w.decodes[0] if side == "prefill" else w.prefills[0]
            await trio.sleep(1)
            assert other.live == 0
        assert answers[0].status == 200
        assert finish(answers[0]) == "abort"
        await w.quiet()
        unblamed(w)
        await trio.sleep(1)
        assert live(w) == [0, 0]


@BOTH
@KINDS
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_client_that_leaves_frees_both_legs(autojump_clock, stream, more, moment):
    """C12, I6."""
    async with pairs(options=SLOW) as w:
        data = json.dumps(generate(40, stream=stream, **more)).encode()
        connection = await w.network.connect("proxy", 30000)
        await connection.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
        await until(lambda: sum(live(w)) == 2)
        await trio.sleep(moment)
        connection.close()
        await trio.sleep(1)
        assert live(w) == [0, 0, 0, 0]
        await w.quiet()
        unblamed(w)
        assert [row["outcome"] for row in w.rows] == ["client_gone"]


@BOTH
async def test_a_client_that_leaves_while_a_leg_is_told_to_stop(autojump_clock, stream):
    """The prefill worker was full; the next pair waits until decode knows, and is told so though nobody waits now."""
    async with pairs(prefill=[None, None], decode=[None], policy="round_robin") as w:
        w.network.link(CLIENT, "d1", Link(latency=1))
        w.prefills[0].scheduler.full = True
        data = json.dumps(generate(40, stream=stream, rid="R", **UNPROTECTED)).encode()
        connection = await w.network.connect("proxy", 30000)
        await connection.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
        await until(lambda: w.prefills[0].generates)
        await trio.sleep(1)  # the order has two seconds to go before it can be sent
        assert w.decodes[0].aborts == []
        connection.close()
        await trio.sleep(5)
        assert [order["rid"] for order in w.decodes[0].aborts] == ["R"]
        await w.quiet()
        assert [row["outcome"] for row in w.rows] == ["client_gone"]


@BOTH
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_trainers_abort_at_the_workers_is_not_rescued(autojump_clock, stream, side, moment):
    """H5: nor is one that the engine calls a failed transfer."""
    async with pairs(options=SLOW) as w:
        answers: list[Response] = []

        async def client() -> None:
            answers.append(await w.ask(generate(40, stream=stream)))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: sum(live(w)) == 2)
            await trio.sleep(moment)
            told = w.prefills if side == "prefill" and moment < 1 else w.decodes
            for worker in told:
                await fetch(w.network, worker.url, "/abort_request", {"abort_all": True})
        assert answers[0].status == 200
        assert finish(answers[0]) == "abort"
        assert sum(len(worker.generates) for worker in w.workers) == 2
        await w.quiet()
        unblamed(w)


@BOTH
@KINDS
@pytest.mark.parametrize("wish", ["at the worker", "at the proxy"])
async def test_prefill_says_first_that_decode_has_ended(autojump_clock, stream, more, wish):
    """I6, H5: a decode worker that is told to abort tells prefill, which calls that a failure of unknown reason.

    Decode's own words, which are later here, say what it was: no failure, and nothing to rescue.
    """
    async with pairs(prefill=[None], decode=[None], options=WorkerOptions(tick=0.05, transfer_ticks=100)) as w:
        w.network.link(CLIENT, "d1", Link(latency=0.2))
        answers: list[Response] = []

        async def client() -> None:
            answers.append(await w.ask(generate(8, stream=stream, rid="R", **more)))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: all(phase_of(worker) is Phase.TRANSFER for worker in w.workers))
            if wish == "at the worker":
                await fetch(w.network, w.decodes[0].url, "/abort_request", {"abort_all": True})
            else:
                await w.ask({"rid": "R"}, "/abort_request")
        assert answers[0].status == 200, (answers[0].body, w.rows)
        assert finish(answers[0]) == "abort"
        assert sum(len(worker.generates) for worker in w.workers) == 2
        await w.quiet()
        unblamed(w)


@BOTH
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_abort_at_the_workers_is_resumed_if_that_is_wished(autojump_clock, stream, side):
    """H1: --on-abort resume."""
    async with pairs(options=SLOW, on_abort="resume", policy="round_robin") as w:
        body, answers = generate(8, stream=stream), []

        async def client() -> None:
            answers.append(await w.ask(body))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: sum(live(w)) == 2)
            await trio.sleep(0.1)
            first = w.prefills[0] if side == "prefill" else w.decodes[0]
            await fetch(w.network, first.url, "/abort_request", {"abort_all": True})
        assert judged(answers[0], body, ORACLE) == []
        await w.quiet()
        unblamed(w)


@BOTH
@pytest.mark.parametrize(
    ("side", "where"),
    [("prefill", where) for where in EARLY] + [("decode", where) for where in (*EARLY, at_token(0))],
    ids=lambda value: value.spot.value if isinstance(value, Where) else value,
)
@pytest.mark.parametrize("more", [{}, {"logprob_start_len": 0}], ids=["plain", "logprobs"])
async def test_silence_before_the_first_token(autojump_clock, stream, side, where, more):
    """I3: --first-token-timeout-secs counts for each leg: whichever is silent is blamed, and a new pair is found."""
    plan = FaultPlan.in_order([(where, STALL)])
    async with pairs(**{side: [plan, None]}, policy="round_robin", first_token_timeout_secs=10) as w:
        body = {**generate(8, stream=stream), **more}
        assert judged(await w.ask(body), body, ORACLE) == []
        plan.verify()
        await w.quiet()
        [row] = w.rows
        harmless = side == "prefill" and where is faults.AFTER_TRANSFER and not more
        assert [one["cause"] for one in row["attempts"]] == [*([] if harmless else ["first_token"]), None]
        # A decode leg that has not come to the handover keeps the prefill leg from its answer.
        waits = side == "decode" and where is not faults.AFTER_TRANSFER
        guilty = "prefill" if side == "prefill" or waits else "decode"
        failures = {worker.url: worker.failures for worker in w.app.fleet.workers}
        first = {"prefill": w.prefills[0].url, "decode": w.decodes[0].url}[guilty]
        assert failures == {url: int(url == first and not harmless) for url in failures}
        assert row["duration"] < 21
        assert len(w.app.rooms) == 0


@BOTH
async def test_who_keeps_a_prefill_worker_waiting_is_not_asked_again(autojump_clock, stream):
    """I3: a decode worker that never comes for its cache: the deadline is prefill's, but the next pair has neither."""
    plans = [FaultPlan.in_order([(faults.AT_BOOTSTRAP, STALL)]) for _ in range(2)]
    config = {"decode_policy": "consistent_hashing", "first_token_timeout_secs": 10}
    async with pairs(decode=plans, **config) as w:
        body = generate(8, stream=stream)
        assert judged(await w.ask(body, headers={"x-smg-routing-key": "s"}), body, ORACLE) == []
        await w.quiet()
        [row] = w.rows
        assert {one["url"] for one in row["attempts"][:2]} == {worker.url for worker in w.decodes}


@BOTH
@pytest.mark.parametrize("where", EARLY, ids=lambda where: where.spot.value)
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_frozen_worker(autojump_clock, stream, where, side):
    """Without that deadline: nothing comes, and the worker does not answer probes any more: it is given up."""
    plan = FaultPlan.in_order([(where, STALL)])
    async with pairs(**{side: [plan, None]}, policy="round_robin", stall_timeout_secs=20) as w:
        body = generate(8, stream=stream, logprob_start_len=0)
        answers = []

        async def client() -> None:
            answers.append(await w.ask(body))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await plan.fired()
            (w.prefills if side == "prefill" else w.decodes)[0].freeze()
        assert judged(answers[0], body, ORACLE) == []
        await w.quiet()
        [row] = w.rows
        assert row["duration"] < 150
        assert len(w.app.rooms) == 0


@BOTH
@pytest.mark.parametrize(
    ("side", "where"),
    [(side, where) for side in ("prefill", "decode") for where in EARLY],
    ids=lambda value: value.spot.value if isinstance(value, Where) else value,
)
async def test_a_death_is_blamed_on_the_dead(autojump_clock, stream, side, where):
    """One of two dies, the only one of the other side lives: it is asked again, and nothing is held against it."""
    plan = FaultPlan.in_order([(where, KILL_WORKER)])
    other = "decode" if side == "prefill" else "prefill"
    options = WorkerOptions(tick=0.05)
    async with pairs(**{side: [plan, None], other: [None]}, options=options, policy="round_robin") as w:
        body = generate(8, stream=stream, logprob_start_len=0)
        assert judged(await w.ask(body), body, ORACLE) == []
        plan.verify()
        await w.quiet()
        failures = {worker.url: worker.failures for worker in w.app.fleet.workers}
        dead = (w.prefills if side == "prefill" else w.decodes)[0].url
        assert {url for url, count in failures.items() if count} == {dead}
