"""A whole proxy and its workers in one process, in memory and in virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from dyn_relay.app import App
from dyn_relay.config import Config
from dyn_relay.observe.trace import TraceFile
from dyn_testkit.client import Response, fetch
from dyn_testkit.faults import FaultPlan
from dyn_testkit.oracle import Oracle, differences, fold
from dyn_testkit.simnet import WHOLE, Fragmentation, Link, SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions

PROXY = "http://proxy:30000"


@dataclass
class World:
    """What a test holds in its hands."""

    network: SimNetwork
    app: App
    workers: list[MockWorker]
    nursery: trio.Nursery

    async def ask(self, body: Any, path: str = "/generate", **kwargs: Any) -> Response:
        """One request through the proxy."""
        return await fetch(self.network, PROXY, path, body, **kwargs)

    async def quiet(self) -> None:
        """Return once every request, and every order to a worker, has ended."""
        fleet = self.app.fleet
        await until(lambda: not len(self.app.live) and not any(worker.in_flight for worker in fleet.workers))

    async def ready(self) -> None:
        """Return once every worker is ready."""
        await until(lambda: all(worker.state == "ready" for worker in self.app.fleet.workers))

    def metric(self, name: str) -> float:
        """The value of a sample of /metrics, labels included in the name; 0 if it is not there."""
        for line in self.app.metrics.render().decode().splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        return 0.0


async def until(true: Callable[[], object]) -> None:
    """Wait. Virtual time only: under an autojump clock this waits for no real time."""
    while not true():  # noqa: ASYNC110 - what is waited for has no event of its own
        await trio.sleep(0.01)


@asynccontextmanager
async def world(
    *,
    plans: Sequence[FaultPlan | None] = (None, None),
    options: WorkerOptions | Sequence[WorkerOptions] | None = None,
    fragmentation: Fragmentation = WHOLE,
    buffer: int = 65536,
    seed: int = 1,
    trace: TraceFile | None = None,
    **config: Any,
) -> AsyncIterator[World]:
    """A proxy before `len(plans)` mock workers, all ready; `config` overrides options of the proxy."""
    network = SimNetwork(seed, Link(fragmentation=fragmentation, buffer=buffer))
    each = list(options) if isinstance(options, Sequence) else [options] * len(plans)
    async with trio.open_nursery() as nursery:
        workers = [
            MockWorker(network, f"w{number}", 30000, option, plan)
            for number, (plan, option) in enumerate(zip(plans, each, strict=True), 1)
        ]
        for worker in workers:
            await nursery.start(worker.run)
        settings: dict[str, Any] = {"host": "proxy", "port": 30000, "seed": seed, "log_level": "error"} | config
        settings.setdefault("worker_urls", tuple(worker.url for worker in workers))
        app = App(Config(**settings), network)
        listener = await network.listen("proxy", 30000)
        await nursery.start(app.serve, listener, trace)
        made = World(network, app, workers, nursery)
        await made.ready()
        yield made
        nursery.cancel_scope.cancel()


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
