"""The whole proxy, started with the format by its name, before workers that compress and die."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dyn_testkit.client import Response
from dyn_testkit.engine import Model
from dyn_testkit.faults import CLOSE, FaultPlan, at_token
from dyn_testkit.fleet import open_fleet
from dyn_testkit.oracle import Oracle, fold
from dyn_testkit.relay import open_relay
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import Dialect, WorkerOptions
from sglang_zstd.codec import zstd
from sglang_zstd.simulated import compressing, packed

PROMPT, TOKENS = [5, 6, 7], 9
BODY: dict[str, Any] = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream_interval": 1},
    "return_routed_experts": True,
    "return_indexer_topk": True,
}
#: Rows tell which worker made them.
MARKS = [1 << 20, 2 << 20, 3 << 20]
DIALECTS: tuple[Dialect, ...] = ("cumulative", "incremental", "mixed")


def rows_of(owners: Sequence[int], name: str) -> bytes:
    """The rows of every position, the i-th by the worker `owners[i]`; of none that was ever compressed."""
    oracles = [Oracle(Model(), routed_experts=True, indexer_topk=True, expert_mark=mark) for mark in MARKS]
    found = [base64.b64decode(oracle.answer(BODY)["meta_info"][name]) for oracle in oracles]
    width = len(found[0]) // len(owners)
    return b"".join(found[owner][at * width : (at + 1) * width] for at, owner in enumerate(owners))


def ask(lives: Sequence[int], options: Sequence[WorkerOptions], body: dict[str, Any]) -> Response:
    """The answer when attempt i ends after `lives[i]` tokens of its own; in no real time."""

    async def run() -> Response:
        network = SimNetwork(1)
        plans = [FaultPlan.in_order([(at_token(tokens), CLOSE)]) for tokens in lives]
        plans += [FaultPlan() for _ in range(len(options) - len(plans))]
        async with open_fleet(network, "w{}", 30000) as fleet:
            workers = await fleet(len(options), options=list(options), faults=plans)
            urls = [worker.url for worker in workers]
            config: dict[str, Any] = {"format": "sglang-zstd", "policy": "round_robin", "seed": 1, "log_level": "error"}
            async with open_relay(network, "proxy", 30000, urls, **config) as relay:
                await relay.ready()
                return await relay.ask(body)

    return trio.run(run, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_rows_of_three_workers_are_joined(dialect: Dialect, stream: bool) -> None:
    """G1, compressed: rows of tokens that were delivered are those of the worker that sampled them.

    Beside it, the indexer's are joined as the native format does it.
    """
    options = [
        compressing(WorkerOptions(dialect=dialect, indexer_topk=True, early_rows=True, expert_mark=mark))
        for mark in MARKS
    ]
    response = ask([4, 3], options, BODY | {"stream": stream})
    answer = fold(response.values(), dialect) if stream else response.json()
    owners = [0] * (3 + 4 - 1) + [1] * 3 + [2] * 2
    meta = answer["meta_info"]
    experts = base64.b64decode(meta["routed_experts"], validate=True)
    assert zstd.decompress(experts) == rows_of(owners, "routed_experts")
    assert base64.b64decode(meta["indexer_topk"], validate=True) == rows_of(owners, "indexer_topk")
    assert experts == zstd.compress(rows_of(owners, "routed_experts"))


@pytest.mark.parametrize("lives", [[], [4]])
def test_rows_of_one_worker_are_not_compressed_again(lives: list[int]) -> None:
    """Also after a cut: the last worker gives all of them, and its value is the client's as it came."""
    options = [compressing(WorkerOptions(indexer_topk=True, expert_mark=mark)) for mark in MARKS[:2]]
    meta = ask(lives, options, BODY).json()["meta_info"]
    whole = rows_of([len(lives)] * (3 + TOKENS - 1), "routed_experts")
    assert base64.b64decode(meta["routed_experts"], validate=True) == packed(whole) != zstd.compress(whole)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("lives", [[], [4]])
def test_rows_of_a_pair_are_joined(lives: list[int], stream: bool) -> None:
    """Law 5 through the whole proxy; after a cut, too: then another prefill worker computes all there was."""

    async def run() -> Response:
        network = SimNetwork(1)
        plans = [FaultPlan.in_order([(at_token(tokens), CLOSE)]) for tokens in lives]
        plans += [FaultPlan() for _ in range(2 - len(plans))]
        plain = WorkerOptions(indexer_topk=True)
        first, second = (replace(compressing(plain), disaggregation=role) for role in ("prefill", "decode"))
        async with open_fleet(network, "p{}", 30000) as prefills, open_fleet(network, "d{}", 30000) as decodes:
            computing = await prefills(2, options=first)
            answering = await decodes(2, options=second, faults=plans)
            config: dict[str, Any] = {"format": "sglang-zstd", "policy": "round_robin", "seed": 1, "log_level": "error"}
            config |= {"prefill": tuple(one.url for one in computing), "decode": tuple(one.url for one in answering)}
            async with open_relay(network, "proxy", 30000, (), pd_disaggregation=True, **config) as relay:
                await relay.ready()
                return await relay.ask(BODY | {"stream": stream})

    response = trio.run(run, clock=MockClock(autojump_threshold=0))
    meta = (fold(response.values(), "cumulative") if stream else response.json())["meta_info"]
    oracle = Oracle(Model(), routed_experts=True, indexer_topk=True).answer(BODY)["meta_info"]
    experts = zstd.decompress(base64.b64decode(meta["routed_experts"], validate=True))
    assert experts == base64.b64decode(oracle["routed_experts"])
    assert meta["indexer_topk"] == oracle["indexer_topk"]


@pytest.fixture
def command() -> Any:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "dyn_relay", "check"]
        return subprocess.run(argv, env={**environ, **more}, capture_output=True, text=True, check=False, timeout=60)

    return run


def test_the_command_knows_it(command: Any) -> None:
    done = command(DYN_GENERATE_FORMAT="sglang-zstd", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    [row] = [line for line in done.stdout.splitlines() if line.split()[1:2] == ["format"]]
    assert row.split()[3::2] == ["sglang-zstd", "DYN_GENERATE_FORMAT"]
    done = command(DYN_GENERATE_FORMAT="sglang-zst")
    assert done.returncode == 2
    assert "sglang, sglang-zstd" in " ".join(done.stderr.split())
