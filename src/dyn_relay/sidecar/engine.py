"""The engine behind the sidecar: is it there, is it well, and what does it say of itself?

It is a fleet of one: asked and judged as the proxy asks and judges its workers (`fleet/health.py`). Its death is seen
sooner than any probe could: a connection to it stands open, and when that ends, nobody may be listening there any more.
Silence is no death: an engine that hangs is the proxies' to judge, by what their streams and probes show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
import trio

from dyn_relay.chosen import format_of
from dyn_relay.config import Config
from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.worker import Role, State, Worker
from dyn_relay.formats.traits import Traits
from dyn_relay.http11.client import Pool
from dyn_relay.net import ConnectFailed, Network
from dyn_relay.sidecar.settings import Settings

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("engine")

#: Seconds between two of those connections, should an engine end each at once.
BETWEEN = 0.2
#: Seconds after which an engine that is waited for is told of again.
STILL = 60.0
#: States of one that is there; in all others nobody listens, or it has not been well yet.
_ABSENT = (State.STARTING, State.DEAD)


class Engine:
    """Made for one sidecar; `run` watches."""

    def __init__(self, settings: Settings, network: Network, pool: Pool) -> None:
        origin = settings.origin
        config = Config(
            worker_api_key=settings.engine_api_key,
            health_check_endpoint=settings.health_check_endpoint,
            health_check_interval_secs=settings.health_check_interval_secs,
            health_success_threshold=1,
            connect_timeout_secs=settings.connect_timeout_secs,
        )
        self._network = network
        #: Each is a server of the engine's: if one is gone, the engine is.
        self._servers = {(one.host, one.port) for one in (origin, settings.grpc) if one is not None}
        self._fleet = Fleet(config, format_of(config), pool)
        self._worker: Worker = self._fleet.add(str(origin))
        self._worker.may_be = frozenset(Role)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ask until cancelled."""
        await self._fleet.run(task_status)

    @property
    def traits(self) -> Traits:
        """What it says of itself."""
        return self._worker.traits

    @property
    def described(self) -> Mapping[str, Any]:
        """For people."""
        worker = self._worker
        return {"url": worker.url, "state": worker.state.value, "cause": worker.cause, "part": worker.part.value}

    async def up(self) -> None:
        """Return once it is well, and its infos were asked for."""
        began, told = trio.current_time(), False
        while not self._worker.healthy:
            with trio.move_on_after(STILL if told else 0):
                await self._fleet.changed()
                continue
            told = True
            waited = round(trio.current_time() - began)
            log.info("waiting for the engine", url=self._worker.url, seconds=waited, cause=self._worker.cause)

    async def gone(self) -> str:
        """Return once its process is no longer there, or is another one: why, for people."""
        why: list[str] = []

        async def judged() -> None:
            while self._worker.state not in _ABSENT:
                await self._fleet.changed()
            why.append(self._worker.cause)
            nursery.cancel_scope.cancel()

        async def dialled(host: str, port: int) -> None:
            why.append(await self._refused(host, port))
            self._fleet.restarted(self._worker, why[0])
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(judged)
            for server in self._servers:
                nursery.start_soon(dialled, *server)
        return why[0]

    async def _refused(self, host: str, port: int) -> str:
        """Return once no connection can be made there. One that hangs is silence."""
        first = True
        while True:
            try:
                connection = await self._network.connect(host, port)
            except ConnectFailed as exc:
                return str(exc)
            try:
                if not first:
                    # A new process may listen already: what it says of itself tells it from the old one.
                    await self._fleet.relearn([self._worker])
                    await trio.sleep(BETWEEN)
                await connection.wait_closed()
            finally:
                connection.close()
            first = False
