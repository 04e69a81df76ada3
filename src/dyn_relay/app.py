"""The application: makes the parts, puts them together, and takes them down in order."""

from __future__ import annotations

import gc
import math
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog
import trio

from dyn_relay.chosen import BUILT_IN, format_of
from dyn_relay.config import Config
from dyn_relay.control.endpoints import Endpoints
from dyn_relay.control.routes import Door
from dyn_relay.control.siblings import Siblings
from dyn_relay.control.told import learn
from dyn_relay.control.totals import Pages
from dyn_relay.direct.gateways import Gateways
from dyn_relay.fleet.discovery import catalog as discovery
from dyn_relay.fleet.discovery.discovery import Discovery
from dyn_relay.fleet.discovery.leased import Leased
from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.worker import State
from dyn_relay.http11.client import Pool
from dyn_relay.http11.server import Limits, serve
from dyn_relay.net import Listener, Network
from dyn_relay.observe import log as logs
from dyn_relay.observe.metrics import Metrics, WorkerSample, watch_loop_lag
from dyn_relay.observe.trace import TraceFile
from dyn_relay.relay.chores import Chores
from dyn_relay.relay.context import Context
from dyn_relay.relay.departures import Departures
from dyn_relay.relay.fallback import Fallback
from dyn_relay.relay.live import LiveRequests
from dyn_relay.relay.orders import ORDER_TIMEOUT, LastOrders
from dyn_relay.relay.queue import Queue
from dyn_relay.relay.rooms import Rooms
from dyn_relay.relay.service import Relay
from dyn_relay.relay.turnstile import Turnstile
from dyn_relay.sockets import open_network

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("app")

#: Seconds that workers get at the start to say what they are for.
ROLES_TOLD = 5.0
#: `gc.set_threshold`: objects made and not freed before the youngest are looked through, and how often that happens
#: before older ones are.
GARBAGE = (20_000, 20, 10)


class App:
    """One proxy on one network. `draining` makes `serve` refuse new connections, and return once all is answered."""

    def __init__(
        self,
        config: Config,
        network: Network,
        wall: Callable[[], float] = time.time,
        siblings: Siblings | None = None,
        *,
        names: random.Random | None = None,
    ) -> None:
        """`siblings`: the other processes, if it is one of several.

        `names`: draws rids and rooms. None: the system's own chance, whatever the seed is: two proxies that have the
        same one must not give their workers the same names.
        """
        names = names or random.SystemRandom()
        self.config = config
        self._siblings = siblings
        self._pages = Pages(siblings.directory, siblings.number, siblings.count) if siblings else None
        self.draining = trio.Event()
        self.metrics = Metrics()
        self.metrics.watch_log(logs.dropped)
        self._network = network
        self._wall = wall
        rng = random.Random(config.seed)
        self._rng = rng
        self._format = format_of(config)
        self._gateways = Gateways(
            network, connect_timeout=config.connect_timeout_secs, http_fallback=config.http_fallback
        )
        self._pool = Pool(
            network,
            idle_secs=config.upstream_pool_idle_timeout_secs,
            connect_timeout=config.connect_timeout_secs,
            grpc=self._gateways.dial,
        )
        self.fleet = Fleet(
            config,
            self._format,
            self._pool,
            rng=rng,
            on_poison=lambda event: self.metrics.poison_total(event).inc(),
            on_move=self._moved,
            on_leave=self._gateways.forget,
        )
        self._permits = Turnstile(self._retry_limit)
        self.metrics.watch_fleet(self._samples)
        self.metrics.watch_policies({role.value: policy for role, policy in self.fleet.policies.items()})
        self._leased = Leased()
        self.discovery = Discovery(self.fleet, [*discovery.sources(config), self._leased])
        self.metrics.watch_discovery(self.discovery.samples)
        self.live = LiveRequests(names, alone=config.processes == 1)
        self._queue = Queue(config, self.metrics)
        self.rooms = Rooms(names)
        self.metrics.retry_queue_depth.set_function(lambda: self._permits.waiting)

    async def serve(
        self,
        listener: Listener,
        trace: TraceFile | None = None,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve on `listener` until `draining` is set and the last request has ended; then both are closed."""
        config, siblings = self.config, self._siblings
        async with trio.open_nursery() as background:
            await background.start(self._gateways.run)
            await background.start(self.fleet.run)
            try:
                async with trio.open_nursery() as chores:
                    relay = Relay(self._context(trace, chores))
                    departures = Departures(self.fleet, self.live, self._permits, Chores(background))
                    parts = self.fleet, self.discovery, self._leased, relay, self.metrics, self.draining, departures
                    door = Door(config, Endpoints(*parts, self._pages, siblings), relay, siblings)
                    if siblings is not None:
                        background.start_soon(_answer_siblings, await siblings.listen(), door)
                        if siblings.replacement and (told := await siblings.told()) is not None:
                            learn(told, self.fleet, self.discovery, self._leased)
                    await background.start(self.discovery.run)
                    if config.pd_disaggregation and not (siblings is not None and siblings.replacement):
                        await self._check_roles()
                    door.settled.set()
                    task_status.started()
                    await serve(
                        listener, door, self._limits(), draining=self.draining, on_error=partial(_report, config.format)
                    )
                    # The last requests may have left workers that still have to be told.
                    chores.cancel_scope.deadline = trio.current_time() + ORDER_TIMEOUT
            finally:
                listener.close()
                self._pool.close()
                if siblings is not None:
                    siblings.close()
            background.cancel_scope.cancel()

    async def _check_roles(self) -> None:
        """Do the workers that answer soon say what they were named for? Raises `Misplaced`."""
        with trio.move_on_after(ROLES_TOLD):  # who is deaf must not hold up the others
            await self.fleet.relearn(self.fleet.workers)
        wrong = [one for one in self.fleet.workers if one.misplaced]
        if wrong:
            words = (f"{one.url} was named as {one.role}, and says that it is {one.traits.role}" for one in wrong)
            raise Misplaced("; ".join(words))

    def drain(self) -> None:
        """Accept nothing new. A pause is over: nobody could end it any more, and paused workers hold what they get."""
        self.draining.set()
        self.fleet.pause(False)

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
            last_orders=LastOrders(),
            queue=self._queue,
            permits=self._permits,
            rooms=self.rooms,
            fallback=Fallback(),
        )

    def _moved(self, before: State, after: State) -> None:
        """A worker has another state."""
        self.metrics.worker_transitions_total(before, after).inc()
        self._permits.look()

    def _retry_limit(self) -> float:
        """Continuations that may wait for their first token at a time."""
        return self.config.retry_permits * max(1, self.fleet.ready) or math.inf

    def _limits(self) -> Limits:
        return Limits(max_body=self.config.max_payload_size, idle_timeout=self.config.keep_alive_timeout_secs)

    def _samples(self) -> list[WorkerSample]:
        return [(worker.id, worker.role.value, worker.shown, worker.in_flight) for worker in self.fleet.workers]


async def _answer_siblings(listener: Listener, door: Door) -> None:
    """Until the end: also what drains has metrics, and requests that can be aborted."""
    try:
        await serve(listener, door.inner, Limits(), draining=trio.Event(), on_error=partial(_report, BUILT_IN))
    finally:
        listener.close()


def _report(format: str, exc: Exception) -> None:
    whose = "" if format == BUILT_IN else f", or of the format {format}"
    log.error(f"a request failed because of a defect of the proxy{whose}", exc_info=exc)


class Misplaced(Exception):
    """A worker was named for another role than it says it has."""


class Orders(Protocol):
    """When to stop."""

    async def drain(self) -> None:
        """Return when nothing new is to be accepted; live requests go on for the grace period."""

    async def end(self) -> None:
        """Return when these, too, are to end."""


class SignalOrders:
    """The first signal drains, the second ends."""

    def __init__(self, signals: AsyncIterator[int]) -> None:
        self._signals = signals

    async def drain(self) -> None:
        """A first signal."""
        await anext(self._signals)

    async def end(self) -> None:
        """A second one."""
        await anext(self._signals)


@dataclass(frozen=True, slots=True)
class Seat:
    """What one of several processes of a proxy is given by their supervisor."""

    number: int
    #: For the private sockets and pages of all.
    directory: Path
    #: It takes the place of one that has died.
    replacement: bool
    orders: Orders
    #: Called once it serves.
    listening: Callable[[], object]


def _leave_garbage() -> None:
    """Let the collector of garbage come seldom: a request that ends well leaves nothing that refers to itself.

    By CPython's defaults it looks through the young objects of all live requests about twice a request, and takes a
    tenth of the time of short ones (measured with `perf`, 64 at a time).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE)


async def run(config: Config, seat: Seat | None = None) -> int:
    """Serve on real sockets until told to stop: by SIGTERM or SIGINT, or from its `seat`. Returns the exit code."""
    logs.setup(config.log_level, config.log_json, process=seat.number if seat else None)
    _leave_garbage()
    async with open_network() as network:
        option = f"trace_file {config.trace_file}"
        try:
            with TraceFile(config.trace_file) if config.trace_file else nullcontext() as trace:
                option = f"host {config.host}, port {config.port}"
                listener = await network.listen(config.host, config.port, shared=seat is not None)
                if seat is None:
                    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                        told = SignalOrders(signals)
                        where = f"listening on {location(listener.host, listener.port)}"
                        app = App(config, network)
                        return await _serve_until_told(app, listener, trace, told, lambda: logs.say(where))
                others = Siblings(
                    network.unix(seat.directory),
                    seat.number,
                    config.processes,
                    seat.directory,
                    replacement=seat.replacement,
                )
                app = App(config, network, siblings=others)
                return await _serve_until_told(app, listener, trace, seat.orders, seat.listening)
        except (OSError, UnicodeError) as exc:  # the latter: a host name that cannot be encoded
            log.error("cannot start", option=option, error=str(exc))
            return 1
        except ExceptionGroup as group:
            misplaced, rest = group.split(Misplaced)
            if misplaced is None or rest is not None:
                raise
            log.error("cannot start", option="prefill, decode", error=str(_first(misplaced)))
            return 1


def _first(exc: BaseException) -> BaseException:
    return _first(exc.exceptions[0]) if isinstance(exc, BaseExceptionGroup) else exc


def location(host: str, port: int) -> str:
    """The URL of an address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _serve_until_told(
    app: App,
    listener: Listener,
    trace: TraceFile | None,
    orders: Orders,
    listening: Callable[[], object] = lambda: None,
) -> int:
    async with trio.open_nursery() as nursery:

        async def obey() -> None:
            await orders.drain()
            grace = app.config.shutdown_grace_period_secs
            log.info("draining", live=len(app.live), grace=grace)
            app.drain()
            with trio.move_on_after(grace):
                await orders.end()
            log.warning("ending live requests", live=len(app.live))
            nursery.cancel_scope.cancel()

        nursery.start_soon(obey)
        nursery.start_soon(watch_loop_lag, app.metrics)
        async with trio.open_nursery() as serving:
            await serving.start(app.serve, listener, trace)
            if not app.draining.is_set():  # it was told to stop while it started
                listening()
        nursery.cancel_scope.cancel()
        return 0
    return 1
