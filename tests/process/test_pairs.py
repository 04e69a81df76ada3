"""Prefill/decode pairs of real processes, named on the command line: `kill -9` of either leg's worker."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack

import pytest
import trio

from dyn_testkit import laws
from dyn_testkit.engine import Model
from dyn_testkit.laws import Case, Observed
from dyn_testkit.oracle import Oracle
from tests.process.kit import ENV, RELAY, WORKER, Call, get, started

ORACLE = Oracle(Model())
#: Of a leg: which of its requests say nothing more, and where.
SILENT = {"prefill": "transfer", "decode": "5"}


def body(number):
    return {
        "rid": f"request-{number}",
        "input_ids": [number, 7, 11],
        "sampling_params": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "stream": number % 2 == 0,
    }


async def worker(stack, role, *args):
    flags = ["--disaggregation-mode", role, "--disaggregation-bootstrap-port", 0, *args]
    return await stack.enter_async_context(started(WORKER, *flags))


async def port(prefill):
    return (await get(prefill, "/server_info"))["disaggregation_bootstrap_port"]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_kill_one_of_a_pair(side, tmp_path):
    """Eight requests to two pairs; whatever the killed worker had, another pair gives whole."""
    trace = tmp_path / "trace.jsonl"
    requests = [body(number) for number in range(8)]
    stalls = [word for number in range(8) for word in ("--fault", f"{number}:stall@{SILENT[side]}")]
    async with AsyncExitStack() as stack:
        prefills = [
            await worker(stack, "prefill", *(stalls if side == "prefill" else ())),
            await worker(stack, "prefill"),
        ]
        decodes = [await worker(stack, "decode", *(stalls if side == "decode" else ())), await worker(stack, "decode")]
        pairs = [flag for one in prefills for flag in ("--prefill", one.url, await port(one))]
        flags = ["--pd-disaggregation", *pairs, "--decode", *(one.url for one in decodes), "--policy", "round_robin"]
        relay = await stack.enter_async_context(started(RELAY, "serve", "--port", 0, *flags, "--trace-file", trace))
        calls = [await Call.post(relay, request) for request in requests]
        victim = prefills[0] if side == "prefill" else decodes[0]
        held = 0
        while held < len(requests) // 2:
            held = {one["url"]: one["load"] for one in (await get(relay, "/workers"))["workers"]}[victim.url]
        victim.process.kill()
        for request, call in zip(requests, calls, strict=True):
            answer = await call.rest()
            laws.equivalence(Observed(Case(json.dumps(request).encode()), answer), ORACLE)
        relay.process.terminate()
        assert await relay.process.wait() == 0
    rows = [json.loads(line) for line in trace.read_bytes().splitlines()]
    assert [row["outcome"] for row in rows] == ["done"] * len(rows)
    name = "prefill_url" if side == "prefill" else "url"
    cut = [row for row in rows if row["attempts"][0][name] == victim.url]
    assert len(cut) >= held
    assert all(len(row["attempts"]) > 1 for row in cut)


async def test_a_role_that_the_worker_denies_is_named():
    """Nothing is served by a proxy that would send prompts to a decode worker."""
    async with AsyncExitStack() as stack:
        decodes = [await worker(stack, "decode") for _ in range(2)]
        flags = ["--port", "0", "--pd-disaggregation", "--prefill", decodes[0].url, "--decode", decodes[1].url]
        command = [*RELAY, "serve", *flags]
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, env=ENV, check=False)
        assert done.returncode == 1
        assert done.stdout == b"", "it says that it listens once it serves"
        said = done.stderr.decode()
        [line] = [line for line in said.splitlines() if decodes[0].url in line and "cannot start" in line]
        assert "prefill" in line
        assert "decode" in line
        assert "Traceback" not in said
