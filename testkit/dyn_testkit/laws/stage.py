"""The workers of a case: mock workers that fail attempt by attempt, and remember what they saw and said.

One case at a time. A router in front of the stage may choose its workers as it likes; if its choice can be steered,
`Stage.pick` gives it the worker whose dialect the case wants next.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import cycle

import trio

from dyn_relay.net import RECEIVE_SIZE, Connection, Listener, Network
from dyn_testkit.engine import EMPTY, Model, Sampling, generate, mix
from dyn_testkit.faults import Fault, FaultPlan, Kind, Seen, Spot, What, Where
from dyn_testkit.laws.observed import Attempt, Case
from dyn_testkit.laws.pieces import pieces
from dyn_testkit.simnet import WHOLE, Fragmentation
from dyn_testkit.worker import Dialect, MockWorker, WorkerOptions

#: s between two pieces.
_BETWEEN = 0.0005


class TappedConnection:
    """A connection that keeps a copy of what is sent on it, and sends it in pieces: `how` is asked each time."""

    def __init__(self, connection: Connection, how: Callable[[], Fragmentation]) -> None:
        self.peer = connection.peer
        self.sent = bytearray()
        self._connection = connection
        self._how = how
        self.receive = connection.receive
        self.wait_closed = connection.wait_closed
        self.quiet = connection.quiet
        self.end_sending = connection.end_sending
        self.close = connection.close
        self.abort = connection.abort

    async def send(self, data: bytes) -> None:
        self.sent += data
        for number, piece in enumerate(pieces(data, self._how())):
            if number:  # time for the reader to see the last one alone
                await trio.sleep(_BETWEEN)
            await self._connection.send(piece)

    def offer(self, data: bytes) -> bool:
        return self._connection.offer(data)

    @property
    def pending(self) -> bool:
        return self._connection.pending


class _Overheard(TappedConnection):
    """What the gateway before a worker's gRPC side says on one connection."""

    def __init__(self, connection: Connection, tap: _Tap) -> None:
        super().__init__(connection, lambda: tap.how)
        self._tap = tap
        self.receive = self._receive

    async def _receive(self, max_bytes: int = RECEIVE_SIZE) -> bytes:
        data = await self._connection.receive(max_bytes)
        if data.startswith((b"POST /generate ", b"PUT /generate ")):
            self._tap.generating = self
        return data


class _TappedListener:
    def __init__(self, listener: Listener, tap: _Tap) -> None:
        self.host, self.port = listener.host, listener.port
        self._listener = listener
        self._tap = tap

    async def accept(self) -> Connection:
        connection = TappedConnection(await self._listener.accept(), lambda: self._tap.how)
        self._tap.connections.append(connection)
        return connection

    def close(self) -> None:
        self._listener.close()


class _Tap:
    """A network for one worker: what it says stays readable, connection by connection, in the order of accepting."""

    def __init__(self, network: Network, listeners: int = 1) -> None:
        """`listeners`: how many the worker opens in each life; only what is said on the first one counts."""
        self._listeners = cycle(range(listeners))
        self.connections: list[TappedConnection] = []
        #: Of a gateway: where it was last asked for a generation.
        self.generating: TappedConnection | None = None
        #: How it is cut on its way.
        self.how = WHOLE
        self.connect = network.connect
        self.relay = network.relay
        self._network = network

    async def listen(self, host: str, port: int) -> Listener:
        listener = await self._network.listen(host, port)
        return listener if next(self._listeners) else _TappedListener(listener, self)


class _Part(FaultPlan):
    """One worker's share in the case."""

    def __init__(self, stage: Stage, number: int) -> None:
        super().__init__()
        self._stage = stage
        self._number = number
        self._attempts: dict[int, Attempt] = {}

    def for_request(self, seen: Seen) -> Fault | None:
        attempt = self._attempts[seen.index] = self._stage.enter(self._number, seen)
        return None if attempt.fault is None else Fault(*attempt.fault)

    def record(self, fault: Fault, seen: Seen) -> None:
        self._attempts[seen.index].fired = True
        super().record(fault, seen)

    async def released(self) -> None:
        await self._stage.released.wait()


class Stage:
    """Mock workers with one model. `run` them, `begin` a case, send its request, then `attempts` tells.

    With prefill workers they are pairs: the `workers` are then the decode workers.
    """

    def __init__(
        self,
        network: Network,
        dialects: Sequence[Dialect],
        options: WorkerOptions | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        cuts: bool = False,
        prefills: Sequence[WorkerOptions] = (),
        grpc: bool = False,
    ) -> None:
        """One worker a dialect, on `host` with `{}` in it replaced by its number.

        `cuts`: the workers send in pieces, as a case says; for networks that do not cut by themselves.
        `prefills`: the options of prefill workers, which are told to be that; they have the numbers that follow.
        `grpc`: they are reached over gRPC, through gateways that the router has: `overhear` them.
        """
        base = replace(options or WorkerOptions(), disaggregation="decode" if prefills else "null")
        each = [replace(base, dialect=dialect) for dialect in dialects]
        each += [replace(one, disaggregation="prefill") for one in prefills]
        if grpc:
            each = [replace(one, grpc_port=port and port + 1) for one in each]
        self._grpc = grpc
        #: What the router knows instead of a worker's own URL: its sidecar's.
        self.beside_of: dict[str, str] = {}
        self._taps = [_Tap(network, 2 if one.disaggregation == "prefill" else 1) for one in each]
        self._all = [
            MockWorker(tap, host.format(number), port, one, _Part(self, number))
            for number, (tap, one) in enumerate(zip(self._taps, each, strict=True))
        ]
        self.workers, self.prefills = self._all[: len(dialects)], self._all[len(dialects) :]
        self._cuts = cuts
        self._case = Case(b"{}")
        #: Stalled answers of this case go on.
        self.released = trio.Event()
        #: (attempt, its connection, where its answer begins in what was sent there).
        self._entered: list[tuple[Attempt, TappedConnection, int]] = []
        #: The same of prefill workers.
        self._beside: list[tuple[Attempt, TappedConnection, int]] = []

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            for worker in self._all:
                await nursery.start(worker.run)
            task_status.started()

    @property
    def urls(self) -> tuple[str, ...]:
        """The workers' base URLs."""
        return tuple(self.url_of(worker) for worker in self.workers)

    def url_of(self, worker: MockWorker) -> str:
        """A worker's base URL, as the router knows it."""
        own = self.own_url_of(worker)
        return self.beside_of.get(own, own)

    def own_url_of(self, worker: MockWorker) -> str:
        """A worker's base URL, as its sidecar knows it, if there is one."""
        return worker.grpc_url if self._grpc else worker.url

    def overhear(self, url: str, connection: Connection) -> Connection:
        """A gateway's end of a new connection to it, for the gateway to use instead; `url`: its engine's."""
        [number] = [number for number, worker in enumerate(self._all) if worker.grpc_url == url]
        return _Overheard(connection, self._taps[number])

    def begin(self, case: Case) -> None:
        """Forget what was seen; each worker gets another part of the prompt into its cache, so that counts differ."""
        self._case = case
        self._entered, self._beside = [], []
        self.released = trio.Event()
        for tap in self._taps:
            tap.how = case.fragmentation if self._cuts else WHOLE
        prompt = case.request.get("input_ids") or []
        if not all(isinstance(token, int) for token in prompt):
            return
        for number, worker in enumerate(self._all):
            history = EMPTY
            for token in prompt[: (number + 1) % 4]:
                history = mix(history, token)
                worker.scheduler.cache.add(history)

    async def mend(self) -> None:
        """The faults stop: stalled answers go on, dead workers come back."""
        self.released.set()
        for worker in self._all:
            await worker.restart()

    def enter(self, number: int, seen: Seen) -> Attempt:
        """A worker has read a generation: the next attempt."""
        worker, case = self._all[number], self._case
        entered, planned = (self._entered, case.fault) if number < len(self.workers) else (self._beside, case.prefill)
        tap = self._taps[number]
        connection = tap.generating or tap.connections[worker.generates[seen.index].connection]
        fault = planned(len(entered))
        if fault is not None and _too_late(fault, worker.options.model, seen.body):
            fault = None
        attempt = Attempt(seen.body, worker.options.dialect, fault)
        entered.append((attempt, connection, len(connection.sent)))
        return attempt

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts so far, with what their workers sent."""
        return _told(self._entered)

    @property
    def beside(self) -> list[Attempt]:
        """The same of prefill workers."""
        return _told(self._beside)

    def pick(self, urls: Collection[str]) -> str:
        """Of these workers, one in the dialect that the case wants next, else the first."""
        wanted = self._case.dialect(len(self._entered))
        there = {self.url_of(worker): worker for worker in self._all if self.url_of(worker) in urls}
        fitting = [url for url, worker in there.items() if worker.options.dialect == wanted]
        return (fitting or list(there))[0]

    @property
    def quiet(self) -> bool:
        """No worker is generating."""
        return not any(worker.live for worker in self._all)


def _told(entered: Sequence[tuple[Attempt, TappedConnection, int]]) -> list[Attempt]:
    for attempt, connection, start in entered:
        attempt.wire = bytes(connection.sent[start:])
    return [attempt for attempt, _, _ in entered]


def _too_late(fault: tuple[Where, What], model: Model, body: bytes) -> bool:
    """No engine aborts what has finished: the event with this token has the finish in it."""
    where, what = fault
    if what.kind is not Kind.ABORT_EVENT or where.spot is not Spot.AT_TOKEN:
        return False
    sent = json.loads(body)
    steps = generate(model, sent["input_ids"], Sampling.parse(sent.get("sampling_params") or {}))
    return where.token >= sum(1 for _ in steps)
