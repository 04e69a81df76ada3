"""The mock worker: listens, serves connections, dies and comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from dyn_relay.net import Connection, ConnectionBroken, Listener, Network
from dyn_testkit.background import background
from dyn_testkit.client import Response, fetch
from dyn_testkit.engine import mix, mix_text
from dyn_testkit.faults import FaultPlan
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import grpc, http
from dyn_testkit.worker.bootstrap import BootstrapServer
from dyn_testkit.worker.inject import AnswerCut
from dyn_testkit.worker.jobs import Reader
from dyn_testkit.worker.kv_events import KvPublisher
from dyn_testkit.worker.kv_log import KvFaults, KvLog
from dyn_testkit.worker.legs import DecodeLeg, Phase, PrefillLeg, Rooms
from dyn_testkit.worker.manager import Manager
from dyn_testkit.worker.options import WorkerOptions
from dyn_testkit.worker.render import Renderer
from dyn_testkit.worker.scheduler import Scheduler
from dyn_testkit.worker.wire import Request


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request that the worker has read, whole."""

    request: Request
    connection: int
    #: When, in seconds of trio's clock.
    at: float

    @property
    def path(self) -> str:
        """Its path, without query."""
        return self.request.path

    def json(self) -> Any:
        """Its body, parsed. Raises `ValueError`."""
        return json.loads(self.request.body)


#: Serves one connection, the so many-th. Raises `AnswerCut`, `dyn_relay.net.ConnectionBroken`.
Side = Callable[["MockWorker", Connection, int], Awaitable[None]]


class WorkerIsDead(RuntimeError):
    """The worker is not there for what it shall do; the message says how to bring it back."""


class MockWorker:
    """A stand-in for one SGLang server, with a deterministic engine and faults on demand.

    `run` serves until cancelled; `kill` and `restart` may be called meanwhile. What it saw stays readable after death.
    """

    def __init__(
        self,
        network: Network,
        host: str = "127.0.0.1",
        port: int = 0,
        options: WorkerOptions | None = None,
        faults: FaultPlan | None = None,
    ) -> None:
        self.network = network
        self.host = host
        self.port = port
        self.options = options or WorkerOptions()
        self.faults = faults or FaultPlan()
        #: Answer of `/health`; None: it hangs.
        self.health_status: int | None = 200
        #: All requests in the order in which they were read whole; bodies of `/abort_request` in `aborts`.
        self.requests: list[Recorded] = []
        self.aborts: list[dict[str, Any]] = []
        #: As `Scheduler.made`, over all its lives.
        self.made: dict[str, list[tuple[str, int, int]]] = {}
        #: As `Scheduler.left`.
        self.left: dict[tuple[str, int | None], float] = {}
        #: Connections accepted so far; requests whose client went away before the answer was out.
        self.dialled = 0
        self.disconnects = 0
        self.deaths = 0
        #: When its present life began, in seconds of trio's clock.
        self.born = 0.0
        #: Of one leg of a pair: where its bootstrap server listens, and each (room, phase) that it came to, in order.
        self.bootstrap_port = self.options.bootstrap_port
        #: Where its gRPC side listens, the chosen one once it does; None: nowhere.
        self.grpc_port = self.options.grpc_port
        self.phases: list[tuple[int, Phase]] = []
        #: In the order in which they came: their end must not depend on where they lie in memory.
        self._connections: dict[Connection, None] = {}
        self._rids = 0
        self._ranks = 0
        self._draws = 0
        self._life: trio.CancelScope | None = None
        #: By what they are for.
        self._listeners: dict[str, Listener] = {}
        self._up = trio.Event()
        self._revived = trio.Event()
        self._changed = trio.Event()
        #: What goes wrong with its KV events, and what each rank of its present life publishes.
        self.kv_faults = KvFaults()
        self.kv_logs: list[KvLog] = []
        kv = self.options.kv_events
        self.kv_publisher = KvPublisher(host, self.options.dp_size, kv) if kv else None
        self._boot()

    def _boot(self) -> None:
        """A fresh process: nothing live, an empty cache, the weights it was started with, a seed of its own."""
        self.seed = mix(mix_text(self.port, self.host), self.deaths) >> 34  # stock draws 30 bits
        self.renderer = Renderer(self.options)
        self.model_path = self.options.model_path
        kv = self.options.kv_events
        self.kv_logs = [KvLog(rank, kv, self.kv_faults) for rank in range(self.options.dp_size)] if kv else []
        pages = [log.cache for log in self.kv_logs]
        self.scheduler = Scheduler(self.options, made=self.made, left=self.left, pages=pages)
        self._bootstrap: BootstrapServer | None = None
        rooms = Rooms(self._reach)
        if self.options.disaggregation == "prefill":
            address, wall = (lambda: (self.host, self.port)), self.renderer.wall
            self._bootstrap = BootstrapServer(self.options.dp_size, address, wall)
            self.scheduler.leg = PrefillLeg(self.options, rooms, self._bootstrap)
        elif self.options.disaggregation == "decode":
            dials = self.network.host(self.host) if isinstance(self.network, SimNetwork) else self.network
            self.scheduler.leg = DecodeLeg(self.options, rooms, dials, lambda: self.alive)
        reader = Reader(self.options, self.new_rid, self._next_rank, self._next_draw)
        #: It is being profiled.
        self.profiling = False
        #: Its scheduler makes nothing, and nobody has told it to pause.
        self.frozen = False
        #: Generations that came over gRPC.
        self.channels = grpc.Channels()
        self._doomed = trio.Event()
        self.manager = Manager(self.scheduler, reader, self.renderer)

    @classmethod
    @asynccontextmanager
    async def serve(
        cls,
        network: Network,
        host: str = "127.0.0.1",
        port: int = 0,
        options: WorkerOptions | None = None,
        faults: FaultPlan | None = None,
    ) -> AsyncIterator[MockWorker]:
        """Run a worker as long as the block does. Raises `OSError` if it cannot listen."""
        worker = cls(network, host, port, options, faults)
        async with background() as nursery:
            await nursery.start(worker.run)
            yield worker

    @property
    def url(self) -> str:
        """Its base URL; the port is the chosen one once it listens."""
        return f"http://{self.host}:{self.port}"

    @property
    def grpc_url(self) -> str:
        """The base URL of its gRPC side. Raises `ValueError` if it has none."""
        if self.grpc_port is None:
            raise ValueError("it has no gRPC side: WorkerOptions(grpc_port=0)")
        return f"grpc://{self.host}:{self.grpc_port}"

    @property
    def alive(self) -> bool:
        """Is it listening?"""
        return self._up.is_set()

    @property
    def live(self) -> int:
        """Generations in progress."""
        return len(self.scheduler.live)

    @property
    def rooms(self) -> list[int]:
        """The bootstrap rooms that were ever taken, in order."""
        return [room for room, phase in self.phases if phase is Phase.BOOTSTRAP]

    @property
    def generates(self) -> list[Recorded]:
        """The `/generate` requests among `requests`."""
        return [recorded for recorded in self.requests if recorded.path == "/generate"]

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen and serve, also again after each `kill` and `restart`, until cancelled."""
        started = False
        while True:
            await self._listen()
            self.born = trio.current_time()
            self._up.set()
            if not started:
                started = True
                task_status.started()
            try:
                with trio.CancelScope() as self._life:
                    await self._live()
            finally:
                self._close_listeners()
            await self._revived.wait()
            self._revived = trio.Event()

    async def _listen(self) -> None:
        self.port = await self._listen_on("http", self.port)
        try:
            if self._bootstrap is not None:
                self.bootstrap_port = await self._listen_on("bootstrap", self.bootstrap_port)
            if self.grpc_port is not None:
                self.grpc_port = await self._listen_on("grpc", self.grpc_port)
        except OSError:
            self._close_listeners()
            raise

    async def _listen_on(self, name: str, port: int) -> int:
        try:
            listener = self._listeners[name] = await self.network.listen(self.host, port)
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror if name == "http" else f"{name} port {port}: {exc.strerror}") from exc
        return listener.port

    def _close_listeners(self) -> None:
        for listener in self._listeners.values():
            listener.close()

    async def _live(self) -> None:
        """One life: serve, and publish."""
        with ExitStack() as stack:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._perish)
                if self.kv_publisher is not None:
                    sockets = stack.enter_context(self.kv_publisher.open())
                    nursery.start_soon(self.kv_publisher.run, self.kv_logs, sockets)
                if self._bootstrap is not None:
                    nursery.start_soon(self._bootstrap.accept, self._listeners["bootstrap"], self._connections)
                if "grpc" in self._listeners:
                    nursery.start_soon(self._accept, self._listeners["grpc"], grpc.serve)
                await self._accept(self._listeners["http"], http.serve)
                nursery.cancel_scope.cancel()

    async def _perish(self) -> None:
        await self._doomed.wait()
        await trio.sleep(self.options.death_delay)
        self.die()

    def doom(self) -> None:
        """Die after `death_delay`, of something that was asked of it."""
        self._doomed.set()

    async def _accept(self, listener: Listener, side: Side) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    connection = await listener.accept()
                except trio.ClosedResourceError:
                    return  # killed at this very moment
                self._connections[connection] = None
                nursery.start_soon(self._serve, connection, self.dialled, side)
                self.dialled += 1
                self._note()

    async def ask(self, body: Any, path: str = "/generate", **kwargs: Any) -> Response:
        """One request straight to it; more arguments are those of `client.fetch`. Raises `WorkerIsDead`."""
        self._check_alive()
        return await fetch(self.network, self.url, path, body, **kwargs)

    def kill(self, *, reset: bool = False) -> None:
        """Die at once: every connection is cut (FIN, as a killed process's are; RST if `reset`), dials are refused.

        Raises `WorkerIsDead`.
        """
        self._check_alive()
        self.die(reset=reset)

    def _check_alive(self) -> None:
        if not self.alive:
            born = self.deaths or self._listeners
            what = f"is dead (deaths so far: {self.deaths})" if born else "has not been started"
            help = "`await worker.restart()` brings it back" if born else "`run` it first"
            raise WorkerIsDead(f"the worker {self.host}:{self.port} {what}; {help}")

    def die(self, *, reset: bool = False) -> None:
        """As `kill`, but nothing happens if it is dead."""
        if not self.alive or self._life is None:
            return
        self.deaths += 1
        for log in self.kv_logs:
            log.listeners.clear()  # what ends with it tells nothing more
        self._up = trio.Event()
        self._life.cancel()
        self._close_listeners()
        for connection in self._connections:
            if reset:
                connection.abort()
            else:
                connection.close()
        self._boot()
        self._note()

    def freeze(self) -> None:
        """Go silent with every socket open, as with a stopped scheduler: streams stall, `/health` hangs."""
        self.health_status = None
        self.frozen = True
        self.scheduler.pause("in_place")

    def thaw(self) -> None:
        """Undo `freeze`: stalled streams go on and end whole; probes that already hang stay so."""
        self.health_status = 200
        self.frozen = False
        self.scheduler.resume()

    async def dead(self) -> None:
        """Return once it has died."""
        while self.alive:
            await self._changed.wait()

    async def restart(self, options: WorkerOptions | None = None) -> None:
        """Come back after `kill`, empty, on the same port, as another one if told so; return once it listens."""
        if not self.alive:
            self.options = options or self.options
            self._boot()
            self._revived.set()
            await self._up.wait()

    def update_weights(self, path: str, version: str = "") -> None:
        """Load other weights; "" leaves the version as it is."""
        self.model_path = path
        self.scheduler.weight_version = version or self.scheduler.weight_version
        self.scheduler.changed()

    def record(self, request: Request, connection: int) -> None:
        """Note a request that was read, whole."""
        self.requests.append(Recorded(request, connection, trio.current_time()))
        self._note()

    def record_disconnect(self) -> None:
        """Note that a client went away before its answer was out."""
        self.disconnects += 1
        self._note()

    def record_abort(self, body: dict[str, Any]) -> None:
        """Note an `/abort_request`."""
        self.aborts.append(body)
        self._note()

    async def reaches(self, dialled: int = 0, requests: int = 0, aborts: int = 0, disconnects: int = 0) -> None:
        """Return once the worker has seen at least this many of each."""
        while not (
            self.dialled >= dialled
            and len(self.requests) >= requests
            and len(self.aborts) >= aborts
            and self.disconnects >= disconnects
        ):
            await self._changed.wait()

    def _reach(self, room: int, phase: Phase) -> None:
        self.phases.append((room, phase))
        self._note()

    async def reaches_phase(self, room: int, phase: Phase) -> None:
        """Return once its leg of this room has come so far."""
        while (room, phase) not in self.phases:
            await self._changed.wait()

    def _note(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def new_rid(self) -> str:
        """A rid for a request that names none: 32 hexadecimal digits."""
        self._rids += 1
        seed = mix(mix_text(self.port, self.host), self._rids)
        return f"{seed:016x}{mix(seed, 1):016x}"

    def _next_rank(self) -> int | None:
        if self.options.dp_size == 1:
            return None
        self._ranks += 1
        return (self._ranks - 1) % self.options.dp_size

    def _next_draw(self) -> int:
        self._draws += 1
        return mix(mix_text(self.port, self.host), self._draws) >> 1

    async def _serve(self, connection: Connection, index: int, side: Side) -> None:
        try:
            await side(self, connection, index)
        except (AnswerCut, ConnectionBroken):
            pass
        finally:
            self._connections.pop(connection, None)
            connection.close()
