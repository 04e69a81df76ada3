"""The same request over HTTP and over gRPC of one worker: the same tokens, texts, logprobs and ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.status import Code
from dyn_testkit import strategies
from dyn_testkit.tokenizer import BYTE_LEVEL
from dyn_testkit.worker import Dialect, MockWorker
from tests.grpc_engine.engine_kit import MODEL, PROMPT, engine, generate, wanted

#: What two generations of the same differ in.
MEASURED = ("id", "e2e_latency", "response_sent_to_client_ts")
TEXT = {"skip_tokenizer_init": False, "tokenizer": BYTE_LEVEL}
#: Of a request: fields that both wires name alike.
FIELDS = ("stream", "return_logprob", "top_logprobs_num", "logprob_start_len", "rid", "routed_dp_rank", "lora_path")
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "min_new_tokens",
    "ignore_eos",
    "frequency_penalty",
    "repetition_penalty",
    "presence_penalty",
    "min_p",
    "n",
)


def asked(body: Mapping[str, Any]) -> Any:
    """The request that means the same as a body of `/generate`."""
    given = dict(body.get("sampling_params", {}))
    params = {name: given[name] for name in SAMPLING if name in given}
    params |= {name: given[name] for name in ("stop", "stop_token_ids") if name in given}
    if "sampling_seed" in given:
        params["seed"] = given["sampling_seed"]
    for name in ("regex", "json_schema", "ebnf", "structural_tag"):
        if name in given:
            params["guided_decoding"] = pb.GuidedDecoding(**{name: given[name]})
    more: dict[str, Any] = {name: body[name] for name in FIELDS if name in body}
    if "bootstrap_room" in body:
        more["disaggregated_params"] = pb.DisaggregatedParams(
            **{name: body[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")}
        )
    if "sampling_params" in body:
        more["sampling_params"] = pb.SamplingParams(**params)
    if "text" in body:
        return pb.TextGenerateRequest(text=body["text"], **more)
    return pb.GenerateRequest(input_ids=body["input_ids"], return_text=True, **more)


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """A value of HTTP, but for what is measured and for its place among samples."""
    meta = {name: item for name, item in value["meta_info"].items() if name not in MEASURED}
    return {name: item for name, item in value.items() if name != "index"} | {"meta_info": meta}


def told(message: Any, *, text: bool = True) -> dict[str, Any]:
    """The same of a message."""
    value: dict[str, Any] = {}
    if text and (isinstance(message, pb.TextGenerateResponse) or message.HasField("text")):
        value["text"] = message.text
    if isinstance(message, pb.GenerateResponse):
        value["output_ids"] = list(message.output_ids)
    return value | {
        "meta_info": {name: json.loads(item) for name, item in message.meta_info.items() if name not in MEASURED}
    }


async def both(worker: MockWorker, body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The values of an answer over HTTP, and over gRPC; the cache is empty before each."""
    worker.scheduler.flush()
    response = await worker.ask(dict(body))
    values = response.values() if body.get("stream") else response.json()
    worker.scheduler.flush()
    answer = await generate(worker, asked(body))
    assert answer.status == Code.OK, answer.message
    assert [message.finished for message in answer.messages] == [False] * (len(answer.messages) - 1) + [True]
    http = [plain(value) for value in (values if isinstance(values, list) else [values])]
    if "text" in body:
        for value in http:
            del value["output_ids"]
    return http, [told(message) for message in answer.messages]


def exact(body: dict[str, Any]) -> dict[str, Any]:
    """What gRPC can carry: floats of 32 bits, and no more than its fields."""
    params = {name: value for name, value in body["sampling_params"].items() if name != "logit_bias"}
    params |= {name: 0.5 for name in ("temperature", "top_p") if params.get(name) not in (None, 0, 1)}
    known = {name: value for name, value in body.items() if name in (*FIELDS, "input_ids")}
    return known | {"sampling_params": params}


@settings(max_examples=120)
@given(
    strategies.requests(MODEL, 10).map(exact),
    st.sampled_from(["cumulative", "incremental", "mixed"]),
    st.booleans(),
    st.integers(1, 3),
)
def test_both_wires_give_the_same(body: dict[str, Any], dialect: Dialect, text: bool, interval: int) -> None:
    async def main() -> None:
        more = TEXT if text else {}
        async with engine(dialect=dialect, stream_interval=interval, **more) as worker:
            http, grpc = await both(worker, body)
            assert grpc == http
            assert worker.generates[0].json()["sampling_params"] == body["sampling_params"]

    trio.run(main, clock=MockClock(autojump_threshold=0))


SHAPES: list[dict[str, Any]] = [
    {"sampling_params": {"max_new_tokens": 12, "stop": ["e", "a"], "temperature": 0}},
    {"sampling_params": {"max_new_tokens": 9, "n": 1, "temperature": 1, "sampling_seed": 2**62 + 1}},
    {"sampling_params": {"max_new_tokens": 9, "temperature": 0, "regex": "[ab]{3}"}},
    {"sampling_params": {"max_new_tokens": 9, "temperature": 0, "json_schema": '{"type": "object"}'}},
    {"sampling_params": {"max_new_tokens": 9, "temperature": 0, "ebnf": 'root ::= "a"'}},
    {"sampling_params": {"max_new_tokens": 9, "temperature": 0, "structural_tag": "{}"}},
    {"sampling_params": {"max_new_tokens": 9, "temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.25}},
    {"sampling_params": {"max_new_tokens": 9, "temperature": 0, "repetition_penalty": 1.25, "min_p": 0.125}},
    {"sampling_params": {"max_new_tokens": 9, "temperature": 0, "min_new_tokens": 4}},
    {"sampling_params": {"max_new_tokens": 0}},
    {"sampling_params": {}},
    {},
    {"text": "Hello café 👩‍🚀", "sampling_params": {"max_new_tokens": 9, "temperature": 0}},
    {"text": "Hello", "sampling_params": {"max_new_tokens": 9}, "return_logprob": True, "logprob_start_len": 0},
    {"routed_dp_rank": 1, "sampling_params": {"max_new_tokens": 3}},
    {"lora_path": "fine", "sampling_params": {"max_new_tokens": 3}},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
async def test_every_field_arrives(shape: dict[str, Any], stream: bool, autojump_clock: MockClock) -> None:
    body = shape | {"stream": stream}
    if "text" not in body:
        body["input_ids"] = PROMPT
    async with engine(dp_size=2, lora_adapters=("fine",), **TEXT) as worker:
        body = {"routed_dp_rank": 0} | body
        http, grpc = await both(worker, body)
    assert grpc == http


async def test_choices_are_one_regular_expression(autojump_clock: MockClock) -> None:
    async with engine(**TEXT) as worker:
        choices = pb.GuidedDecoding(choice=pb.ChoiceConstraint(values=["red", "a.b(c", "[x]|y\\"]))
        await generate(worker, wanted(sampling={"guided_decoding": choices}))
        regex = worker.generates[0].json()["sampling_params"]["regex"]
    assert regex == r"(?:red|a\.b\(c|\[x\]\|y\\)"


async def test_samples_have_no_index_and_end_with_the_last(autojump_clock: MockClock) -> None:
    async with engine() as worker:
        streamed = await generate(worker, wanted(4, sampling={"n": 3}))
        whole = await generate(worker, wanted(4, sampling={"n": 3}, stream=False))
        [value, *_] = (await worker.ask({"input_ids": PROMPT, "sampling_params": params(4, n=3)})).json()
    assert [message.finished for message in streamed.messages] == [False] * 11 + [True]
    assert [message.finished for message in whole.messages] == [False, False, True]
    finished = [message for message in streamed.messages if message.meta_info["finish_reason"] != "null"]
    assert {tuple(message.output_ids) for message in finished} == {tuple(value["output_ids"])}
    assert len({message.meta_info["id"] for message in finished}) == 3
    assert "index" not in streamed.messages[0].meta_info


def params(tokens: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | more


async def test_text_comes_if_it_is_asked_for(autojump_clock: MockClock) -> None:
    async with engine(**TEXT) as worker:
        with_text = await generate(worker, wanted(5, stream=False, return_text=True))
        without = await generate(worker, wanted(5, stream=False))
    async with engine() as worker:
        nothing = await generate(worker, wanted(5, stream=False, return_text=True))
    assert with_text.messages[0].text
    assert with_text.messages[0].output_ids == without.messages[0].output_ids
    assert [one.messages[0].HasField("text") for one in (with_text, without, nothing)] == [True, False, False]


async def test_meta_info_is_json_text_in_any_order(autojump_clock: MockClock) -> None:
    async with engine() as worker:
        answer = await generate(worker, wanted(20, return_logprob=True, rid="naïve"))
        again = await generate(worker, wanted(20, return_logprob=True, rid="naïve"))
    [*_, last] = answer.messages
    assert last.meta_info["id"] == '"na\\u00efve"'
    assert last.meta_info["finish_reason"] == '{"type": "length", "length": 20}'
    assert last.meta_info["dp_rank"] == "null"
    assert last.meta_info["weight_versions"] == '[{"version": "default", "start": 0, "end": 20}]'
    assert json.loads(last.meta_info["e2e_latency"]) < -1e9  # of two clocks: nonsense, as with stock
    orders = {tuple(order(data)) for _, data in answer.frames}
    assert len(orders) > 10
    assert [order(data) for _, data in again.frames] != []


def order(data: bytes) -> list[bytes]:
    """The keys of meta_info as they are on the wire."""
    names = (
        b"finish_reason",
        b"prompt_tokens",
        b"weight_version",
        b"num_retractions",
        b"completion_tokens",
        b"dp_rank",
    )
    return sorted(names, key=lambda name: data.index(b"\x0a" + bytes([len(name)]) + name))


async def test_a_call_without_a_rid_gets_one_of_its_own(autojump_clock: MockClock) -> None:
    async with engine() as worker:
        names = [json.loads((await generate(worker, wanted(1))).messages[0].meta_info["id"]) for _ in range(3)]
    assert len(set(names)) == 3
    assert all(len(name) == 36 and name.count("-") == 4 for name in names)


async def test_what_the_engine_read_is_on_record(autojump_clock: MockClock) -> None:
    async with engine(dp_size=2) as worker:
        room = 2**63 - 1
        pair = pb.DisaggregatedParams(bootstrap_host="h", bootstrap_port=8998, bootstrap_room=room)
        request = wanted(
            3, rid="r", routed_dp_rank=1, disaggregated_params=pair, priority=4, session_id="s", routing_key="k"
        )
        await generate(worker, request, [("x-anything", "there")])
        [recorded] = worker.generates
    assert recorded.json() == {
        "rid": "r",
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True},
        "stream": True,
        "return_logprob": False,
        "top_logprobs_num": 0,
        "logprob_start_len": -1,
        "routed_dp_rank": 1,
        "priority": 4,
        "session_id": "s",
        "routing_key": "k",
        "bootstrap_host": "h",
        "bootstrap_port": 8998,
        "bootstrap_room": room,
    }
    assert recorded.request.header(b"x-anything") == b"there"
