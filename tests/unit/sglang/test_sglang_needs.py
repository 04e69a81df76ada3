"""What a request needs of its worker before there are tokens, and what its later attempts ask for, value by value."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from sglang_kit import SSE_HEAD, Engine, opened, request, sse

from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.traits import UNKNOWN, Traits

BARE = Traits(model="m", text=False, incremental=False, sampling_defaults={}, version="0.5.23", routed_experts=True)
TEXT = replace(BARE, text=True)


def asking(**fields: Any) -> dict[str, Any]:
    """For eight tokens, streamed; `sampling_params` are added to that."""
    params = {"max_new_tokens": 8, **fields.pop("sampling_params", {})}
    return {"rid": "mine", "input_ids": [1, 2, 3], "sampling_params": params, "stream": True, **fields}


def lacks(body: dict[str, Any], traits: Traits) -> str:
    return SglangFormat().open(request(body), "given").lacks(traits)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", "x"),
        ("stop", ["x"]),
        ("stop_regex", "x"),
        ("min_new_tokens", 1),
        ("json_schema", "{}"),
        ("regex", "x"),
        ("ebnf", "root ::= x"),
        ("structural_tag", "{}"),
    ],
)
def test_what_is_spelled(name: str, value: object) -> None:
    """O2: only a worker that has said to have a tokenizer takes it."""
    body = asking(sampling_params={name: value})
    assert [lacks(body, replace(BARE, text=text)) for text in (True, False, None)] == ["", "tokenizer", "tokenizer"]


@pytest.mark.parametrize("value", [None, "", [], 0])
@pytest.mark.parametrize("name", ["stop", "min_new_tokens"])
def test_what_asks_for_nothing(name: str, value: object) -> None:
    assert lacks(asking(sampling_params={name: value}), BARE) == ""
    assert lacks(asking(), BARE) == ""


@pytest.mark.parametrize("name", ["routed_experts", "indexer_topk"])
def test_rows(name: str) -> None:
    body = asking(**{f"return_{name}": True})
    kinds: list[dict[str, Any]] = [{name: value} for value in (True, False, None)]
    assert [lacks(body, replace(BARE, **kind)) for kind in kinds] == ["", name, name]


@pytest.mark.parametrize(
    ("most", "max_input", "room"),
    [(8, 5, True), (9, 5, False), (1, 3, True), (1, 2, False), (None, 3, True), (None, 2, False), (8, None, True)],
)
def test_room(most: int | None, max_input: int | None, room: bool) -> None:
    """A prompt of 3 tokens; the engine refuses more than 6 beyond `max_req_input_len`. No budget is as much as fits."""
    body = asking()
    body["sampling_params"] = {} if most is None else {"max_new_tokens": most}
    assert lacks(body, replace(BARE, max_input=max_input)) == ("" if room else "context")


def test_text_is_kept_of_answers_that_go_on_only() -> None:
    exchange = opened(asking(), TEXT)
    assert exchange.unfit(BARE) == "text"
    unprotected = opened(asking(sampling_params={"frequency_penalty": 0.5}), TEXT)
    assert unprotected.unfit(BARE) == ""


def test_a_dialect_is_asked_for_once_there_are_tokens() -> None:
    exchange = opened(asking(), TEXT)
    untold = replace(TEXT, incremental=None)
    assert exchange.unfit(untold) == ""
    sent = json.loads(exchange.dispatch(TEXT, "mine", 1.0).body)
    exchange.head(200, SSE_HEAD)
    [_, data] = Engine().events(sent)[0]
    exchange.feed([sse(json.loads(data) | {"text": "a"})], 2.0)
    assert exchange.delivered == 1
    assert exchange.unfit(untold) == "incremental_streaming_output"
    assert exchange.unfit(TEXT) == ""


@pytest.mark.parametrize(("second", "resampled"), [(True, False), (False, True), (None, True)])
@pytest.mark.parametrize("first", [True, None])
def test_who_does_not_say_that_it_is_deterministic_is_not(
    first: bool | None, second: bool | None, resampled: bool
) -> None:
    """E12."""
    exchange = opened(asking(sampling_params={"temperature": 1.0}), BARE)
    for name, deterministic in (("mine", first), ("again", second)):
        sent = json.loads(exchange.dispatch(replace(BARE, deterministic=deterministic), name, 1.0).body)
        exchange.head(200, SSE_HEAD)
        exchange.feed(Engine().events(sent)[:2], 2.0)
        exchange.complete(3.0)
    assert exchange.delivered == 4
    assert exchange.resampled() is (resampled or first is None)


def test_a_weight_update_does_not_make_another_model() -> None:
    """It renames the model (`/update_weights_from_disk`); the tokenizer stays."""
    infos = {"tokenizer_path": "tokenizer", "served_model_name": "step-7"}
    told = SglangFormat().traits({"/model_info": json.dumps(infos).encode()})
    assert told.model == "tokenizer"
    del infos["tokenizer_path"]
    assert SglangFormat().traits({"/model_info": json.dumps(infos).encode()}).model == "step-7"


def test_what_the_first_worker_says_late() -> None:
    """Its infos came after the request: they count, once; without them nobody is known to be like it."""
    exchange = SglangFormat().open(request(asking()), "given")
    exchange.admit(UNKNOWN)
    sent = json.loads(exchange.dispatch(UNKNOWN, "mine", 0.0).body)
    exchange.head(200, SSE_HEAD)
    exchange.feed(Engine().events(sent)[:2], 1.0)
    assert exchange.unfit(BARE) == "model"
    exchange.know(BARE)
    assert exchange.unfit(BARE) == ""
    exchange.know(replace(BARE, model="b"))
    assert exchange.unfit(BARE) == ""
