"""What the prefill worker says, and when: too late, at a bad moment, to somebody else, or not what it was asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio

from dyn_relay.http11.client import Response as Raw
from dyn_relay.http11.client import fetch as real
from dyn_relay.relay import leg
from dyn_testkit import faults
from dyn_testkit.client import Response, fetch
from dyn_testkit.faults import KILL_WORKER, STALL, Fault, FaultPlan, abort_event, at_token
from dyn_testkit.relay import until
from dyn_testkit.simnet import CLIENT, Link
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged
from tests.relay.pairs import pairs
from tests.relay.test_pair_ends import finish, live, unblamed
from tests.relay.test_pair_faults import LOGPROBS, nothing_left

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
UNPROTECTED = {"sampling": {"frequency_penalty": 0.5}}
SLOW = WorkerOptions(tick=0.5)
AT_ONCE = WorkerOptions(tick=0)


@pytest.fixture
def says(monkeypatch):
    """Give a function: the answers of prefill workers are changed by it, the first `most` of them."""

    def change(how: Callable[[Raw], Raw], most: int = 1) -> None:
        answers: list[Raw] = []

        async def fetched(pool: Any, origin: Any, method: str, path: str, **more: Any) -> Raw:
            answer = await real(pool, origin, method, path, **more)
            answers.append(answer)
            return how(answer) if len(answers) <= most else answer

        monkeypatch.setattr(leg, "fetch", fetched)

    return change


def with_meta(answer: Raw, **meta: Any) -> Raw:
    """Another `meta_info`; a value of `...` is left out."""

    def changed(data: bytes) -> bytes:
        value = json.loads(data)
        value["meta_info"] = {name: one for name, one in {**value["meta_info"], **meta}.items() if one is not ...}
        return json.dumps(value).encode()

    if not answer.body.startswith(b"data: "):
        return replace(answer, body=changed(answer.body))
    lines = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n") if line]
    lines = [line if line == b"[DONE]" else changed(line) for line in lines]
    return replace(answer, body=b"".join(b"data: " + line + b"\n\n" for line in lines))


# -- at a bad moment ---------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("more", [{}, UNPROTECTED], ids=["protected", "unprotected"])
@pytest.mark.parametrize("tokens", [1, 2, 4])
async def test_both_end_in_one_pass(autojump_clock, stream, more, tokens):
    """The prefill worker's answer comes while decode's is being taken, whole."""
    async with pairs(options=AT_ONCE) as w:
        for _ in range(20):
            body = generate(tokens, stream=stream, **more)
            assert judged(await w.ask(body), body, ORACLE) == []
        await w.quiet()
        nothing_left(w)


@BOTH
@pytest.mark.parametrize("code", [400, 500, 503])
@pytest.mark.parametrize("tokens", [1, 2, 8])
async def test_an_error_after_decodes_first_token_is_no_matter(autojump_clock, stream, code, tokens):
    """The cache was handed over: nothing is owed that the answer could lack."""
    plan = FaultPlan.of(Fault(faults.AFTER_TRANSFER, abort_event(code)))
    async with pairs(prefill=[plan, plan], options=AT_ONCE) as w:
        for number in range(10):
            body = generate(tokens, stream=stream, input_ids=[number, 1])
            response = await w.ask(body)
            if response.status == 200 and b'"error"' not in response.body and b"Injected" not in response.body:
                assert judged(response, body, ORACLE) == []
            else:  # it came before that token
                assert response.status == code or stream
                assert code == 400
            assert b"internal" not in response.body
        await w.quiet()
        nothing_left(w)


@BOTH
@pytest.mark.parametrize("limit", [3, 0], ids=["protected", "unprotected"])
async def test_an_error_that_comes_late(autojump_clock, stream, limit):
    plan = FaultPlan.in_order([(faults.AFTER_TRANSFER, STALL)])
    async with pairs(prefill=[plan, None], options=SLOW, policy="round_robin", migration_limit=limit) as w:
        body, answers = generate(12, stream=stream), []

        async def client() -> None:
            answers.append(await w.ask(body))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await plan.fired()
            await trio.sleep(3)
            w.prefills[0].kill()
        assert judged(answers[0], body, ORACLE) == []
        assert sum(len(worker.generates) for worker in w.decodes) == 1
        await w.quiet()
        nothing_left(w)


async def test_a_prefill_worker_that_dies_while_nothing_can_be_seen(autojump_clock):
    """A unary answer that is only forwarded: whether decode has the cache it knows itself."""
    plan = FaultPlan.in_order([(faults.AFTER_TRANSFER, KILL_WORKER)])
    async with pairs(prefill=[plan, None], options=SLOW, policy="round_robin") as w:
        body = generate(12, stream=False, **UNPROTECTED)
        assert judged(await w.ask(body), body, ORACLE) == []
        plan.verify()


async def test_a_prefill_worker_that_dies_before_and_nothing_can_be_seen(autojump_clock):
    """Decode tells that it has lost it."""
    plan = FaultPlan.in_order([(faults.IN_TRANSFER, KILL_WORKER)])
    async with pairs(prefill=[plan, None], options=SLOW, policy="round_robin") as w:
        response = await w.ask(generate(12, stream=False, **UNPROTECTED))
        assert response.status == 500
        assert b"Lost connection with prefill" in response.body
        await w.quiet()
        assert w.rows[0]["duration"] < 15


# -- somebody wishes it ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("mode", ["relay", "resume"])
@pytest.mark.parametrize("moment", [0.1, 0.4, 0.7])
async def test_a_trainers_abort_where_the_prompt_is_computed(autojump_clock, stream, mode, moment):
    """H5: in its queue or amid its work; it ends as an aborted answer, and decode waits for it in vain."""
    async with pairs(options=replace(SLOW, max_running_requests=1), policy="round_robin", on_abort=mode) as w:
        answers: dict[int, Response] = {}
        bodies = [generate(8, stream=stream, input_ids=[number, 1]) for number in range(4)]

        async def client(number: int) -> None:
            answers[number] = await w.ask(bodies[number])

        async with trio.open_nursery() as clients:
            for number in range(4):
                clients.start_soon(client, number)
                await until(lambda number=number: sum(len(one.generates) for one in w.prefills) == number + 1)
            await trio.sleep(moment)
            aborted = len(w.prefills[0].scheduler.live)
            assert aborted
            await fetch(w.network, w.prefills[0].url, "/abort_request", {"abort_all": True})
        await w.quiet()
        assert max(row["duration"] for row in w.rows) < 30
        unblamed(w)
        if mode == "resume":
            assert [judged(answers[number], bodies[number], ORACLE) for number in range(4)] == [[]] * 4
        else:
            assert sum(finish(answer) == "abort" for answer in answers.values()) == aborted


@BOTH
async def test_a_leg_that_was_only_told_lets_the_other_one_speak(autojump_clock, stream, says):
    """H5: decode was aborted, and has told prefill, which does not know why; its word comes first."""
    room = "KVTransferError(bootstrap_room=7): Failed due to an unknown reason from another rank"
    reason = {"type": "abort", "message": f"Prefill transfer failed with exception {room}", "status_code": 500}
    says(lambda answer: with_meta(answer, finish_reason=reason))
    async with pairs(options=WorkerOptions(tick=0.2), policy="round_robin") as w:
        answers: list[Response] = []

        async def client() -> None:
            answers.append(await w.ask(generate(8, stream=stream)))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: sum(live(w)) == 1)  # the prefill worker has just answered
            await trio.sleep(0.05)
            await fetch(w.network, w.decodes[0].url, "/abort_request", {"abort_all": True})
        assert finish(answers[0]) == "abort"
        await w.quiet()
        unblamed(w)


@BOTH
@pytest.mark.parametrize("more", [{}, {"logprob_start_len": 0}], ids=["plain", "logprobs"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_drain_while_the_prefill_workers_answer_is_awaited(autojump_clock, stream, more, side):
    """Nobody waits for a worker that says nothing: the request is moved."""
    plan = FaultPlan.in_order([(faults.AFTER_TRANSFER, STALL)])
    async with pairs(prefill=[plan, None], options=WorkerOptions(tick=0.2), policy="round_robin") as w:
        body, answers = generate(30, stream=stream, sampling={"stream_interval": 1}, **more), []

        async def client() -> None:
            answers.append(await w.ask(body))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await plan.fired()
            await trio.sleep(1)
            leaving = (w.prefills if side == "prefill" else w.decodes)[0].url
            [name] = [worker.id for worker in w.app.fleet.workers if worker.url == leaving]
            await w.ask(None, f"/workers/{name}/drain?after=0", method="POST")
            await trio.sleep(2)
            assert name not in [worker.id for worker in w.app.fleet.workers]
        assert judged(answers[0], body, ORACLE) == []


# -- a client's mistake ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("sampling", [{"top_p": 2}, {"max_new_tokens": 999_999_999}], ids=str)
@pytest.mark.parametrize("late", ["p1", "d1"])
@pytest.mark.parametrize("more", [{}, {"logprob_start_len": 0}], ids=["plain", "logprobs"])
async def test_a_mistake_is_told_as_one_worker_tells_it(autojump_clock, stream, sampling, late, more):
    """Whichever leg is heard first: in a stream as an event inside a 200."""
    async with pairs(prefill=[None], decode=[None]) as w:
        w.network.link(CLIENT, late, Link(latency=0.3))
        body = generate(stream=stream, sampling=sampling, rid="R", **more)
        alone = await fetch(w.network, w.prefills[0].url, "/generate", {**body, "bootstrap_room": 1})
        response = await w.ask(body)
        assert (response.status, response.body) == (alone.status, alone.body)
        assert response.status == (200 if stream else 400)


# -- an answer to something else ---------------------------------------------------------------------------------------

SPOILT: dict[str, dict[str, Any]] = {
    "another request": {"id": "somebody else"},
    "another prompt": {"prompt_tokens": 9},
    "no logprobs": {"input_token_logprobs": ...},
    "null": {"input_token_logprobs": None},
    "too few": {"input_token_logprobs": [[None, 5, None]]},
}


@BOTH
@pytest.mark.parametrize("spoilt", SPOILT)
async def test_what_does_not_belong_to_the_request_is_not_joined(autojump_clock, stream, says, spoilt):
    """Another pair is asked."""
    says(lambda answer: with_meta(answer, **SPOILT[spoilt]))
    async with pairs(options=WorkerOptions(tick=0.05), policy="round_robin") as w:
        body = {**generate(8, stream=stream), **LOGPROBS}
        assert judged(await w.ask(body), body, ORACLE) == []
        await w.quiet()
        assert [one["cause"] for one in w.rows[0]["attempts"]] == ["garbage", None]
        assert [worker.failures for worker in w.app.fleet.workers] == [1, 0, 0, 0]


@BOTH
@pytest.mark.parametrize("cut", [False, True])
async def test_rows_that_no_prefill_worker_tells(autojump_clock, stream, says, cut):
    """SGLang 0.5.23 collects no `indexer_topk` there: the field is left out, and no finish must have it."""
    says(lambda answer: with_meta(answer, indexer_topk=...), most=9)
    plan = FaultPlan.in_order([(at_token(3), KILL_WORKER)]) if cut else None
    options = WorkerOptions(indexer_topk=True, tick=0.05)
    async with pairs(decode=[plan, None], options=options, policy="round_robin") as w:
        response = await w.ask(generate(8, stream=stream, return_indexer_topk=True, sampling={"stream_interval": 1}))
        await w.quiet()
        assert w.rows[0]["outcome"] == "done"
        assert b'"indexer_topk":' not in response.body
