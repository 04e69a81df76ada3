"""A whole proxy and its workers in one process, in memory and in virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from dyn_testkit.background import background
from dyn_testkit.client import Response
from dyn_testkit.faults import FaultPlan
from dyn_testkit.fleet import open_fleet
from dyn_testkit.oracle import Oracle, differences, fold
from dyn_testkit.relay import Relay, open_relay
from dyn_testkit.simnet import WHOLE, Fragmentation, Link, SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions

PROXY = "http://proxy:30000"


class World(Relay):
    """The proxy, and what is around it."""

    def __init__(self, relay: Relay, workers: list[MockWorker], nursery: trio.Nursery) -> None:
        super().__init__(relay.app, relay.url, relay.rows, relay.network)
        self.workers = workers
        self.nursery = nursery


@asynccontextmanager
async def world(
    *,
    plans: Sequence[FaultPlan | None] = (None, None),
    options: WorkerOptions | Sequence[WorkerOptions] | None = None,
    fragmentation: Fragmentation = WHOLE,
    buffer: int = 65536,
    seed: int = 1,
    **config: Any,
) -> AsyncIterator[World]:
    """A proxy before `len(plans)` mock workers, all ready; `config` overrides options of the proxy."""
    network = SimNetwork(seed, Link(fragmentation=fragmentation, buffer=buffer))
    async with open_fleet(network, "w{}", 30000) as fleet:
        workers = await fleet(len(plans), options=options, faults=plans)
        urls = config.pop("worker_urls", [worker.url for worker in workers])
        settings: dict[str, Any] = {"seed": seed, "log_level": "error"} | config
        async with open_relay(network, "proxy", 30000, urls, **settings) as relay, background() as nursery:
            await relay.ready()
            yield World(relay, workers, nursery)


async def aborted_in_between(w: World, plan: FaultPlan, body: dict[str, Any]) -> Response:
    """The answer to a request that loses its worker by `plan`, and is aborted while it waits for w2 to be dialled."""
    answers: list[Response] = []

    async def client() -> None:
        answers.append(await w.ask(body))

    w.network.hang(("w2", 30000))
    # Probes have pooled a connection to w2 already; without it the continuation has to dial, and hangs.
    await trio.sleep(4)
    async with trio.open_nursery() as clients:
        clients.start_soon(client)
        await plan.fired()
        await trio.sleep(1)
        await w.ask({"rid": body["rid"]}, "/abort_request")
    [response] = answers
    return response


def judged(response: Response, body: dict[str, Any], oracle: Oracle, dialect: str = "cumulative") -> list[str]:
    """Where a client's answer is not the oracle's; a stream is folded first. Empty: it is exact."""
    if response.status != 200 or not response.complete:
        return [f"status {response.status}, {response.broken or 'complete'}: {response.body[:300]!r}"]
    if not body.get("stream"):
        return differences(response.json(), oracle.answer(body))
    if response.events()[-1] != b"[DONE]":
        return ["no [DONE]"]
    values = response.values()
    errors = [json.dumps(value["error"]) for value in values if "error" in value]
    return errors or differences(fold(values, dialect), oracle.answer(body))
