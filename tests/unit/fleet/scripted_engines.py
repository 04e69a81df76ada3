"""Scripted engines in place of `http11.client.fetch`, and a fleet made of them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import trio
import trio.testing

from dyn_relay.config import Config
from dyn_relay.fleet.poison import NotYet, SuspectedPoison
from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.target import Lease
from dyn_relay.fleet.worker import Worker
from dyn_relay.formats.base import Format, Headers
from dyn_relay.formats.traits import Traits
from dyn_relay.http11.client import Origin, Pool, Response
from dyn_relay.net import ConnectFailed


@dataclass
class Engine:
    """How one engine answers; change it while the test runs."""

    status: int = 200
    listening: bool = True
    #: Seconds until its health endpoint answers.
    delay: float = 0.0
    infos: dict[str, bytes] = field(default_factory=lambda: {"/model_info": b"v1"})
    info_status: int = 404
    #: Seconds until an info endpoint answers.
    info_delay: float = 0.0


@dataclass
class Call:
    url: str
    path: str
    headers: Headers
    at: float


class Engines:
    """The world outside: engines by URL; whoever is not here does not listen."""

    def __init__(self, *urls: str) -> None:
        self.by_url = {url: Engine() for url in urls}
        self.calls: list[Call] = []
        self.probing: dict[str, int] = {}
        self.most_probes_at_once = 0

    def __getitem__(self, url: str) -> Engine:
        return self.by_url[url]

    def probes(self, url: str) -> list[Call]:
        return [call for call in self.calls if call.url == url and call.path == "/health"]

    def infos(self, url: str) -> list[Call]:
        return [call for call in self.calls if call.url == url and call.path != "/health"]

    async def fetch(
        self, pool: Pool, origin: Origin, method: str, path: str, *, headers: Headers, timeout: float
    ) -> Response:
        url = str(origin)
        assert method == "GET"
        self.calls.append(Call(url, path, headers, trio.current_time()))
        engine = self.by_url.get(url)
        await trio.lowlevel.checkpoint()
        if engine is None or not engine.listening:
            raise ConnectFailed(f"{url}: Connection refused")
        if path != "/health":
            with trio.fail_after(timeout):
                await trio.sleep(engine.info_delay)
            if path in engine.infos:
                return Response(200, [], engine.infos[path])
            return Response(engine.info_status, [], b"")
        self.probing[url] = self.probing.get(url, 0) + 1
        self.most_probes_at_once = max(self.most_probes_at_once, self.probing[url])
        try:
            with trio.fail_after(timeout):
                await trio.sleep(engine.delay)
        finally:
            self.probing[url] -= 1
        return Response(engine.status, [], b"")


class InfoFormat:
    """Traits are the texts of the two."""

    info_paths = ("/model_info", "/server_info")

    def traits(self, infos: dict[str, bytes]) -> Traits:
        if infos.get("/model_info") == b"nonsense":
            raise ValueError("nonsense")
        texts = {path: body.decode() for path, body in infos.items()}
        return Traits(weight_version=texts.get("/model_info"), epoch=texts.get("/server_info"))


def clock() -> float:
    """Trio's, or a standing one in tests that are not async."""
    return trio.current_time() if trio.lowlevel.in_trio_run() else 0.0


def make_fleet(engines: Engines | None = None, urls: tuple[str, ...] = (), **options: object) -> Fleet:
    """A fleet of the engines (or of `urls`), not running yet."""
    engines = engines or Engines()
    config = Config(**options)  # type: ignore[arg-type]
    fleet = Fleet(
        config, cast(Format, InfoFormat()), cast(Pool, None), clock=clock, rng=random.Random(1), fetch=engines.fetch
    )
    for url in urls or tuple(engines.by_url):
        fleet.add(url)
    return fleet


@asynccontextmanager
async def running(engines: Engines, **options: object) -> AsyncIterator[Fleet]:
    """A fleet whose probes run; all engines that listen are ready."""
    async with trio.open_nursery() as nursery:
        fleet = make_fleet(engines, **options)
        await nursery.start(fleet.run)
        await trio.testing.wait_all_tasks_blocked()
        yield fleet
        nursery.cancel_scope.cancel()


def ready(fleet: Fleet) -> list[Worker]:
    """All workers, made ready without probing."""
    for worker in fleet.workers:
        fleet.report(worker, True)
    return list(fleet.workers)


def picked(fleet: Fleet, *args) -> Worker | None:
    """The worker of the target that is picked."""
    target = fleet.pick(*args)
    return target and target.worker


def claim(fleet: Fleet, worker: Worker) -> Lease:
    """A lease on the worker's first target."""
    return fleet.lease(worker.targets[0])


async def choose(fleet: Fleet, fingerprint: bytes, exclude: Collection[str] = frozenset(), *, proven: bool = False):
    """As the relay chooses: waits while it is told to. Raises `SuspectedPoison`."""
    while True:
        try:
            target = fleet.choose_now(fingerprint, exclude, proven=proven)
            return target and target.worker
        except NotYet:
            await fleet.changed()


def convicted(fleet: Fleet, fingerprint: bytes) -> bool:
    """Is such a request refused?"""
    try:
        fleet.choose_now(fingerprint)
    except SuspectedPoison:
        return True
    except NotYet:
        pass
    return False
