"""One client, the same engines over HTTP, over gRPC, and behind sidecars that use either: it gets the same bytes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import trio

from dyn_testkit.client import Response
from dyn_testkit.faults import FaultPlan, nth, parse_fault
from dyn_testkit.worker import WorkerOptions
from tests.direct.kit import SIDED, TRANSPORTS, direct

TEXTS = WorkerOptions(skip_tokenizer_init=False)
IDS = {"input_ids": [1, 2, 3], "rid": "r"}
TEXT = {"text": "hello you", "rid": "r"}
SAMPLING = {"max_new_tokens": 6, "temperature": 0.0}
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}

#: name -> (options of the engines, the client's body)
SHAPES: dict[str, tuple[WorkerOptions, dict[str, Any]]] = {
    "ids": (WorkerOptions(), {**IDS, "sampling_params": SAMPLING}),
    "no rid": (WorkerOptions(), {"input_ids": [1, 2, 3], "sampling_params": SAMPLING}),
    "no sampling": (WorkerOptions(), IDS),
    "ids with text": (TEXTS, {**IDS, "sampling_params": SAMPLING}),
    "text": (TEXTS, {**TEXT, "sampling_params": SAMPLING}),
    "logprobs": (WorkerOptions(), {**IDS, **LOGPROBS, "sampling_params": SAMPLING}),
    "logprobs of text": (TEXTS, {**TEXT, **LOGPROBS, "sampling_params": SAMPLING}),
    "prompt ids": (TEXTS, {**TEXT, "return_prompt_token_ids": True, "sampling_params": SAMPLING}),
    "deltas": (WorkerOptions(dialect="incremental"), {**IDS, **LOGPROBS, "sampling_params": SAMPLING}),
    "deltas, each told": (
        WorkerOptions(dialect="incremental"),
        {**IDS, **LOGPROBS, "sampling_params": {**SAMPLING, "stream_interval": 1}},
    ),
    "deltas of text": (
        WorkerOptions(dialect="incremental", skip_tokenizer_init=False),
        {**TEXT, **LOGPROBS, "sampling_params": SAMPLING},
    ),
    "seed": (WorkerOptions(), {**IDS, "sampling_params": {**SAMPLING, "temperature": 1.0, "sampling_seed": 2**63 - 1}}),
    "stop string": (TEXTS, {**TEXT, "sampling_params": {**SAMPLING, "max_new_tokens": 60, "stop": ["5", "7>"]}}),
    "stop tokens": (
        WorkerOptions(),
        {**IDS, "sampling_params": {"max_new_tokens": 500, "stop_token_ids": [9, 11, 33]}},
    ),
    "no token": (WorkerOptions(), {**IDS, "sampling_params": {**SAMPLING, "max_new_tokens": 0}}),
    "nulls": (
        WorkerOptions(),
        {**IDS, "lora_path": None, "sampling_params": {**SAMPLING, "top_p": None, "stop": None}},
    ),
    "neutral": (WorkerOptions(), {**IDS, "log_metrics": True, "sampling_params": {**SAMPLING, "logit_bias": {}}}),
    "grammar": (WorkerOptions(), {**IDS, "sampling_params": {**SAMPLING, "json_schema": '{"type": "object"}'}}),
    "adapter": (WorkerOptions(lora_adapters=("a",)), {**IDS, "lora_path": "a", "sampling_params": SAMPLING}),
    "rank": (WorkerOptions(dp_size=2), {**IDS, "routed_dp_rank": 1, "sampling_params": SAMPLING}),
    "old rank": (WorkerOptions(dp_size=2), {**IDS, "data_parallel_rank": 1, "sampling_params": SAMPLING}),
    # Refused by the engine.
    "bad temperature": (WorkerOptions(), {**IDS, "sampling_params": {"temperature": -1.5}}),
    "bad budget": (WorkerOptions(), {**IDS, "sampling_params": {"max_new_tokens": 4, "min_new_tokens": 5}}),
    "text without tokenizer": (WorkerOptions(), {**TEXT, "sampling_params": SAMPLING}),
    "too long": (WorkerOptions(), {**IDS, "sampling_params": {"max_new_tokens": 1_000_000}}),
    "no such adapter": (WorkerOptions(), {**IDS, "lora_path": "b", "sampling_params": SAMPLING}),
    "no such rank": (WorkerOptions(dp_size=2), {**IDS, "routed_dp_rank": 7, "sampling_params": SAMPLING}),
}


async def answered(transport: str, options: WorkerOptions, *bodies: dict[str, Any], **more: Any) -> list[Response]:
    async with direct(transport, options=options, **more) as w:
        return [await w.ask(body) for body in bodies]


def shown(response: Response) -> tuple[int, str | None, str | None, bytes]:
    """All that a client sees, but for the date."""
    kind, migratable = response.header("content-type"), response.header("x-dyn-relay-migratable")
    return response.status, kind, migratable, _LATENCY.sub(_rounded, response.body)


def timeless(response: Response) -> tuple[int, str | None, str | None, bytes]:
    """`shown`, but for what is measured: how soon a silence is found out is the probes' chance."""
    *head, body = shown(response)
    return *head, _MEASURED.sub(b"0", body)


_MEASURED = re.compile(rb'(?<="e2e_latency":)[0-9.]+|(?<="response_sent_to_client_ts":)[0-9.]+')
_LATENCY = re.compile(rb'(?<="e2e_latency":)[0-9.]+')


def _rounded(match: re.Match[bytes]) -> bytes:
    """Two worlds have two clocks, whose differences are rounded otherwise."""
    return b"%.6f" % float(match[0])


@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_an_answer(autojump_clock, shape, stream):
    options, body = SHAPES[shape]
    bodies = [{**body, "stream": stream, "rid": "r1"}, {**body, "stream": stream}]
    http, *others = [await answered(transport, options, *bodies) for transport in (*TRANSPORTS, *SIDED)]
    for other in others:
        assert [shown(one) for one in other] == [shown(one) for one in http]
    assert all(one.complete for one in http)


@pytest.mark.parametrize("what", ["kill", "stall"])
@pytest.mark.parametrize("where", ["1", "4", "finish"])
@pytest.mark.parametrize("shape", ["logprobs", "text", "deltas", "prompt ids"])
async def test_an_answer_that_was_cut(autojump_clock, shape, where, what):
    """The same place, the same fault: both are continued, and give the same bytes."""
    options, body = SHAPES[shape]

    def plan() -> FaultPlan:
        return FaultPlan.of(replace(parse_fault(f"{what}@{where}"), on=nth(0)))

    for stream in (True, False):
        http, *others = [
            (await answered(t, options, {**body, "stream": stream}, plans=[plan(), None]))[0]
            for t in (*TRANSPORTS, *SIDED)
        ]
        for other in others:
            assert timeless(other) == timeless(http)
            assert other.complete


@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
async def test_an_abort(autojump_clock, dialect, stream):
    """Over gRPC no event says so, but for the tokens it is told as over HTTP."""
    told, options = [], WorkerOptions(tick=1.0, dialect=dialect)
    for transport in TRANSPORTS:
        async with direct(transport, options=options) as w:
            answers: list[Response] = []

            async def client(w=w, answers=answers):
                answers.append(await w.ask({**IDS, "stream": stream, "sampling_params": {"max_new_tokens": 50}}))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(client)
                await trio.sleep(5.5)
                assert (await w.ask({"rid": "r"}, "/abort_request")).status == 200
            [answer] = answers
            assert answer.complete
            last = json.loads(answer.body) if not stream else answer.values()[-1]
            told.append((answer.status, last["meta_info"]["finish_reason"], last["meta_info"]["completion_tokens"]))
            await w.quiet()
            assert not any(worker.live for worker in w.workers)
    assert (
        told[0][:2]
        == told[1][:2]
        == (200, {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})
    )
    assert abs(told[0][2] - told[1][2]) <= 1, "an engine may make one more token before it ends"


async def test_samples(autojump_clock):
    """Several answers in one message each, in their order."""
    body = {**IDS, "sampling_params": {**SAMPLING, "temperature": 1.0, "n": 3}}
    http, grpc = [(await answered(transport, WorkerOptions(), body))[0] for transport in TRANSPORTS]
    ids = [[one["output_ids"] for one in json.loads(response.body)] for response in (http, grpc)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 3


async def test_samples_of_a_stream_are_refused(autojump_clock):
    body = {**IDS, "stream": True, "sampling_params": {**SAMPLING, "n": 2}}
    [answer] = await answered("grpc", WorkerOptions(), body)
    assert answer.status == 400
    assert json.loads(answer.body)["error"].startswith("n: ")
