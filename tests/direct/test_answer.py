"""A message as HTTP spells it."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from dyn_relay.direct import answer
from dyn_relay.direct.answer import NotAnAnswer, aborted, render, spelled
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_testkit.worker import fields as stock

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = [name for name in answer._ORDER if name != "e2e_latency"]


def message(meta: dict[str, Any], **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(meta_info={name: json.dumps(value) for name, value in meta.items()}, **fields)


@given(
    st.dictionaries(st.sampled_from(NAMES), VALUES),
    st.lists(st.integers(0, 2**31 - 1)),
    st.none() | st.text(),
    st.randoms(),
)
def test_the_order_and_the_spelling_are_those_of_http(meta, ids, text, chance):
    meta = {"prompt_tokens": 3, **meta}
    mixed = list(meta.items())
    chance.shuffle(mixed)
    value = {} if text is None else {"text": text}
    ordered = {name: meta[name] for name in stock.META_INFO if name in meta}
    made = message(dict(mixed), output_ids=ids, **value)
    assert render(made, None, 0.0) == msgspec.json.encode({**value, "output_ids": ids, "meta_info": ordered})


def test_what_stock_does_not_know_comes_last():
    made = message({"z": 1, "dp_rank": None, "a": 2, "prompt_tokens": 3, "id": "r"})
    assert list(json.loads(render(made, None, 0.0))["meta_info"]) == ["id", "prompt_tokens", "dp_rank", "a", "z"]


def test_an_abort_that_never_ran_has_the_order_of_its_own():
    names = ["id", "finish_reason", "weight_version", "e2e_latency", "weight_versions", "completion_tokens"]
    mixed = dict.fromkeys(random.Random(1).sample(names, len(names)), 1)
    assert list(json.loads(render(message(mixed), None, 0.5))["meta_info"]) == names


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("NaN", b"null"),
        ("[1, -Infinity]", b"[1,null]"),
        ('"\\u00fc \\ud83d\\ude00"', '"ü 😀"'.encode()),
        ("1e-05", b"0.00001"),
        ("9223372036854775807", b"9223372036854775807"),
        ('"NaN"', b'"NaN"'),
    ],
)
def test_values_are_spelled_as_http_does(text, wanted):
    assert json.loads(bytes(spelled(text))) == json.loads(wanted)
    assert b" " not in bytes(spelled(text)).replace("ü 😀".encode(), b"")


@pytest.mark.parametrize("text", ["", "{", "nul", "1 2", "\u0661"])
def test_what_is_no_json_is_no_answer(text):
    with pytest.raises(NotAnAnswer):
        spelled(text)


def test_latency_is_ours_and_prompt_ids_come_behind():
    value = json.loads(render(message({"e2e_latency": -1e9, "prompt_tokens": 1}), Raw(b"[1,2]"), 0.25))
    assert value["meta_info"]["e2e_latency"] == 0.25
    assert list(value) == ["output_ids", "meta_info", "prompt_token_ids"]


@pytest.mark.parametrize("incremental", [True, False])
def test_an_abort_repeats_nothing_of_deltas(incremental):
    rows = [[-0.5, 7, None]]
    last = message(
        {"finish_reason": None, "prompt_tokens": 2, "completion_tokens": 1, "output_token_logprobs": rows},
        output_ids=[7],
        text="x",
    )
    value = json.loads(aborted(last, "r", None, incremental=incremental, logprobs=True))
    assert value["meta_info"]["finish_reason"]["type"] == "abort"
    assert value["meta_info"]["completion_tokens"] == 1
    told = (value["text"], value["output_ids"], value["meta_info"]["output_token_logprobs"])
    assert told == (("", [], []) if incremental else ("x", [7], rows))


def test_the_order_is_that_of_the_testkits_own_list():
    assert list(answer._ORDER) == [name for name in stock.META_INFO if name in answer._ORDER]
    rest = [name for name in stock.META_INFO if name not in answer._ORDER]
    assert all("_top_logprobs_" in name for name in rest), "flat tops cannot be asked for over gRPC"
