"""The sidecar: waits for its engine, shows it while it is there, and takes it back before it ends.

Its port is open exactly while the engine is there. So a dial tells what a dial at the engine would tell: nobody listens
where the engine is dead, and a request that was never sent goes elsewhere at no cost. What was being served when the
engine died is broken off, never ended well.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import structlog
import trio

from dyn_relay.app import location
from dyn_relay.direct.gateways import Gateways
from dyn_relay.http11.client import Origin, Pool
from dyn_relay.http11.server import Handler, Limits, serve
from dyn_relay.net import Listener, Network
from dyn_relay.observe.trace import TraceFile
from dyn_relay.sidecar.bridge import Bridge
from dyn_relay.sidecar.door import Door, Reservations
from dyn_relay.sidecar.engine import Engine
from dyn_relay.sidecar.paths import GENERATION, SGLANG
from dyn_relay.sidecar.registration import Away, Here, Registration
from dyn_relay.sidecar.settings import Settings
from dyn_relay.sidecar.tap import Tap

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("sidecar")

T = TypeVar("T")

#: Seconds after the engine's death in which what its connections still hold is delivered; then they are cut.
LAST_BYTES = 0.5
#: Seconds before the end of the grace period in which proxies are to take what still runs elsewhere.
MOVING = 30.0
#: Seconds until a port that is in use is tried again.
PORT_AGAIN = 1.0


class Sidecar:
    """One sidecar on one network. `drain` ends it: `run` returns once everything is withdrawn, and answered."""

    def __init__(self, settings: Settings, network: Network, requests: TraceFile | None = None) -> None:
        """`requests`: where those for the engine are written down."""
        self.settings = settings
        self.reservations = Reservations()
        #: Where it listens, and under which URL proxies know that; as soon as it has a port.
        self.port = settings.address[1]
        #: That port has been open: proxies may know its URL, so it is kept.
        self._shown = False
        #: Somebody can be served.
        self.open = trio.Event()
        self._network = network
        self._gateways = Gateways(
            network,
            connect_timeout=settings.connect_timeout_secs,
            http_fallback=settings.engine is not None and settings.origin,
        )
        self._pool = Pool(network, connect_timeout=settings.connect_timeout_secs, grpc=self._gateways.dial)
        self.engine = Engine(settings, network, self._pool)
        instance = secrets.token_hex(8)
        self.registrations = [
            Registration(self._pool, Origin.parse(relay), settings.lease_secs, settings.relay_api_key, instance)
            for relay in settings.relay
        ]
        self._draining = trio.Event()
        backends: dict[frozenset[str], Handler] = {SGLANG: Bridge(network, self._pool, settings.origin)}
        if settings.grpc is not None and settings.engine is not None:
            backends = {GENERATION: Bridge(network, self._pool, settings.grpc), **backends}
        if requests is not None:
            backends = {paths: Tap(handler, requests, time.time) for paths, handler in backends.items()}
        self._door = Door(backends, self.reservations, self.describe, generates=settings.enable_generate)

    @property
    def url(self) -> str:
        """Where proxies reach it."""
        return self.settings.advertise or location(self.settings.address[0], self.port)

    def describe(self) -> Mapping[str, Any]:
        """What `GET /sidecar` says."""
        return {
            "url": self.url,
            "engine": self.engine.described,
            "traits": asdict(self.engine.traits),
            "relays": [{"url": str(one.relay), "state": one.state} for one in self.registrations],
            "in_flight": self.reservations.held,
            "draining": self._draining.is_set(),
        }

    def drain(self) -> None:
        """Withdraw, serve what is live to its end, and return from `run`."""
        self._draining.set()

    async def find_port(self) -> None:
        """Before `run`: can it listen where it is to? Raises `OSError`."""
        listener = await self._network.listen(self.settings.address[0], self.port)
        self.port = listener.port
        listener.close()  # nobody is there yet

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until drained."""
        try:
            async with trio.open_nursery() as background:
                await background.start(self._gateways.run)
                await background.start(self.engine.run)
                for one in self.registrations:
                    background.start_soon(one.run)
                task_status.started()
                while not self._draining.is_set():
                    await self._unless_told(self.engine.up)
                    if not self._draining.is_set():
                        await self._live()
                await self._withdrawn()
                background.cancel_scope.cancel()
        finally:
            self._pool.close()

    async def _unless_told(self, wait: Callable[[], Awaitable[T]]) -> T | None:
        """What `wait()` gives; None if the order to end comes first."""
        results: list[T] = []
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                results.append(await wait())
                nursery.cancel_scope.cancel()

            nursery.start_soon(run)
            await self._draining.wait()
            nursery.cancel_scope.cancel()
        return results[0] if results else None

    async def _live(self) -> None:
        """One life of the engine, or what is left of it when the order to end comes."""
        listener = await self._unless_told(self._listen)
        if listener is None:
            return
        role = self.settings.worker_type or self.engine.traits.role
        log.info("the engine is there", url=self.url, **_told(asdict(self.engine.traits)))
        closing = trio.Event()
        try:
            async with trio.open_nursery() as life:
                life.start_soon(self._end_with_engine, closing, life.cancel_scope)
                life.start_soon(self._end_when_told, closing)
                for one in self.registrations:
                    one.tell(Here(self.url, role))
                self.open.set()
                await serve(listener, self._door, self._limits(), draining=closing, on_error=_report)
                life.cancel_scope.cancel()
        finally:
            listener.close()

    async def _listen(self) -> Listener:
        told = False
        while True:
            try:
                listener = await self._network.listen(self.settings.address[0], self.port)
                self.port, self._shown = listener.port, True
                return listener
            except OSError as exc:
                if not self._shown:  # nobody has been told of that port
                    self.port = self.settings.address[1]
                if not told:
                    log.error("cannot listen any more; it is tried again", port=self.port, error=str(exc))
                told = True
                await trio.sleep(PORT_AGAIN)

    async def _end_with_engine(self, closing: trio.Event, life: trio.CancelScope) -> None:
        why = await self.engine.gone()
        log.error("the engine is gone", cause=why, live=self.reservations.held)
        self.open = trio.Event()
        for one in self.registrations:
            one.tell(Away(self.url))
        closing.set()
        await trio.sleep(LAST_BYTES)
        life.cancel()

    async def _end_when_told(self, closing: trio.Event) -> None:
        await self._draining.wait()
        grace = self.settings.shutdown_grace_period_secs
        log.info("withdrawing", live=self.reservations.held, grace=grace)
        for one in self.registrations:
            one.tell(Away(self.url, max(grace - MOVING, grace / 2)))
        await self._withdrawn()
        log.info("draining", live=self.reservations.held)
        closing.set()

    async def _withdrawn(self) -> None:
        """Return once all proxies have taken it, or have dropped the lease by themselves."""
        for one in self.registrations:
            with trio.move_on_at(one.ends):
                await one.heard()

    def _limits(self) -> Limits:
        settings = self.settings
        return Limits(max_body=settings.max_payload_size, idle_timeout=settings.keep_alive_timeout_secs)


def _told(traits: Mapping[str, Any]) -> dict[str, Any]:
    """What there is to say."""
    return {name: value for name, value in traits.items() if value is not None}


def _report(exc: Exception) -> None:
    log.error("a request failed because of a defect of the sidecar", exc_info=exc)
