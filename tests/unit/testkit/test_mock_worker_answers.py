"""The mock worker's answers are the oracle's, and their events come as SGLang's do."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_worker_kit import DIALECTS, MODEL, ORACLE, body, options

from dyn_testkit import strategies
from dyn_testkit.client import Response, fetch
from dyn_testkit.oracle import Oracle, differences, fold
from dyn_testkit.simnet import Fragmentation, Link, SimNetwork
from dyn_testkit.tokenizer import PLAIN
from dyn_testkit.worker import Dialect, MockWorker, WorkerOptions


@settings(max_examples=150)
@given(
    strategies.requests(MODEL),
    st.sampled_from(DIALECTS),
    strategies.fragmentations(),
    st.integers(1, 3),
    st.booleans(),
)
def test_answers_are_the_oracles(
    request: dict[str, Any], dialect: Dialect, fragmentation: Fragmentation, coalesce: int, late: bool
) -> None:
    """Unary and folded streams, in every dialect, coalesced and with a late finish."""
    settings_ = WorkerOptions(model=MODEL, dialect=dialect, tokens_per_tick=coalesce, late_finish=late)
    answers: list[Response] = []

    async def main() -> None:
        network = SimNetwork(1, Link(fragmentation=fragmentation))
        async with MockWorker.serve(network, "worker", 1, settings_) as worker:
            answers.append(await fetch(network, worker.url, "/generate", request | {"stream": False}))
            answers.append(await fetch(network, worker.url, "/generate", request | {"stream": True}))

    trio.run(main)
    unary, stream = answers
    wanted = ORACLE.answer(request)
    assert not differences(unary.json(), wanted)
    assert stream.complete
    assert stream.events()[-1] == b"[DONE]"
    assert not differences(fold(stream.values(), dialect), wanted)


async def test_text_experts_and_defaults_are_the_oracles() -> None:
    preferred = {"max_new_tokens": 9, "temperature": 0.5}
    setup = options(
        tick=0, skip_tokenizer_init=False, routed_experts=True, expert_mark=800, preferred_sampling_params=preferred
    )
    oracle = Oracle(MODEL, tokenizer=PLAIN, defaults=preferred, routed_experts=True, expert_mark=800)
    asked = {
        "input_ids": [7, 8],
        "return_routed_experts": True,
        "return_logprob": True,
        "return_text_in_logprobs": True,
    }
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, setup) as worker:
        for stream in (False, True):
            response = await fetch(network, worker.url, "/generate", asked | {"stream": stream})
            value = response.values()[-1] if stream else response.json()
            assert not differences(value, oracle.answer(asked))
        rows = base64.b64decode(value["meta_info"]["routed_experts"])
        assert len(rows) == 4 * (2 + 9 - 1) * MODEL.layers * MODEL.experts_per_token
        info = (await fetch(network, worker.url, "/get_model_info")).json()
        assert info["preferred_sampling_params"] == preferred


async def test_rows_of_an_indexer_and_early_ones() -> None:
    """The oracle's, in every event if the worker tells them early: then of the tokens so far."""
    oracle = Oracle(MODEL, routed_experts=True, indexer_topk=True)
    asked = {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 5}, "stream": True}
    asked |= {"return_routed_experts": True, "return_indexer_topk": True}
    for early in (False, True):
        setup = options(tick=0, routed_experts=True, indexer_topk=True, early_rows=early)
        async with MockWorker.serve(SimNetwork(), "worker", 1, setup) as worker:
            *events, last = (await worker.ask(asked)).values()
            assert not differences(last, oracle.answer(asked))
            info = (await worker.ask(None, "/server_info", method="GET")).json()
            assert info["enable_return_indexer_topk"] is True
        for event in events:
            shorter = {**asked, "sampling_params": {"max_new_tokens": event["meta_info"]["completion_tokens"]}}
            wanted = oracle.answer(shorter)["meta_info"]
            for name in ("routed_experts", "indexer_topk"):
                assert event["meta_info"].get(name) == (wanted[name] if early else None)


async def test_a_worker_that_ignores_seeds_draws_anew_each_time() -> None:
    """And tells so; the most likely tokens are what they are."""
    asked = {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 20, "temperature": 1.0, "sampling_seed": 3}}
    greedy = {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 20, "temperature": 0}}
    async with MockWorker.serve(SimNetwork(), "worker", 1, options(tick=0, deterministic=False)) as worker:
        drawn = [(await worker.ask(asked)).json()["output_ids"] for _ in range(3)]
        assert len({tuple(ids) for ids in drawn}) == 3
        assert not differences((await worker.ask(greedy)).json(), ORACLE.answer(greedy))
        info = (await worker.ask(None, "/server_info", method="GET")).json()
        assert info["enable_deterministic_inference"] is False


def test_the_oracle_and_the_fold_notice_mistakes() -> None:
    wanted = ORACLE.answer(body())
    assert not differences(wanted, wanted)
    assert differences(wanted | {"output_ids": [1]}, wanted)
    assert differences(wanted | {"text": ""}, wanted)
    assert differences(wanted | {"meta_info": wanted["meta_info"] | {"prompt_tokens": 4}}, wanted)
    event = {"output_ids": [1], "meta_info": {"completion_tokens": 2}}
    with pytest.raises(ValueError, match="completion_tokens is 2"):
        fold([event], "incremental")
    with pytest.raises(ValueError, match="no events"):
        fold([], "cumulative")


@pytest.mark.parametrize(
    ("setup", "request_", "expected"),
    [
        ({}, {}, [1, 2, 3, 4, 5, 6, 7]),
        ({"stream_interval": 3}, {}, [1, 4, 7]),
        ({}, {"stream_interval": 5}, [1, 6, 7]),
        ({"tokens_per_tick": 4}, {}, [4, 7]),
        ({"late_finish": True}, {}, [1, 2, 3, 4, 5, 6, 7, 7]),
    ],
)
async def test_events_of_a_stream(
    autojump_clock: trio.testing.MockClock, setup: dict[str, Any], request_: dict[str, Any], expected: list[int]
) -> None:
    """The first token at once, then every interval; a tick's tokens in one event; the finish alone if late."""
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options(**setup)) as worker:
        asked = body(7, stream=True)
        asked["sampling_params"] |= request_
        response = await fetch(network, worker.url, "/generate", asked)
    assert [value["meta_info"]["completion_tokens"] for value in response.values()] == expected
    stamps = ["response_sent_to_client_ts" in value["meta_info"] for value in response.values()]
    assert stamps == [True] + [False] * (len(expected) - 1)


async def test_pace_is_virtual(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options(tick=2.0)) as worker:
        value = (await fetch(network, worker.url, "/generate", body(5))).json()
    assert trio.current_time() == 10.0
    assert value["meta_info"]["e2e_latency"] == 10.0


async def test_weight_update_in_flight(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    answers: list[Response] = []

    async def generate() -> None:
        answers.append(await fetch(network, worker.url, "/generate", body(5)))

    async with MockWorker.serve(network, "worker", 1, options(weight_version="v1")) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await trio.sleep(2.5)
            update = {"new_version": "v2", "abort_all_requests": False}
            reply = await fetch(network, worker.url, "/update_weight_version", update)
            assert reply.json()["new_version"] == "v2"
        assert (await fetch(network, worker.url, "/model_info")).json()["weight_version"] == "v2"
    meta = answers[0].json()["meta_info"]
    assert meta["weight_version"] == "v2"
    assert meta["weight_versions"] == [
        {"version": "v1", "start": 0, "end": 2},
        {"version": "v2", "start": 2, "end": 5},
    ]


async def test_prefix_cache() -> None:
    network = SimNetwork()
    cached = []
    async with MockWorker.serve(network, "worker", 1, options(tick=0)) as worker:
        for asked in (body(), body(), body(return_logprob=True, logprob_start_len=1), body(input_ids=[7, 8, 9, 1])):
            meta = (await fetch(network, worker.url, "/generate", asked)).json()["meta_info"]
            cached.append((meta["cached_tokens"], meta["cached_tokens_details"]))
        assert (await fetch(network, worker.url, "/flush_cache", {})).body.startswith(b"Cache flushed.")
        meta = (await fetch(network, worker.url, "/generate", body())).json()["meta_info"]
    details = [None, {"device": 2, "host": 0}, {"device": 1, "host": 0}, {"device": 3, "host": 0}]
    assert cached == list(zip([0, 2, 1, 3], details, strict=True))
    assert meta["cached_tokens"] == 0


async def test_batches_and_samples() -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options(tick=0)) as worker:
        batch = body(input_ids=[[7, 8, 9], [5]], rid="b")
        answers = (await fetch(network, worker.url, "/generate", batch)).json()
        events = (await fetch(network, worker.url, "/generate", batch | {"stream": True})).values()
        samples = body()
        samples["sampling_params"]["n"] = 2
        copies = (await fetch(network, worker.url, "/generate", samples | {"rid": "s"})).json()
    assert [value["meta_info"]["id"] for value in answers] == ["b_0", "b_1"]
    assert not differences(answers[0], ORACLE.answer(body(rid="b_0")))
    assert not differences(answers[1], ORACLE.answer(body(rid="b_1", input_ids=[5])))
    for index, answer in enumerate(answers):
        last = [event for event in events if event["index"] == index][-1]
        assert not differences(
            {key: last[key] for key in last if key != "index"},
            ORACLE.answer(body(rid=f"b_{index}", input_ids=batch["input_ids"][index])),
        )
        assert answer["output_ids"] == last["output_ids"]
    assert len(copies) == 2
    assert all(value["meta_info"]["id"] not in ("s", "s_0") for value in copies)


async def test_data_parallel_ranks() -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options(tick=0, dp_size=2)) as worker:
        ranks = [
            (await fetch(network, worker.url, "/generate", body(**more))).json()["meta_info"]["dp_rank"]
            for more in ({}, {}, {"routed_dp_rank": 1}, {"data_parallel_rank": 1})
        ]
        assert ranks == [0, 1, 1, 1]
        assert (await fetch(network, worker.url, "/generate", body(routed_dp_rank=2))).status == 400
