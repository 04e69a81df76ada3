"""A whole `dyn-relay` in this process, on any network: what tests, laws and simulations put before their workers."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from dyn_relay.app import App
from dyn_relay.config import Config
from dyn_relay.net import Network
from dyn_testkit.background import background
from dyn_testkit.client import Response, fetch

#: s of trio's clock: looks are rarer after the first, and end with the second.
_SOON, _PATIENCE = 60.0, 3600.0


class Rows(list[Mapping[str, Any]]):
    """Stands for a trace file."""

    write = list.append


class Relay:
    """A running `dyn-relay`, as a test holds it."""

    def __init__(self, app: App, url: str, rows: Rows, network: Network) -> None:
        self.app = app
        #: Where clients reach it.
        self.url = url
        #: Its trace so far, a row a request that has ended.
        self.rows = rows
        #: The clients'.
        self.network = network

    async def ask(self, body: Any, path: str = "/generate", **kwargs: Any) -> Response:
        """One request through it; more arguments are those of `client.fetch`."""
        return await fetch(self.network, self.url, path, body, **kwargs)

    async def ready(self) -> None:
        """Return once every worker is ready. Raises `NotInTime`."""
        await until(
            lambda: all(worker.state == "ready" for worker in self.app.fleet.workers),
            lambda: ", ".join(f"{worker.url} is {worker.state}" for worker in self.app.fleet.workers),
        )

    async def quiet(self) -> None:
        """Return once every request, and every order to a worker, has ended. Raises `NotInTime`."""
        fleet = self.app.fleet
        await until(
            lambda: not len(self.app.live) and not any(worker.in_flight for worker in fleet.workers),
            lambda: f"still live: {', '.join(str(request.rid) for request in self.app.live) or 'orders to workers'}",
        )

    def metric(self, name: str) -> float:
        """The value of a sample of /metrics, labels included in the name; 0 if it is not there."""
        return self._samples().get(name, 0.0)

    @property
    def gauges(self) -> dict[str, float]:
        """Whatever counts things in flight, 0 when nothing is going on: metrics, leases, live names."""
        found: dict[str, float] = {f"leases of {worker.id}": worker.in_flight for worker in self.app.fleet.workers}
        found["live names in_flight"] = len(self.app.live)
        return found | {name: value for name, value in self._samples().items() if "in_flight" in name}

    def _samples(self) -> dict[str, float]:
        lines = self.app.metrics.render().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}


class NotInTime(Exception):
    """What was waited for has not come; the message says how things are."""


async def until(true: Callable[[], object], state: Callable[[], str] = lambda: "") -> None:
    """Wait for what has no event of its own. Under an autojump clock this waits for no real time.

    Raises `NotInTime` after an hour, with what `state` says: in virtual time it would be waited for, busily, for ever.
    """
    began = trio.current_time()
    while not true():
        waited = trio.current_time() - began
        if waited > _PATIENCE:
            raise NotInTime(f"waited in vain for {_PATIENCE:g} s: {state() or true}")
        await trio.sleep(0.01 if waited < _SOON else 1.0)


@asynccontextmanager
async def open_relay(
    network: Network,
    host: str = "127.0.0.1",
    port: int = 0,
    workers: Iterable[str] = (),
    *,
    clients: Network | None = None,
    wall: Callable[[], float] = time.time,
    **options: Any,
) -> AsyncIterator[Relay]:
    """Run a `dyn-relay` as long as the block does, before the workers of these URLs; they need not be ready yet.

    `clients`: the network that `Relay.ask` dials from, if it is another one; `options`: those of `dyn_relay.config`.
    With a `seed` the names that it draws are the same each time, too. Raises `OSError` if it cannot listen.
    """
    config = Config(host=host, port=port, worker_urls=tuple(workers), **options)
    app = App(config, network, wall, names=None if config.seed is None else random.Random(config.seed))
    try:
        listener = await network.listen(host, port)
    except OSError as exc:
        raise OSError(exc.errno, f"the proxy cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    rows = Rows()
    async with background() as nursery:
        await nursery.start(app.serve, listener, rows)
        yield Relay(app, f"http://{host}:{listener.port}", rows, clients or network)
