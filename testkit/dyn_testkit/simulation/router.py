"""What a simulation needs of a router, and how to run this project's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import trio

from dyn_relay.net import Network
from dyn_testkit.relay import Relay, open_relay


class Router(Protocol):
    """A running router."""

    @property
    def url(self) -> str:
        """Where clients reach it."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Its trace so far, a row a request that has ended."""

    @property
    def gauges(self) -> Mapping[str, float]:
        """What it holds now, by name: 0 when nothing is going on."""


class RouterFactory(Protocol):
    """Makes routers."""

    def __call__(
        self, network: Network, host: str, workers: Sequence[str], seed: int, settings: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[Router]:
        """Run one on `host` before `workers`; it is ready when the block begins, and gone when it ends."""


@asynccontextmanager
async def relay(
    network: Network, host: str, workers: Sequence[str], seed: int, settings: Mapping[str, Any]
) -> AsyncIterator[Relay]:
    """A `RouterFactory` for this project's proxy; `settings` are options of its configuration."""
    options: dict[str, Any] = {"seed": seed, "log_level": "error", **settings}
    async with open_relay(network, host, 30000, workers, wall=trio.current_time, **options) as running:
        await running.ready()
        yield running
