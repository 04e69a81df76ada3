"""When an attempt may be taken from a worker that could go on with it."""

from __future__ import annotations

import json

import pytest
from sglang_kit import DIALECTS, DONE, SSE_HEAD, TOLD, Engine, opened, sse

from dyn_relay.formats.base import NativeRequest
from dyn_relay.formats.sglang.format import SglangFormat

PARAMS = {"max_new_tokens": 6, "temperature": 0}
BODY = {"input_ids": [1, 2, 3], "rid": "mine", "stream": True, "sampling_params": PARAMS}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_until_its_finish_is_all_that_lacks(dialect: str, stream: bool) -> None:
    exchange = opened({**BODY, "stream": stream})
    sent = exchange.dispatch(TOLD, "mine", 0.0)
    assert exchange.leavable
    exchange.head(200, SSE_HEAD)
    # The finish comes in an event of its own.
    events = Engine(dialect, late_finish=True).events(json.loads(sent.body))
    for event in events[:-2]:
        assert exchange.leavable
        exchange.feed([event], 1.0)
    assert exchange.delivered == 6
    assert not exchange.leavable
    exchange.feed(events[-2:-1], 1.0)
    assert not exchange.leavable
    exchange.feed([DONE], 1.0)
    assert not exchange.leavable


def test_a_token_that_ends_the_answer() -> None:
    """Named by the client, learnt from the model, or not known at all where engines tell the finish late."""
    format = SglangFormat()
    for tokens, params, leavable in [([7], {}, True), ([7], {"stop_token_ids": [7]}, False), ([7, 8], {}, True)]:
        exchange = format.open(_request({**BODY, "sampling_params": {**PARAMS, **params}}), "given")
        exchange.admit(TOLD)
        exchange.dispatch(TOLD, "mine", 0.0)
        exchange.head(200, SSE_HEAD)
        meta = {"id": "mine", "finish_reason": None, "prompt_tokens": 3, "completion_tokens": len(tokens)}
        exchange.feed([sse({"output_ids": tokens, "meta_info": meta})], 1.0)
        assert exchange.leavable is leavable, (tokens, params)


def test_a_request_that_is_not_migratable_stays() -> None:
    exchange = opened({**BODY, "sampling_params": {**PARAMS, "frequency_penalty": 0.5}})
    exchange.dispatch(TOLD, "mine", 0.0)
    assert not exchange.leavable


def _request(body: object) -> NativeRequest:
    return NativeRequest("POST", "/generate", [(b"content-type", b"application/json")], json.dumps(body).encode())
