"""The account of an answer with text: deltas that are none, and tokens that are taken back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang_kit import DONE, SSE_HEAD, opened, sse

from dyn_relay.formats.base import End, Event
from dyn_relay.formats.traits import Traits

TEXT = "ABCDEF"
WORKER = Traits(version="0.5.23", text=True, incremental=True, sampling_defaults={}, model="m")
ASKED: dict[str, Any] = {
    "rid": "mine",
    "input_ids": [1, 2],
    "sampling_params": {"max_new_tokens": len(TEXT)},
    "stream": False,
}
FIRST_ID = 11


def event(rid: str, since: int, until: int, base: int, version: str, text: str, **meta: Any) -> Event:
    """Tokens from `since` to `until` of the answer, of an attempt that began after `base`."""
    ids = [FIRST_ID + at for at in range(since, until)]
    fixed = {"id": rid, "finish_reason": None, "completion_tokens": until - base, "weight_version": version}
    return sse({"text": text, "output_ids": ids, "meta_info": {**fixed, **meta}})


def test_tokens_of_unknown_weights_take_their_text_with_them() -> None:
    """H2: they are made again, and so is what they spelled."""
    exchange = opened(ASKED, WORKER)
    exchange.dispatch(WORKER, "mine", 0.0)
    exchange.head(200, SSE_HEAD)
    for since, until, version in ((0, 1, "7"), (1, 2, "7"), (2, 4, "8")):
        exchange.feed([event("mine", since, until, 0, version, TEXT[since:until])], 1.0)
    assert exchange.delivered == 4
    assert exchange.complete(2.0) is None
    assert exchange.delivered == 2
    assert json.loads(exchange.dispatch(WORKER, "again", 3.0).body)["input_ids"] == [1, 2, FIRST_ID, FIRST_ID + 1]
    exchange.head(200, SSE_HEAD)
    spans = [{"version": "8", "start": 0, "end": 4}]
    end = {"finish_reason": {"type": "length", "length": 4}, "weight_versions": spans}
    exchange.feed([event("again", 2, 6, 2, "8", TEXT[2:], **end), DONE], 4.0)
    question = exchange.question
    assert question is not None
    spelled = [
        "".join(TEXT[one - FIRST_ID] if one >= FIRST_ID else "ab"[one - 1] for one in ids)
        for ids in json.loads(question.body)["tokens"]
    ]
    exchange.reply(200, json.dumps({"text": spelled}).encode(), 5.0)
    assert exchange.end is End.FINISHED, exchange.detail
    assert json.loads(exchange.answer(6.0).body)["text"] == TEXT


@pytest.mark.parametrize("incremental", [None, False])
def test_deltas_of_a_worker_that_did_not_say_so(incremental: bool | None) -> None:
    """F3: there were releases whose text was all of it beside deltas of ids: which it is nothing shows."""
    worker = Traits(version="0.5.23", incremental=incremental, sampling_defaults={})
    exchange = opened(ASKED, worker)
    exchange.dispatch(worker, "mine", 0.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed([event("mine", 0, 1, 0, "7", "A"), event("mine", 1, 2, 0, "7", "AB")], 1.0)
    assert exchange.end is End.GARBAGE
    assert exchange.verdict.reason == "text"
