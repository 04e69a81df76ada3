"""A real `dyn-sidecar` in this process, on any network: what stands between a proxy and a mock worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import trio

from dyn_relay.net import Network
from dyn_relay.sidecar.settings import Settings
from dyn_relay.sidecar.sidecar import Sidecar
from dyn_testkit.background import background
from dyn_testkit.client import Response, fetch


class SidecarHost:
    """Where a sidecar runs: it can be killed there, and started again. Made by `open_sidecar`."""

    def __init__(self, network: Network, settings: Settings) -> None:
        self._network = network
        self._settings = settings
        #: The one that runs, or ran last.
        self.sidecar = Sidecar(settings, network)
        self._life = trio.CancelScope()
        self._revived = trio.Event()
        #: It has ended by itself: drained.
        self.ended = trio.Event()

    @property
    def url(self) -> str:
        """Where it is reached."""
        return self.sidecar.url

    @property
    def alive(self) -> bool:
        """It was not killed, and has not ended."""
        return not (self._life.cancel_called or self.ended.is_set())

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """All its lives, until it ends by itself. Raises `OSError` if it cannot listen."""
        await self.sidecar.find_port()
        task_status.started()
        while True:
            with trio.CancelScope() as self._life:
                await self.sidecar.run()
                self.ended.set()
                return
            await self._revived.wait()

    def kill(self) -> None:
        """As by SIGKILL: its connections end, nobody is told."""
        self._revived = trio.Event()
        self._life.cancel()

    def restart(self) -> None:
        """After `kill`: a new one, on the same port."""
        port = self.sidecar.port
        self.sidecar = Sidecar(self._settings, self._network)
        self.sidecar.port = port
        self._revived.set()

    async def ask(self, body: Any, path: str = "/generate", **kwargs: Any) -> Response:
        """One request straight to it; more arguments are those of `client.fetch`."""
        return await fetch(self._network, self.url, path, body, **kwargs)


@asynccontextmanager
async def open_sidecar(
    network: Network, engine: str | None = None, relays: Iterable[str] = (), listen: str = "127.0.0.1:0", **options: Any
) -> AsyncIterator[SidecarHost]:
    """Run a sidecar as long as the block does; `options` are those of `dyn_relay.sidecar.settings`.

    Raises `OSError` if it cannot listen.
    """
    host = SidecarHost(network, Settings(engine=engine, relay=tuple(relays), listen=listen, **options))
    async with background() as nursery:
        await nursery.start(host.run)
        yield host
