"""What the strategies make can be lived through by hand. How they shrink: tests/quality."""

from __future__ import annotations

from typing import Any

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from dyn_testkit import faults, strategies
from dyn_testkit.client import fetch
from dyn_testkit.engine import Model
from dyn_testkit.faults import CLOSE, FaultPlan, at_token
from dyn_testkit.oracle import Oracle
from dyn_testkit.simnet import Link, SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions

MODEL = Model(vocab_size=60)
ORACLE = Oracle(MODEL)


@settings(max_examples=150)
@given(strategies.requests(MODEL, 10), strategies.kill_plans(4, 10), strategies.fragmentations())
def test_kills_survived_by_hand_give_the_oracles_tokens(
    request: dict[str, Any], kills: tuple[int, ...], fragmentation: Any
) -> None:
    """The kit in one test: a migration written out, with every attempt but the last killed after some tokens."""
    wanted = ORACLE.answer(request)["output_ids"]
    budget = request["sampling_params"]["max_new_tokens"]
    delivered: list[int] = []

    async def main() -> None:
        plan = FaultPlan.in_order([(at_token(kill), CLOSE) for kill in kills])
        setup = WorkerOptions(model=MODEL, dialect="incremental")
        network = SimNetwork(0, Link(fragmentation=fragmentation))
        async with MockWorker.serve(network, "worker", 1, setup, plan) as worker:
            for _ in range(len(kills) + 1):
                params = request["sampling_params"] | {"max_new_tokens": budget - len(delivered)}
                ids = request["input_ids"] + delivered
                attempt = request | {"input_ids": ids, "sampling_params": params, "stream": True}
                attempt.pop("logprob_start_len", None)
                answer = await fetch(network, worker.url, "/generate", attempt)
                delivered.extend(token for value in answer.values() for token in value["output_ids"])
                if any(value["meta_info"]["finish_reason"] for value in answer.values()):
                    break
            else:
                raise AssertionError("the last attempt did not finish")

    trio.run(main)
    assert delivered == wanted


@settings(max_examples=150)
@given(strategies.fault_plans(4, 6), st.sampled_from(["cumulative", "incremental", "mixed"]))
def test_what_a_cut_stream_has_delivered_is_a_prefix(plan: FaultPlan, dialect: Any) -> None:
    """Every planned fault fires, whatever its place; a stream is complete only if none did, or only after its end."""
    request = {"input_ids": [1, 2], "sampling_params": {"temperature": 0, "max_new_tokens": 6}, "stream": True}
    wanted = ORACLE.answer(request)["output_ids"]

    async def main() -> None:
        network = SimNetwork()
        async with MockWorker.serve(network, "worker", 1, WorkerOptions(model=MODEL, dialect=dialect), plan) as worker:
            for index in range(5):
                await worker.restart()
                answer = await fetch(network, worker.url, "/generate", request)
                values = answer.values()
                got = [token for value in values for token in value["output_ids"]]
                if dialect == "cumulative":
                    got = values[-1]["output_ids"] if values else []
                assert got == wanted[: len(got)]
                fault = plan.faults[index] if index < len(plan.faults) else None
                if fault is not None:
                    await plan.fired(fault)
                assert answer.complete == (fault is None or fault.where is faults.AFTER_DONE)

    trio.run(main)
    plan.verify()
