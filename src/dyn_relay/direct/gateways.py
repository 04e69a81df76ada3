"""What is dialled for `grpc://` origins: each engine's gateway, a connection away inside this process."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import structlog
import trio

from dyn_relay.direct.pipe import Pipe, pipe
from dyn_relay.http11.client import Origin, Pool
from dyn_relay.http11.server import Limits, Request, ServerConnection, serve
from dyn_relay.net import ConnectFailed, Connection, Network

if TYPE_CHECKING:
    from dyn_relay.grpc.channels import Channels

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("direct")

#: Seconds without a request after which a gateway is closed; the next dial makes another.
IDLE = 300.0
#: What is dialled here is closed by whoever has dialled it, or by the answer.
_LIMITS = Limits(max_head=1 << 20, max_body=1 << 40, idle_timeout=3600.0, body_idle_timeout=3600.0)


class _Door:
    """Implements `net.Listener`: what was dialled waits here to be served."""

    def __init__(self, name: str) -> None:
        self.host, self.port = name, 0
        self._arrive, self._arrived = trio.open_memory_channel[Connection](1 << 20)

    def dial(self) -> Pipe:
        """A new connection. Raises `ConnectFailed` once closed."""
        near, far = pipe("the relay", self.host)
        try:
            self._arrive.send_nowait(far)
        except (trio.ClosedResourceError, trio.BrokenResourceError, trio.WouldBlock):
            raise ConnectFailed(f"{self.host}: it is being left") from None
        return near

    async def accept(self) -> Connection:
        return await self._arrived.receive()

    def close(self) -> None:
        """What was dialled and is not served yet ends."""
        while True:
            try:
                connection = self._arrived.receive_nowait()
            except (trio.WouldBlock, trio.ClosedResourceError):
                break
            connection.abort()
        self._arrived.close()


class _Place:
    """One engine's."""

    def __init__(self, name: str) -> None:
        self.door = _Door(name)
        #: Requests that are being served, and when the newest was dialled.
        self.live = 0
        self.dialled = trio.current_time()
        self.leaving = trio.Event()
        self.opened = trio.Event()
        self.channels: Channels


class Gateways:
    """One gateway for each engine that was dialled, until it is forgotten. `run` them."""

    def __init__(
        self,
        network: Network,
        *,
        connect_timeout: float = 5.0,
        tls: ssl.SSLContext | None = None,
        http_fallback: bool | Origin = False,
    ) -> None:
        """`tls`: for grpcs origins; the system's certificate authorities if None.

        `http_fallback`: what gRPC cannot carry is sent to the engine's HTTP port, or where that is said to be.
        """
        self._network = network
        self._connect_timeout = connect_timeout
        self._tls = tls
        self._http = Pool(network, connect_timeout=connect_timeout) if http_fallback else None
        self._http_at = http_fallback if isinstance(http_fallback, Origin) else None
        self._places: dict[Origin, _Place] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None
                self._places.clear()
                if self._http is not None:
                    self._http.close()

    async def dial(self, origin: Origin) -> Connection:
        """A connection to the engine's gateway, if the engine can be reached. Raises `ConnectFailed`."""
        if self._nursery is None:
            raise ConnectFailed(f"{origin}: no gateways are open")
        place = self._places.get(origin)
        if place is None:
            place = self._places[origin] = _Place(str(origin))
            self._nursery.start_soon(self._keep, origin, place)
        place.dialled = trio.current_time()
        await place.opened.wait()
        await place.channels.reach()
        return place.door.dial()

    def forget(self, origin: Origin) -> None:
        """The engine has left: when its last answer has ended, its connections are closed."""
        place = self._places.pop(origin, None)
        if place is not None:
            place.leaving.set()

    @property
    def open(self) -> int:
        """Engines that have a gateway."""
        return len(self._places)

    async def _keep(self, origin: Origin, place: _Place) -> None:
        """Serve until it has left. A defect ends what runs at this one engine, which has another gateway then."""
        try:
            await self._serve(origin, place)
        except Exception as exc:
            log.error("a gateway has ended because of a defect of the proxy", engine=str(origin), exc_info=exc)
        finally:
            place.door.close()
            if self._places.get(origin) is place:
                del self._places[origin]

    async def _serve(self, origin: Origin, place: _Place) -> None:
        # Not before the first engine: they bring h2 and protobuf, 6 MB that a fleet over HTTP has no use for.
        from dyn_relay.direct.engine import Engine
        from dyn_relay.direct.gateway import Gateway
        from dyn_relay.direct.tunnel import Tunnel
        from dyn_relay.grpc.channels import open_channels

        async with open_channels(
            self._network,
            origin.host,
            origin.port,
            tls=self._context() if origin.tls else None,
            connect_timeout=self._connect_timeout,
        ) as channels:
            place.channels = channels
            place.opened.set()
            tunnel = Tunnel(self._network, self._http, self._http_at or origin.host) if self._http is not None else None
            gateway = Gateway(Engine(channels), str(origin), tunnel)

            async def answer(served: ServerConnection, request: Request) -> None:
                place.live += 1
                try:
                    await gateway(served, request)
                finally:
                    place.live -= 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._leave_idle, origin, place)
                await serve(place.door, answer, _LIMITS, draining=place.leaving, on_error=_report)
                nursery.cancel_scope.cancel()

    async def _leave_idle(self, origin: Origin, place: _Place) -> None:
        """Nobody asks it any more: one that has left may be told something afterwards, which makes a gateway again."""
        while True:
            await trio.sleep(IDLE)
            if not place.live and trio.current_time() >= place.dialled + IDLE:
                break
        if self._places.get(origin) is place:
            self.forget(origin)

    def _context(self) -> ssl.SSLContext:
        # A context of each engine's own: its ALPN is set.
        return self._tls or ssl.create_default_context()


def _report(exc: Exception) -> None:
    log.error("a request failed because of a defect of the proxy", exc_info=exc)
