"""How calls end that do not end well: refusals, aborts, timeouts, clients that leave or do not read."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.status import Code
from dyn_testkit.grpc.client import ask, open_client
from dyn_testkit.tokenizer import BYTE_LEVEL
from dyn_testkit.worker import MockWorker
from tests.grpc_engine.engine_kit import PROMPT, engine, generate, wanted

GUIDED = pb.GuidedDecoding

#: What a request asks for, and the status and message of its refusal; HTTP has the same message.
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"sampling": {"temperature": -1.0}}, "temperature must be a non-negative finite number, got -1.0."),
    ({"sampling": {"top_p": 2.0}}, "top_p must be in (0, 1], got 2.0."),
    ({"sampling": {"min_p": 2.0}}, "min_p must be in [0, 1], got 2.0."),
    ({"sampling": {"max_new_tokens": -1}}, "max_new_tokens must be at least 0, got -1."),
    ({"sampling": {"frequency_penalty": 9.0}}, "frequency_penalty must be in [-2, 2], got 9.0."),
    (
        {"sampling": {"max_new_tokens": 3, "min_new_tokens": 5}},
        "min_new_tokens must be in [0, max_new_tokens(3)], got 5.",
    ),
    ({"input_ids": []}, "input_ids cannot be empty."),
    ({"input_ids": [7] * 3000}, "The input (3000 tokens) is longer than the model's context length (2000 tokens)."),
    ({"routed_dp_rank": 5}, "routed_dp_rank=5 out of range [0, 1)"),
    ({"routed_dp_rank": -1}, "routed_dp_rank=-1 out of range [0, 1)"),
    (
        {"lora_path": "nobody"},
        "LoRA adapter 'nobody' was requested, but LoRA is not enabled. Please launch the server with "
        "--enable-lora flag and preload adapters using --lora-paths or /load_lora_adapter endpoint.",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asks", "message"), REFUSALS)
async def test_a_refusal_is_internal(
    asks: dict[str, Any], message: str, stream: bool, autojump_clock: MockClock
) -> None:
    async with engine(skip_tokenizer_init=False, tokenizer=BYTE_LEVEL) as worker:
        answer = await generate(worker, wanted(stream=stream, **asks))
        assert (answer.status, answer.message, answer.messages) == (Code.INTERNAL, message, [])
        assert (await generate(worker, wanted())).status == Code.OK


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"guided_decoding": GUIDED()}, "guided decoding constraint must be specified"),
        ({"guided_decoding": GUIDED(regex="")}, "guided decoding constraint must not be empty"),
        (
            {"guided_decoding": GUIDED(choice=pb.ChoiceConstraint())},
            "guided choice must contain only non-empty values",
        ),
        (
            {"guided_decoding": GUIDED(choice=pb.ChoiceConstraint(values=["a", ""]))},
            "guided choice must contain only non-empty values",
        ),
        (
            {"guided_decoding": GUIDED(ebnf="x"), "regex": "y"},
            "legacy json_schema/regex cannot be combined with guided_decoding",
        ),
        ({"regex": ""}, "legacy regex must not be empty"),
        ({"json_schema": ""}, "legacy json_schema must not be empty"),
    ],
)
async def test_what_cannot_be_submitted_is_an_invalid_argument(
    sampling: dict[str, Any], message: str, autojump_clock: MockClock
) -> None:
    async with engine() as worker:
        answer = await generate(worker, wanted(sampling=sampling))
        assert (answer.status, answer.message) == (Code.INVALID_ARGUMENT, message)
        assert (answer.trailers, worker.generates) == ({}, [])


async def test_a_refusal_of_the_scheduler_is_a_message_or_internal(autojump_clock: MockClock) -> None:
    why = "Input length (1999 tokens) exceeds the maximum allowed length (1994 tokens). "
    why += "Use a shorter input or enable --allow-auto-truncate."
    async with engine() as worker:
        streamed = await generate(worker, wanted(1, input_ids=[7] * 1999))
        whole = await generate(worker, wanted(1, input_ids=[7] * 1999, stream=False))
        [value] = (await worker.ask(body([7] * 1999, 1))).values()
    [message] = streamed.messages
    assert (streamed.status, message.finished, list(message.output_ids)) == (Code.OK, True, [0])
    finish = {"type": "abort", "message": why, "status_code": 400, "err_type": "BadRequestError"}
    assert json.loads(message.meta_info["finish_reason"]) == value["meta_info"]["finish_reason"] == finish
    assert (whole.status, whole.message, whole.messages) == (Code.INTERNAL, why, [])


def body(prompt: list[int], tokens: int) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": params, "stream": True}


async def test_a_full_queue(autojump_clock: MockClock) -> None:
    async with engine(tick=1.0) as worker:
        worker.scheduler.full = True
        streamed = await generate(worker, wanted())
        whole = await generate(worker, wanted(stream=False))
    [message] = streamed.messages
    finish = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
    assert (streamed.status, json.loads(message.meta_info["finish_reason"])) == (Code.OK, finish)
    assert (whole.status, whole.message) == (Code.INTERNAL, "503: The request queue is full.")


async def test_without_a_tokenizer_text_is_refused(autojump_clock: MockClock) -> None:
    async with engine() as worker:
        answer = await generate(worker, pb.TextGenerateRequest(text="x"))
    assert (answer.status, answer.message.partition(" with")[0]) == (Code.INTERNAL, "The engine initialized")


# Aborts ---------------------------------------------------------------------------------------------------------------


async def told(worker: MockWorker, **what: Any) -> Any:
    return await ask(worker.network, worker.grpc_url, methods.ABORT, pb.AbortRequest(**what))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", [{"rid": "mine"}, {"abort_all": True}])
async def test_an_abort_ends_a_call_without_a_last_message(
    what: dict[str, Any], stream: bool, autojump_clock: MockClock
) -> None:
    async with engine(tick=1.0) as worker, open_client(worker.network, worker.grpc_url) as client:
        call = await client.call(methods.GENERATE, wanted(50, rid="mine", stream=stream))
        await trio.sleep(3.5)
        assert worker.live == 1
        assert [one.success for one in (await told(worker, **what)).messages] == [True]
        await call.done()
        assert trio.current_time() < 4
        assert (call.status, call.message) == (Code.CANCELLED, "Request aborted: mine")
        assert len(call.messages) == (3 if stream else 0)
        assert not any(message.finished for message in call.messages)
        await wait_all_tasks_blocked()
        assert (worker.live, worker.scheduler.running) == (0, 0)
        assert worker.aborts == [{"rid": "", "abort_all": False} | what]


async def test_an_abort_over_http_leaves_a_last_message(autojump_clock: MockClock) -> None:
    async with engine(tick=1.0) as worker, open_client(worker.network, worker.grpc_url) as client:
        calls = [await client.call(methods.GENERATE, wanted(50, rid=f"r{at}", stream=bool(at))) for at in range(2)]
        await trio.sleep(3.5)
        await worker.ask({"abort_all": True}, "/abort_request")
        for call in calls:
            await call.done()
            assert call.status == Code.OK
            [*_, last] = call.messages
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            assert json.loads(last.meta_info["finish_reason"]) == finish
            assert (last.finished, len(last.output_ids)) == (True, 4)


async def test_an_abort_by_grpc_is_for_its_own_calls(autojump_clock: MockClock) -> None:
    """A rid of HTTP, a prefix or a stranger is no rid of a call; to abort all means all."""
    async with engine(tick=1.0) as worker, open_client(worker.network, worker.grpc_url) as client:
        ended: list[Any] = []

        async def over_http() -> None:
            answer = await worker.ask(body(PROMPT, 50) | {"rid": "http"})
            ended.append(answer.values()[-1]["meta_info"]["finish_reason"]["type"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(over_http)
            call = await client.call(methods.GENERATE, wanted(50, rid="prefix-long"))
            await trio.sleep(3.5)
            for rid in ("http", "prefix", "stranger"):
                assert (await told(worker, rid=rid)).status == Code.OK
            await trio.sleep(5)
            assert worker.live == 2
            await told(worker, abort_all=True)
        await call.done()
    assert (call.status, ended) == (Code.CANCELLED, ["abort"])


@pytest.mark.parametrize("rid", ["", "  "])
async def test_an_abort_of_nobody_is_refused(rid: str, autojump_clock: MockClock) -> None:
    async with engine() as worker:
        answer = await told(worker, rid=rid)
    words = "Abort requires a non-empty rid unless abort_all is true"
    assert (answer.status, answer.message) == (Code.INVALID_ARGUMENT, words)


async def test_a_rid_that_is_live(autojump_clock: MockClock) -> None:
    async with engine(tick=1.0) as worker, open_client(worker.network, worker.grpc_url) as client:
        first = await client.call(methods.GENERATE, wanted(10, rid="twice"))
        await first.reaches(2)
        again = await generate(worker, wanted(10, rid="twice"))
        http = await worker.ask(body(PROMPT, 2) | {"rid": "twice", "stream": False})
        await first.done()
        after = await generate(worker, wanted(1, rid="twice"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(worker.ask, body(PROMPT, 10) | {"rid": "other"}))
            await trio.sleep(2.5)
            beside = await generate(worker, wanted(1, rid="other"))
    why = "Failed to submit request: RuntimeError: Duplicate active gRPC request id: twice"
    assert (again.status, again.message, again.trailers) == (Code.INTERNAL, why, {})
    assert http.json() == {"error": {"message": "Duplicate request ID detected: twice"}}
    assert (first.status, len(first.messages), after.status) == (Code.OK, 10, Code.OK)
    assert (beside.status, beside.message) == (Code.INTERNAL, "Duplicate request ID detected: other")


# Clients that leave, or do not read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_client_that_leaves_frees_the_slot(how: str, stream: bool, autojump_clock: MockClock) -> None:
    async with engine(tick=1.0, max_running_requests=1) as worker:
        async with open_client(worker.network, worker.grpc_url) as client:
            call = await client.call(methods.GENERATE, wanted(100, stream=stream))
            await trio.sleep(3.5)
            if how == "cancel":
                await client.cancel(call)
            else:
                client.connection.close()
            await worker.reaches(disconnects=1)
            await wait_all_tasks_blocked()
            assert (worker.live, worker.scheduler.running, worker.disconnects) == (0, 0, 1)
        assert len((await generate(worker, wanted(3))).messages) == 3
        assert worker.disconnects == 1


async def test_a_call_of_which_nothing_is_heard_times_out(autojump_clock: MockClock) -> None:
    async with engine(tick=1.0, grpc_response_timeout=30.0) as worker:
        async with open_client(worker.network, worker.grpc_url) as client:
            call = await client.call(methods.GENERATE, wanted(100, sampling={"max_new_tokens": 60}))
            await call.reaches(40)  # longer than the timeout, but it says something all the time
            worker.scheduler.pause("in_place")
            at = trio.current_time()
            await call.done()
            assert trio.current_time() - at == pytest.approx(30, abs=1)
        assert (call.status, call.message) == (Code.DEADLINE_EXCEEDED, "Stream chunk timed out")
        assert (len(call.messages), worker.live, worker.disconnects) == (40, 0, 0)


async def test_a_client_that_does_not_read_is_dropped(autojump_clock: MockClock) -> None:
    async with engine(tick=1.0, grpc_response_timeout=30.0, grpc_backpressure_timeout=300.0) as worker:
        async with open_client(worker.network, worker.grpc_url, window=2000) as client:
            slow = await client.call(methods.GENERATE, wanted(100, rid="slow"))
            await trio.sleep(200)
            assert len(slow.data) == 2000
            other = await client.call(methods.GENERATE, wanted(2))
            await other.done()
            await slow.done()
            assert trio.current_time() == pytest.approx(305, abs=5)
        assert (other.status, slow.status) == (Code.OK, Code.RESOURCE_EXHAUSTED)
        assert slow.message == "gRPC response channel full for slow: client not consuming"
        assert worker.live == 0


async def test_a_client_that_reads_late_gets_all(autojump_clock: MockClock) -> None:
    async with engine(tick=1.0) as worker, open_client(worker.network, worker.grpc_url, window=2000) as client:
        slow = await client.call(methods.GENERATE, wanted(30))
        while not slow.ended:
            await trio.sleep(50)
            await client.grant(slow)
        quick = await generate(worker, wanted(30))
    assert [list(one.output_ids) for one in slow.messages] == [list(one.output_ids) for one in quick.messages]


async def test_a_request_that_kills(autojump_clock: MockClock) -> None:
    async with engine(death_delay=5.0) as worker:
        answer = await generate(worker, wanted(input_ids=[300]))
        assert (answer.ended, answer.status, worker.deaths) == ("eof", None, 1)
        await worker.restart()
        assert (await generate(worker, wanted())).status == Code.OK
