"""What the tests of prefill/decode pairs share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mock_worker_kit import MODEL

from dyn_relay.sockets import open_network
from dyn_testkit.client import Response
from dyn_testkit.fleet import Pair, open_pair
from dyn_testkit.oracle import fold
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import WorkerOptions


@asynccontextmanager
async def simulated(faults: Any = (None, None), **options: Any) -> AsyncIterator[Pair]:
    """A pair in memory: a forward pass takes a second. Its hosts are `prefill` and `decode`."""
    setup = WorkerOptions(**{"model": MODEL, "tick": 1.0} | options)
    async with open_pair(SimNetwork(), "{}", options=setup, faults=faults) as pair:
        yield pair


@asynccontextmanager
async def real(faults: Any = (None, None), **options: Any) -> AsyncIterator[Pair]:
    """A pair on real sockets, as fast as possible."""
    setup = WorkerOptions(**{"model": MODEL} | options)
    async with open_network() as network, open_pair(network, options=setup, faults=faults) as pair:
        yield pair


def value(response: Response, dialect: str = "cumulative") -> dict[str, Any]:
    """The answer, streamed or not."""
    streamed = (response.header("content-type") or "").startswith("text/event-stream")
    answer: dict[str, Any] = fold(response.values(), dialect) if streamed else response.json()
    return answer


def joined(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    """What a router makes of both: decode's answer with prefill's account of the prompt, and of chosen ids at first."""
    inputs = {name: part for name, part in prefill["meta_info"].items() if name.startswith("input_")}
    chosen = decode["meta_info"].get("output_token_ids_logprobs")
    if chosen and chosen[0] is None:
        inputs["output_token_ids_logprobs"] = prefill["meta_info"]["output_token_ids_logprobs"] + chosen[1:]
    return decode | {"meta_info": decode["meta_info"] | inputs}


def failure(response: Response) -> tuple[int | None, str]:
    """Status and message of a leg that has failed, streamed or not."""
    if response.status != 200:
        error = response.json()
        return response.status, error["message"] if "message" in error else error["error"]["message"]
    assert response.events()[-1] == b"[DONE]"
    finish = response.values()[-1]["meta_info"]["finish_reason"]
    assert finish["type"] == "abort"
    return finish["status_code"], finish["message"]
