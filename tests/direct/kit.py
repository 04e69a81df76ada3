"""A proxy before mock engines, reached over HTTP or over gRPC, or through sidecars."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import trio

from dyn_testkit.background import background
from dyn_testkit.faults import FaultPlan
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import open_relay, until
from dyn_testkit.sidecar import open_sidecar
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import WorkerOptions
from tests.relay.harness import World

#: Each world begins at a multiple of so many seconds.
_BEGIN = 20.0
TRANSPORTS = ("http", "grpc")
#: As both, with a sidecar beside each engine.
SIDED = ("http by sidecar", "grpc by sidecar")
STOCK = WorkerOptions()


@asynccontextmanager
async def direct(
    transport: str = "grpc",
    *,
    options: WorkerOptions = STOCK,
    plans: Sequence[FaultPlan | None] = (None, None),
    seed: int = 1,
    **config: Any,
) -> AsyncIterator[World]:
    """A proxy before `len(plans)` mock engines, all ready; `config` overrides options of the proxy."""
    network = SimNetwork(seed)
    begin = (trio.current_time() // _BEGIN + 1) * _BEGIN
    options = replace(options, epoch=1_800_000_000.0 - begin)  # answers tell the time: it is the same in all worlds
    async with open_fleet(network, "w{}", 30000) as fleet:
        workers = await fleet(len(plans), options=replace(options, grpc_port=30001), faults=list(plans))
        urls = [worker.grpc_url if transport == "grpc" else worker.url for worker in workers]
        if transport in SIDED:
            urls = []
        settings: dict[str, Any] = {"seed": seed, "log_level": "error"} | config
        async with (
            open_relay(network, "proxy", 30000, urls, **settings) as relay,
            background() as nursery,
            AsyncExitStack() as sidecars,
        ):
            for number, worker in enumerate(workers if transport in SIDED else (), 1):
                over = {"engine_grpc": f"w{number}:30001"} if transport.startswith("grpc") else {}
                engine = None if over else worker.url
                at = {"listen": f"side{number}:31000"} | over
                await sidecars.enter_async_context(open_sidecar(network, engine, [relay.url], **at))
            await until(lambda: len(relay.app.fleet.workers) == len(workers))
            await relay.ready()
            await trio.sleep_until(begin)  # however long that took
            yield World(relay, workers, nursery)
