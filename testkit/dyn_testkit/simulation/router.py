"""What a simulation needs of a router, and how to run this project's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import trio

from dyn_relay.app import App
from dyn_relay.config import Config
from dyn_relay.net import Network
from dyn_relay.observe import log as logs


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


class _Rows(list[Mapping[str, Any]]):
    """Stands for a trace file."""

    write = list.append


class Relay:
    """`dyn-relay` in this process."""

    def __init__(self, app: App, url: str, rows: _Rows) -> None:
        self.url = url
        self.rows = rows
        self._app = app

    @property
    def gauges(self) -> dict[str, float]:
        """Whatever counts things in flight: the metrics' gauges, the leases of each worker, live names."""
        fleet = self._app.fleet
        found: dict[str, float] = {f"leases of {worker.id}": worker.in_flight for worker in fleet.workers}
        found["live names in_flight"] = len(self._app.live)
        for line in self._app.metrics.render().decode().splitlines():
            name, _, value = line.rpartition(" ")
            if "in_flight" in name and not name.startswith("#"):
                found[name] = float(value)
        return found

    @property
    def ready(self) -> bool:
        """All its workers are."""
        return all(worker.state == "ready" for worker in self._app.fleet.workers)


@asynccontextmanager
async def relay(
    network: Network, host: str, workers: Sequence[str], seed: int, settings: Mapping[str, Any]
) -> AsyncIterator[Relay]:
    """A `RouterFactory` for this project's proxy; `settings` are options of its configuration."""
    logs.setup("critical")
    config: dict[str, Any] = {"log_level": "error", **settings, "worker_urls": tuple(workers)}
    app = App(Config(host=host, port=30000, seed=seed, **config), network, wall=trio.current_time)
    listener = await network.listen(host, 30000)
    rows = _Rows()
    async with trio.open_nursery() as nursery:
        await nursery.start(app.serve, listener, rows)
        running = Relay(app, f"http://{host}:{listener.port}", rows)
        while not running.ready:  # noqa: ASYNC110 - virtual time; what is waited for has no event of its own
            await trio.sleep(0.01)
        yield running
        nursery.cancel_scope.cancel()
