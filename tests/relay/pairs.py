"""A proxy before prefill and decode workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from dyn_testkit.background import background
from dyn_testkit.faults import FaultPlan
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import open_relay
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import WorkerOptions
from tests.relay.harness import World

STOCK = WorkerOptions()


class Pairs(World):
    """The workers are the prefill ones, then the decode ones."""

    def __init__(self, relay: Any, prefills: Any, decodes: Any, nursery: Any) -> None:
        super().__init__(relay, [*prefills, *decodes], nursery)
        self.prefills, self.decodes = prefills, decodes


@asynccontextmanager
async def pairs(
    *,
    prefill: Sequence[FaultPlan | None] = (None, None),
    decode: Sequence[FaultPlan | None] = (None, None),
    options: WorkerOptions = STOCK,
    weights: Sequence[str] = (),
    seed: int = 1,
    **config: Any,
) -> AsyncIterator[Pairs]:
    """A proxy before `len(prefill)` and `len(decode)` mock workers, all ready. `weights`: those of the decode ones."""
    network = SimNetwork(seed)
    async with open_fleet(network, "p{}", 30000) as fleet, open_fleet(network, "d{}", 30000) as others:
        prefills = await fleet(len(prefill), options=replace(options, disaggregation="prefill"), faults=list(prefill))
        versions = weights or [options.weight_version] * len(decode)
        each = [replace(options, disaggregation="decode", weight_version=version) for version in versions]
        decodes = await others(len(decode), options=each, faults=list(decode))
        settings: dict[str, Any] = {"seed": seed, "log_level": "error", "pd_disaggregation": True} | config
        settings |= {"prefill": tuple(one.url for one in prefills), "decode": tuple(one.url for one in decodes)}
        async with open_relay(network, "proxy", 30000, (), **settings) as relay, background() as nursery:
            await relay.ready()
            yield Pairs(relay, prefills, decodes, nursery)
