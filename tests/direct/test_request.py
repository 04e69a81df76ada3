"""A body of `/generate` as a message: what is carried, under which name, what is dropped, what is refused by name."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st

from dyn_relay.direct import request as table
from dyn_relay.direct.numbers import CannotCarry, float32
from dyn_relay.direct.request import translate
from dyn_relay.grpc.messages import MAX_MESSAGE
from dyn_testkit.engine import Model
from dyn_testkit.laws.cases import _carriable
from dyn_testkit.strategies import requests
from dyn_testkit.worker import fields as stock
from dyn_testkit.worker.grpc.messages import body_of

#: (HTTP's field and a value, the message's field and what is there), written by hand from the contract.
CARRIED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"input_ids": [1, 2**31 - 1]}, {"input_ids": [1, 2**31 - 1]}),
    ({"rid": "a"}, {"rid": "a"}),
    ({"stream": True}, {"stream": True}),
    ({"return_logprob": True}, {"return_logprob": True}),
    ({"top_logprobs_num": 3}, {"top_logprobs_num": 3}),
    ({"logprob_start_len": 0}, {"logprob_start_len": 0}),
    ({"lora_path": "a"}, {"lora_path": "a"}),
    ({"routing_key": "k"}, {"routing_key": "k"}),
    ({"routed_dp_rank": 1}, {"routed_dp_rank": 1}),
    ({"data_parallel_rank": 1}, {"routed_dp_rank": 1}),
    ({"data_parallel_rank": 1, "routed_dp_rank": 2}, {"routed_dp_rank": 2}),
    ({"session_id": "s"}, {"session_id": "s"}),
    ({"priority": -5}, {"priority": -5}),
    ({"require_reasoning": True}, {"require_reasoning": True}),
    ({"max_thinking_tokens": 2**32 - 1}, {"max_thinking_tokens": 2**32 - 1}),
    ({"input_ids": [1], "image_data": "u"}, {"input_ids": [1], "image_data": ["u"]}),
    ({"input_ids": [1], "video_data": ["u", "v"]}, {"input_ids": [1], "video_data": ["u", "v"]}),
    ({"input_ids": [1], "audio_data": ["u"]}, {"input_ids": [1], "audio_data": ["u"]}),
    (
        {"bootstrap_host": "h", "bootstrap_port": 8998, "bootstrap_room": 2**63 - 1},
        {
            "disaggregated_params": {
                "bootstrap_host": "h",
                "bootstrap_port": 8998,
                "bootstrap_room": "9223372036854775807",
            }
        },
    ),
    (
        {"kv_hints": {"message_id": "m", "actions": [{"action_type": "t", "payload": {"a": [1, 0.5, None, "b"]}}]}},
        {"kv_hints": {"message_id": "m", "actions": [{"action_type": "t", "payload": {"a": [1.0, 0.5, None, "b"]}}]}},
    ),
]
SAMPLED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"top_p": 0.25}, {"top_p": 0.25}),
    ({"top_k": -1}, {"top_k": -1}),
    ({"min_p": 0}, {"min_p": 0.0}),
    ({"frequency_penalty": -2}, {"frequency_penalty": -2.0}),
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ({"repetition_penalty": 2}, {"repetition_penalty": 2.0}),
    ({"max_new_tokens": 7}, {"max_new_tokens": 7}),
    ({"min_new_tokens": 3}, {"min_new_tokens": 3}),
    ({"stop": "a"}, {"stop": ["a"]}),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"stop_token_ids": [4]}, {"stop_token_ids": [4]}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"n": 2}, {"n": 2}),
    ({"sampling_seed": -(2**63)}, {"seed": str(-(2**63))}),
    ({"json_schema": "{}"}, {"guided_decoding": {"json_schema": "{}"}}),
    ({"regex": "a+"}, {"guided_decoding": {"regex": "a+"}}),
    ({"ebnf": "root ::= 'a'"}, {"guided_decoding": {"ebnf": "root ::= 'a'"}}),
    ({"structural_tag": "{}"}, {"guided_decoding": {"structural_tag": "{}"}}),
    ({"choice": ["a", "b"]}, {"guided_decoding": {"choice": {"values": ["a", "b"]}}}),
    ({"json_schema": "", "regex": "a"}, {"guided_decoding": {"regex": "a"}}),
    # What a null says is said in full.
    ({"temperature": None}, {"temperature": 1.0}),
    ({"top_k": None}, {"top_k": -1}),
    ({"ignore_eos": None}, {"ignore_eos": False}),
    ({"stop": None, "sampling_seed": None, "regex": None}, {}),
]
#: (a body, the field that the refusal names)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": [[1]]}, "input_ids"),
    ({"input_ids": [2**31]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": "1"}, "input_ids"),
    ({"text": ["a"]}, "text"),
    ({"text": "a", "image_data": "u"}, "text"),
    ({"rid": ["a"]}, "rid"),
    ({"rid": 1}, "rid"),
    ({"stream": 1}, "stream"),
    ({"return_logprob": [True]}, "return_logprob"),
    ({"lora_path": ["a"]}, "lora_path"),
    ({"priority": -(2**63)}, "priority"),
    ({"max_thinking_tokens": -1}, "max_thinking_tokens"),
    ({"token_ids_logprob": [1]}, "token_ids_logprob"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"return_hidden_states": 0}, "return_hidden_states"),
    ({"return_routed_experts": True}, "return_routed_experts"),
    ({"return_text_in_logprobs": True}, "return_text_in_logprobs"),
    ({"extra_key": "k"}, "extra_key"),
    ({"cache_salt": "k"}, "cache_salt"),
    ({"disagg_prefill_dp_rank": 0}, "disagg_prefill_dp_rank"),
    ({"custom_logit_processor": "code"}, "custom_logit_processor"),
    ({"session_params": {"id": "s"}}, "session_params"),
    ({"input_embeds": [[0.5]]}, "input_embeds"),
    ({"bootstrap_host": ["h"], "bootstrap_port": [1], "bootstrap_room": [1]}, "bootstrap_host"),
    ({"bootstrap_room": 1}, "bootstrap_host"),
    ({"bootstrap_host": "h", "bootstrap_port": None, "bootstrap_room": 1}, "bootstrap_port"),
    ({"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2**63}, "bootstrap_room"),
    ({"a_future_field": 1}, "a_future_field"),
    ({"kv_hints": {"actions": [{"payload": {"a": 2**53 + 1}}]}}, "kv_hints.payload"),
    ({"kv_hints": {"actions": [{"payload": {"a": 1.0}}]}}, "kv_hints.payload"),
    ({"sampling_params": [{}]}, "sampling_params"),
    ({"sampling_params": {"stop_regex": "a"}}, "stop_regex"),
    ({"sampling_params": {"logit_bias": {"3": 1.5}}}, "logit_bias"),
    ({"sampling_params": {"skip_special_tokens": False}}, "skip_special_tokens"),
    ({"sampling_params": {"skip_special_tokens": 1}}, "skip_special_tokens"),
    ({"sampling_params": {"no_stop_trim": True}}, "no_stop_trim"),
    ({"sampling_params": {"custom_params": {}}}, "custom_params"),
    ({"sampling_params": {"watermark": {}}}, "watermark"),
    ({"sampling_params": {"a_future_field": 1}}, "a_future_field"),
    ({"sampling_params": {"max_new_tokens": None}}, "max_new_tokens"),
    ({"sampling_params": {"max_new_tokens": 2**31}}, "max_new_tokens"),
    ({"sampling_params": {"max_new_tokens": 1.0}}, "max_new_tokens"),
    ({"sampling_params": {"temperature": True}}, "temperature"),
    ({"sampling_params": {"temperature": "1"}}, "temperature"),
    ({"sampling_params": {"temperature": 1e39}}, "temperature"),
    ({"sampling_params": {"temperature": 1e-6}}, "temperature"),
    ({"sampling_params": {"top_p": 1.00000001}}, "top_p"),
    ({"sampling_params": {"top_p": 1e-50}}, "top_p"),
    ({"sampling_params": {"sampling_seed": 2**63}}, "sampling_seed"),
    ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf"),
    ({"stream": True, "sampling_params": {"n": 2}}, "n"),
    ({"rid": "\ud800"}, "body"),
]


def said(body: dict[str, Any]) -> dict[str, Any]:
    """What the message says, beyond what every one says."""
    found = MessageToDict(translate(body).message, preserving_proto_field_name=True)
    assert found.pop("return_text") is True
    return found if "stream" in body else {name: value for name, value in found.items() if name != "stream"}


@pytest.mark.parametrize(("body", "message"), CARRIED, ids=str)
def test_a_field_is_carried(body, message):
    assert said(body) == message


@pytest.mark.parametrize(("sampling", "message"), SAMPLED, ids=str)
def test_a_sampling_parameter_is_carried(sampling, message):
    assert said({"sampling_params": sampling}) == {"sampling_params": message}


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=lambda one: str(one)[:60])
def test_what_cannot_be_carried_is_refused_by_name(body, field):
    with pytest.raises(CannotCarry) as caught:
        translate(body)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_every_field_of_stock_has_a_row_and_no_row_is_of_another():
    special = {"input_ids", "text", "return_prompt_token_ids", "kv_hints", "data_parallel_rank", "sampling_params"}
    rows = [*table.SCALARS, *table.MEDIA, *table.NEUTRAL, *special]
    rows += ["bootstrap_host", "bootstrap_port", "bootstrap_room"]
    assert sorted(rows) == sorted(stock.REQUEST)
    assert sorted([*table.SAMPLING, *table.GUIDED, *table.NEUTRAL_SAMPLING, *table.HINTS]) == sorted(stock.SAMPLING)


@pytest.mark.parametrize("name", [*table.NEUTRAL, "input_ids", "text", "kv_hints", "rid", "bootstrap_port"])
def test_null_asks_for_nothing(name):
    assert said({name: None}) == {}


def test_what_asks_for_nothing_is_dropped():
    body = {name: values[0] for name, values in table.NEUTRAL.items() if values}
    sampling = {name: values[0] for name, values in table.NEUTRAL_SAMPLING.items() if values}
    assert len(body) > 15
    assert said({**body, "sampling_params": {**sampling, "stream_interval": 5}}) == {"sampling_params": {}}
    assert translate({"sampling_params": {"stream_interval": 5}}).interval == 5


def test_ids_win_over_a_text():
    asked = translate({"text": "a", "input_ids": [1]})
    assert (asked.text, list(asked.message.input_ids)) == (None, [1])
    assert translate({"text": "a"}).text == "a"


def test_traces_are_told():
    headers = [(b"traceparent", b"00-a"), (b"x-other", b"b"), (b"tracestate", b"c")]
    assert dict(translate({}, headers).message.trace_headers) == {"traceparent": "00-a", "tracestate": "c"}


@given(requests(Model()).map(json.dumps).map(str.encode).map(_carriable).map(json.loads))
def test_what_the_engine_is_asked_is_what_the_client_asks(body):
    """There and back, by the engine's own translation."""
    back = body_of(translate(body).message, "r")
    always = {"stream": False, "return_logprob": False, "top_logprobs_num": 0, "logprob_start_len": -1, "rid": "r"}
    wanted = {**always, **body}
    del wanted["rid"], back["rid"]
    wanted.pop("return_prompt_token_ids", None)
    if wanted["sampling_params"].get("stop_token_ids") == []:
        wanted["sampling_params"] = {k: v for k, v in wanted["sampling_params"].items() if k != "stop_token_ids"}
    assert back == wanted


@given(st.floats(-1e30, 1e30))
def test_a_number_is_rounded_as_a_tensor_rounds_it_or_refused(number):
    rounded = struct.unpack("<f", struct.pack("<f", number))[0]
    try:
        assert float32("x", number) == rounded
    except CannotCarry:
        assert rounded != number
        assert rounded.is_integer() or abs(number) < 2e-6


SLIME = {"skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True}


def test_what_is_about_text_asks_nothing_of_an_engine_without_a_tokenizer() -> None:
    """What slime and miles send."""
    body = {"input_ids": [1], "sampling_params": {**SLIME, "max_new_tokens": 4}}
    assert (
        translate(body, tokenizer=False).message
        == translate({"input_ids": [1], "sampling_params": {"max_new_tokens": 4}}).message
    )
    for name in SLIME:
        with pytest.raises(CannotCarry) as refused:
            translate({"input_ids": [1], "sampling_params": {name: SLIME[name]}})
        assert refused.value.field == name
        with pytest.raises(CannotCarry) as refused:
            translate({"input_ids": [1], "sampling_params": {name: 1}}, tokenizer=False)
        assert refused.value.field == name


def test_a_request_that_is_too_large_is_no_busy_engine() -> None:
    with pytest.raises(CannotCarry) as refused:
        translate({"input_ids": [1], "image_data": "x" * MAX_MESSAGE})
    assert refused.value.field == "body"
