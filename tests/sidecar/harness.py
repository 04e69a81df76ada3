"""Proxies, sidecars and engines in one process, in memory and in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dyn_testkit.faults import FaultPlan
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import Relay, open_relay, until
from dyn_testkit.sidecar import SidecarHost, open_sidecar
from dyn_testkit.simnet import WHOLE, Fragmentation, Link, SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions

LEASE = 10.0


@dataclass(slots=True)
class Sided:
    """Workers, a sidecar beside each, and proxies at which they register themselves."""

    network: SimNetwork
    workers: list[MockWorker]
    sidecars: list[SidecarHost]
    relays: list[Relay]

    @property
    def relay(self) -> Relay:
        return self.relays[0]

    def listed(self, relay: int = 0) -> dict[str, str]:
        """The state of each worker that a proxy lists, by URL."""
        return states(self.relays[relay])

    async def settled(self, *urls: str, relay: int = 0) -> None:
        """Return once these are ready at a proxy, and no others are there."""
        await until(lambda: self.listed(relay) == dict.fromkeys(urls, "ready"), lambda: str(self.listed(relay)))


def states(relay: Relay) -> dict[str, str]:
    return {worker.url: worker.state.value for worker in relay.app.fleet.workers}


@asynccontextmanager
async def sided(
    count: int = 2,
    *,
    plans: Sequence[FaultPlan | None] | None = None,
    options: WorkerOptions | Sequence[WorkerOptions] | None = None,
    relays: int = 1,
    fragmentation: Fragmentation = WHOLE,
    buffer: int = 65536,
    sidecar: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Sided]:
    """`count` engines, all registered and ready; `sidecar`: options of the sidecars, `config` of the proxies."""
    network = SimNetwork(1, Link(fragmentation=fragmentation, buffer=buffer))
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(open_fleet(network, "w{}", 30000))
        workers = await fleet(count, options=options, faults=plans)
        proxies = []
        for number in range(relays):
            settings: dict[str, Any] = {"seed": number, "log_level": "error"} | config
            proxies.append(await stack.enter_async_context(open_relay(network, f"proxy{number}", 30000, **settings)))
        wanted: dict[str, Any] = {"lease_secs": LEASE} | (sidecar or {})
        sidecars = [
            await stack.enter_async_context(
                open_sidecar(network, worker.url, [one.url for one in proxies], f"side{number}:31000", **wanted)
            )
            for number, worker in enumerate(workers, 1)
        ]
        world = Sided(network, workers, sidecars, proxies)
        for number in range(relays):
            await world.settled(*(one.url for one in sidecars), relay=number)
        yield world


@asynccontextmanager
async def alone(
    plan: FaultPlan | None = None, options: WorkerOptions | None = None, *, buffer: int = 65536, **settings: Any
) -> AsyncIterator[tuple[SidecarHost, MockWorker, SimNetwork]]:
    """One engine and its sidecar, which serves; no proxy."""
    network = SimNetwork(1, Link(buffer=buffer))
    async with open_fleet(network, "w{}", 30000) as fleet:
        [worker] = await fleet(1, faults=[plan], options=options)
        async with open_sidecar(network, worker.url, (), "side:31000", **settings) as host:
            await host.sidecar.open.wait()
            yield host, worker, network
