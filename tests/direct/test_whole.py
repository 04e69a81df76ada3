"""Unary answers, which are streams on their way."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import trio

from dyn_relay.direct.answer import NotAnAnswer
from dyn_relay.direct.whole import Whole
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.http11.client import Origin, fetch
from dyn_testkit.worker import WorkerOptions
from tests.direct.test_gateway import IDS, world

SLOW = WorkerOptions(tick=20.0)
BODY = {
    **IDS,
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "sampling_params": {"max_new_tokens": 30, "temperature": 0.0, "ignore_eos": True},
}


@pytest.mark.parametrize("text", [False, True], ids=["ids", "text"])
@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
async def test_an_answer_may_take_longer_than_the_engine_waits_for_a_message(autojump_clock, dialect, text):
    options = replace(SLOW, dialect=dialect, skip_tokenizer_init=not text)
    data = json.dumps(BODY).encode()
    async with world(options) as w:
        over, beside = [
            await fetch(w.pool, Origin.parse(url), "POST", "/generate", body=data, timeout=1000.0)
            for url in (w.worker.grpc_url, w.worker.url)
        ]
        assert over.status == beside.status == 200
        grpc, http = json.loads(over.body), json.loads(beside.body)
        assert list(grpc["meta_info"]) == list(http["meta_info"])
        for answer in (grpc, http):
            for name in ("id", "e2e_latency", "response_sent_to_client_ts"):
                answer["meta_info"].pop(name, None)
        assert grpc == http


@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
async def test_an_abort_leaves_the_tokens_so_far(autojump_clock, dialect):
    async with world(replace(SLOW, tick=1.0, dialect=dialect)) as w:
        bodies: list[Any] = []

        async def client() -> None:
            bodies.append(json.loads((await w.ask("/generate", BODY)).body))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client)
            await trio.sleep(5.5)
            await w.ask("/abort_request", {"rid": "r"})
        [body] = bodies
        meta = body["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert len(body["output_ids"]) == len(meta["output_token_logprobs"]) == meta["completion_tokens"] > 2


def _message(ids: list[int], told: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(output_ids=ids, meta_info={"completion_tokens": str(told)})


def test_deltas_that_miss_one_are_no_answer():
    whole = Whole()
    whole.add(_message([1], 1))
    whole.add(_message([2, 3], 3))
    with pytest.raises(NotAnAnswer, match="5 tokens are told, and 4"):
        whole.add(_message([5], 5))


def test_the_word_of_an_abort_among_deltas_is_all_of_it():
    whole = Whole()
    whole.add(_message([1], 1))
    whole.add(_message([2], 2))
    whole.add(_message([1, 2, 3], 3))
    assert whole.message is not None
    assert list(whole.message.output_ids) == [1, 2, 3]


def test_rows_may_be_all_of_them_where_ids_are_deltas():
    whole = Whole()
    for count in (1, 2, 4):
        rows = json.dumps([[-0.5, number, None] for number in range(count)])
        message = _message(list(range(count // 2, count)), count)
        message.meta_info["output_token_logprobs"] = rows
        whole.add(message)
    assert whole.message is not None
    assert json.loads(whole.message.meta_info["output_token_logprobs"]) == json.loads(rows)
    assert list(whole.message.output_ids) == [0, 1, 2, 3]
