"""A sidecar as a process: real sockets, signals, an exit code."""

from __future__ import annotations

import signal
from contextlib import nullcontext

import structlog
import trio

from dyn_relay.app import Orders, SignalOrders, location
from dyn_relay.observe import log as logs
from dyn_relay.observe.trace import TraceFile
from dyn_relay.sidecar.settings import Settings
from dyn_relay.sidecar.sidecar import Sidecar
from dyn_relay.sockets import open_network

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("sidecar")


async def run(settings: Settings) -> int:
    """Until told to stop by SIGTERM or SIGINT. 0 if all live requests have ended in peace."""
    logs.setup(settings.log_level, settings.log_json)
    async with open_network() as network:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            option = f"requests_file {settings.requests_file}"
            try:
                with TraceFile(settings.requests_file) if settings.requests_file else nullcontext() as requests:
                    option = f"listen {settings.listen}"
                    sidecar = Sidecar(settings, network, requests)
                    await sidecar.find_port()
                    return await _run_until_told(sidecar, SignalOrders(signals))
            except (OSError, UnicodeError) as exc:  # the latter: a host name that cannot be encoded
                log.error("cannot start", option=option, error=str(exc))
                return 1


async def _run_until_told(sidecar: Sidecar, orders: Orders) -> int:
    cut = 0
    async with trio.open_nursery() as nursery:

        async def obey() -> None:
            nonlocal cut
            await orders.drain()
            sidecar.drain()
            with trio.move_on_after(sidecar.settings.shutdown_grace_period_secs):
                await orders.end()
            cut = sidecar.reservations.held
            log.warning("ending live requests", live=cut)
            nursery.cancel_scope.cancel()

        async def announce() -> None:
            await sidecar.open.wait()
            logs.say(f"listening on {location(sidecar.settings.address[0], sidecar.port)}")

        nursery.start_soon(obey)
        nursery.start_soon(announce)
        await sidecar.run()
        nursery.cancel_scope.cancel()
    return 1 if cut else 0
