"""Prefill/decode pairs whose legs are asked over gRPC, each alone or both."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.status import Code
from dyn_testkit.fleet import Pair, open_pair
from dyn_testkit.oracle import Oracle
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import WorkerOptions
from tests.grpc_engine.engine_kit import MODEL, PROMPT, generate, wanted

ROOM = 2**63 - 1
OPTIONS = WorkerOptions(model=MODEL, tick=1.0, grpc_port=2, bootstrap_timeout=60.0, waiting_timeout=60.0)


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    async with open_pair(SimNetwork(), "{}", options=OPTIONS) as both:
        yield both


def leg(both: Pair, room: int, **more: Any) -> pb.GenerateRequest:
    place = pb.DisaggregatedParams(
        bootstrap_host=both.prefill.host, bootstrap_port=both.prefill.bootstrap_port, bootstrap_room=room
    )
    return wanted(6, disaggregated_params=place, **more)


@pytest.mark.parametrize("over_grpc", ["both", "prefill", "decode"])
async def test_both_legs_meet(over_grpc: str, autojump_clock: MockClock) -> None:
    got: dict[str, list[int]] = {}
    async with pair() as both:

        async def ask(name: str) -> None:
            worker = getattr(both, name)
            if over_grpc in ("both", name):
                got[name] = list((await generate(worker, leg(both, ROOM))).messages[-1].output_ids)
            else:
                got[name] = (await worker.ask(worker_body(both))).json()["output_ids"]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "prefill")
            nursery.start_soon(ask, "decode")
        assert both.prefill.rooms == both.decode.rooms == [ROOM]
    ids = Oracle(MODEL).answer(worker_body(both))["output_ids"]
    assert got == {"prefill": ids[:1], "decode": ids}


def worker_body(both: Pair) -> dict[str, Any]:
    return {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        "bootstrap_host": both.prefill.host,
        "bootstrap_port": both.prefill.bootstrap_port,
        "bootstrap_room": ROOM,
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_leg_left_alone_says_so(stream: bool, autojump_clock: MockClock) -> None:
    async with pair() as both:
        alone = await generate(both.decode, leg(both, 7, stream=stream))
        without = await generate(both.decode, wanted(6, stream=stream))
    if stream:
        finishes = [json.loads(one.messages[-1].meta_info["finish_reason"]) for one in (alone, without)]
        assert [finish["status_code"] for finish in finishes] == [500, 400]
    else:
        assert [one.status for one in (alone, without)] == [Code.INTERNAL] * 2
        assert (alone.message[:5], without.message[:24]) == ("500: ", "Invalid request: Disaggr")


async def test_a_room_that_is_live_kills(autojump_clock: MockClock) -> None:
    async with pair() as both, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(generate, both.prefill, leg(both, 9))
        await both.prefill.dead()
        nursery.cancel_scope.cancel()
