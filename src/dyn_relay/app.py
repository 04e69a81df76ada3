"""The application: makes the parts, puts them together, and takes them down in order."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext

import structlog
import trio

from dyn_relay.config import Config
from dyn_relay.control.endpoints import Endpoints
from dyn_relay.control.routes import Door
from dyn_relay.fleet.registry import Fleet
from dyn_relay.formats import catalog
from dyn_relay.http11.client import Pool
from dyn_relay.http11.server import Limits, serve
from dyn_relay.net import Listener, Network
from dyn_relay.observe import log as logs
from dyn_relay.observe.metrics import Metrics, WorkerSample, watch_loop_lag
from dyn_relay.observe.trace import TraceFile
from dyn_relay.relay.chores import Chores
from dyn_relay.relay.context import Context
from dyn_relay.relay.live import LiveRequests
from dyn_relay.relay.orders import ORDER_TIMEOUT
from dyn_relay.relay.service import Relay
from dyn_relay.sockets import open_network

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("app")


class App:
    """One proxy on one network. `draining` makes `serve` refuse new connections, and return once all is answered."""

    def __init__(self, config: Config, network: Network, wall: Callable[[], float] = time.time) -> None:
        self.config = config
        self.draining = trio.Event()
        self.metrics = Metrics()
        self._network = network
        self._wall = wall
        rng = random.Random(config.seed)
        self._rng = rng
        self._format = catalog.make(
            config.format,
            config.on_abort,
            config.weight_version_policy,
            tell_recomputed_rows=config.tell_recomputed_rows,
        )
        self._pool = Pool(
            network,
            idle_secs=config.upstream_pool_idle_timeout_secs,
            connect_timeout=config.connect_timeout_secs,
        )
        self.fleet = Fleet(
            config,
            self._format,
            self._pool,
            rng=rng,
            on_poison=lambda event: self.metrics.poison_total(event).inc(),
        )
        self.metrics.watch_fleet(self._samples)
        self.metrics.watch_policy(self.fleet.policy)
        self.live = LiveRequests(rng)

    async def serve(
        self,
        listener: Listener,
        trace: TraceFile | None = None,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve on `listener` until `draining` is set and the last request has ended; then both are closed."""
        config = self.config
        for url in config.worker_urls:
            self.fleet.add(url)
        async with trio.open_nursery() as background:
            await background.start(self.fleet.run)
            try:
                async with trio.open_nursery() as chores:
                    relay = Relay(self._context(trace, chores))
                    door = Door(config, Endpoints(self.fleet, relay, self.metrics, self.draining), relay)
                    task_status.started()
                    await serve(listener, door, self._limits(), draining=self.draining, on_error=_report)
                    # The last requests may have left workers that still have to be told.
                    chores.cancel_scope.deadline = trio.current_time() + ORDER_TIMEOUT
            finally:
                listener.close()
                self._pool.close()
            background.cancel_scope.cancel()

    def _context(self, trace: TraceFile | None, chores: trio.Nursery) -> Context:
        return Context(
            config=self.config,
            network=self._network,
            pool=self._pool,
            fleet=self.fleet,
            format=self._format,
            live=self.live,
            metrics=self.metrics,
            trace=trace,
            rng=self._rng,
            wall=self._wall,
            chores=Chores(chores),
        )

    def _limits(self) -> Limits:
        return Limits(max_body=self.config.max_payload_size, idle_timeout=self.config.keep_alive_timeout_secs)

    def _samples(self) -> list[WorkerSample]:
        return [(worker.id, worker.state.value, worker.in_flight) for worker in self.fleet.workers]


def _report(exc: Exception) -> None:
    log.error("a request failed because of a defect of the proxy", exc_info=exc)


async def run(config: Config) -> int:
    """Serve on real sockets until SIGTERM or SIGINT; returns the exit code.

    The first signal drains: nothing new is accepted, live requests go on for the grace period. The second ends them.
    """
    logs.setup(config.log_level, config.log_json)
    async with open_network() as network:
        option = f"trace_file {config.trace_file}"
        try:
            with TraceFile(config.trace_file) if config.trace_file else nullcontext() as trace:
                option = f"host {config.host}, port {config.port}"
                listener = await network.listen(config.host, config.port)
                host = f"[{listener.host}]" if ":" in listener.host else listener.host
                print(f"listening on http://{host}:{listener.port}", flush=True)
                return await _serve_until_told(App(config, network), listener, trace)
        except OSError as exc:
            log.error("cannot start", option=option, error=str(exc))
            return 1


async def _serve_until_told(app: App, listener: Listener, trace: TraceFile | None) -> int:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def obey() -> None:
                await anext(signals)
                grace = app.config.shutdown_grace_period_secs
                log.info("draining", live=len(app.live), grace=grace)
                app.draining.set()
                with trio.move_on_after(grace):
                    await anext(signals)
                log.warning("ending live requests", live=len(app.live))
                nursery.cancel_scope.cancel()

            nursery.start_soon(obey)
            nursery.start_soon(watch_loop_lag, app.metrics)
            await app.serve(listener, trace)
            nursery.cancel_scope.cancel()
            return 0
    return 1
