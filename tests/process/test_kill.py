"""`kill -9` of a worker process: every client gets the answer of an uninterrupted run."""

from __future__ import annotations

import json

import trio

from dyn_testkit import laws
from dyn_testkit.engine import Model
from dyn_testkit.laws import Case, Observed
from dyn_testkit.oracle import Oracle
from tests.process.kit import RELAY, WORKER, Call, get, started

ORACLE = Oracle(Model())


def body(number: int, tokens: int, *, stream: bool) -> dict[str, object]:
    return {
        "rid": f"request-{number}",
        "input_ids": [number, 7, 11],
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "stream": stream,
    }


async def test_kill_a_worker_in_mid_stream(tmp_path):
    """C1: six requests, streams and unary ones, on two workers in two dialects; one worker is killed.

    The one to be killed says nothing after the fifth token, so that no answer can be complete before.
    """
    trace = tmp_path / "trace.jsonl"
    requests = [body(number, 40, stream=number < 4) for number in range(6)]
    answers: dict[int, object] = {}
    stalls = [word for number in range(6) for word in ("--fault", f"{number}:stall@5")]
    async with (
        started(WORKER, *stalls, "--dialect", "cumulative") as first,
        started(WORKER, "--dialect", "incremental") as second,
        started(RELAY, "serve", "--port", 0, "--worker-urls", first.url, second.url, "--trace-file", trace) as relay,
    ):
        calls = [await Call.post(relay, request) for request in requests]
        for call in calls[:4]:
            await call.read(events=3)
        loads = {worker["url"]: worker["load"] for worker in (await get(relay, "/workers"))["workers"]}
        assert loads[first.url] > 0
        first.process.kill()
        async with trio.open_nursery() as nursery:
            for number, call in enumerate(calls):
                nursery.start_soon(_collect, answers, number, call)
        relay.process.terminate()
        assert await relay.process.wait() == 0
    for number, request in enumerate(requests):
        laws.equivalence(Observed(Case(json.dumps(request).encode()), answers[number]), ORACLE)
    rows = [json.loads(line) for line in trace.read_bytes().splitlines()]
    assert sorted(row["rid"] for row in rows) == [request["rid"] for request in requests]
    assert [row["outcome"] for row in rows] == ["done"] * len(rows)
    cut = [row for row in rows if len(row["attempts"]) == 2]
    assert len(cut) >= loads[first.url]
    assert {row["attempts"][0]["url"] for row in cut} == {first.url}


async def _collect(answers, number, call):
    answers[number] = await call.rest()
