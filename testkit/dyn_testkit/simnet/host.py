"""The network as one of its hosts sees it."""

from __future__ import annotations

import errno
import os
import ssl
from typing import TYPE_CHECKING

from dyn_relay.net import Connection, Ended, Listener, Sink, Transform, relay_loop

if TYPE_CHECKING:
    from dyn_testkit.simnet.network import SimNetwork


class SimHost:
    """A `Network` whose dials come from one host. Made by `SimNetwork.host`."""

    def __init__(self, network: SimNetwork, name: str) -> None:
        self.name = name
        self._network = network

    async def connect(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> Connection:
        return await self._network.dial(self.name, (host, port))

    async def listen(self, host: str, port: int) -> Listener:
        """`host` must be the name of this one."""
        if host != self.name:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        return await self._network.listen(host, port)

    async def relay(self, source: Connection, sink: Sink, transform: Transform) -> Ended:
        return await relay_loop(source, sink, transform)
