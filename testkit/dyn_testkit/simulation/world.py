"""The world of one run: a network of hosts, the workers, the router, the clients, and what is being done to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from dyn_relay.net import Network
from dyn_relay.sidecar.settings import Settings
from dyn_testkit.engine import Model
from dyn_testkit.gate import GatedNetwork
from dyn_testkit.history import Lease
from dyn_testkit.sidecar import SidecarHost
from dyn_testkit.simnet import Fragmentation, Link, Observer, SimNetwork
from dyn_testkit.simulation.clients import Clients
from dyn_testkit.simulation.leases import Overhearing
from dyn_testkit.simulation.nemeses.cuts import CUTS
from dyn_testkit.simulation.nemeses.sidecars import Sidecars
from dyn_testkit.simulation.router import Router
from dyn_testkit.simulation.scenario import CONTEXT, VOCABULARY, Plan, PlannedFault
from dyn_testkit.worker import MockWorker, WorkerOptions

#: Kinds of faults that strike a worker which something else may befall at the same time.
PASSING = frozenset({*CUTS, "hound", "reset", "weights", "leave", "dawdle", "abort_storm"})

#: Where sidecars listen, each on its engine's host.
_BESIDE = 31000


@dataclass(frozen=True, slots=True)
class Beside:
    """A sidecar, and the gate that stops it."""

    host: SidecarHost
    gate: GatedNetwork


class World:
    """What nemeses act upon."""

    ROUTER = "router"

    def __init__(self, plan: Plan, network: SimNetwork) -> None:
        self.network = network
        self.clients = Clients()
        self.workers = [
            MockWorker(network.host(f"w{number}"), f"w{number}", 30000, options)
            for number, options in enumerate(worker_options(plan))
        ]
        #: What is spoken here, by any of them.
        self.dialects = [worker.dialect for worker in plan.workers]
        #: Of each worker: is it reached over gRPC?
        self.over_grpc = [worker.grpc for worker in plan.workers]
        self._leases = [worker.lease for worker in plan.workers]
        #: By the number of the worker; those that have one.
        self.sidecars: dict[int, Beside] = {}
        self._from_router = Overhearing(network.host(self.ROUTER))
        #: The version of each worker's weights.
        self.versions = [worker.options.weight_version for worker in self.workers]
        #: Faults of clients and connections that have struck.
        self.struck: set[PlannedFault] = set()
        self.router: Router
        self._updates = 0
        self._taken: dict[PlannedFault, Sequence[int]] = {}
        self._befallen: dict[PlannedFault, Sequence[int]] = {}

    @property
    def auditor(self) -> Network:
        """The network as seen by somebody whom no fault befalls."""
        return self.network.host("auditor")

    @property
    def from_router(self) -> Network:
        """The network as the router sees it."""
        return self._from_router if self.leased else self._from_router.inner

    @property
    def leased(self) -> bool:
        """Some workers name themselves."""
        return any(self._leases)

    @property
    def leases(self) -> list[Lease]:
        """What the router has been told of leases."""
        return self._from_router.leases

    async def run_sidecars(self, nursery: trio.Nursery) -> None:
        """Start them, and wait until the router has been told of all."""
        for number, lease in enumerate(self._leases):
            if lease:
                gate = GatedNetwork(self.network.host(self.workers[number].host))
                host = SidecarHost(gate, self._settings(number, lease))
                self.sidecars[number] = Beside(host, gate)
                await nursery.start(host.run)
        while len({lease.worker for lease in self.leases}) < len(self.sidecars):  # noqa: ASYNC110 - as it hears them
            await trio.sleep(0.1)

    def _settings(self, number: int, lease: float) -> Settings:
        worker, over_grpc = self.workers[number], self.over_grpc[number]
        return Settings(
            # Every other one beside its HTTP server.
            engine=worker.url if not over_grpc or number % 2 else None,
            engine_grpc=worker.grpc_url if over_grpc else None,
            listen=f"{worker.host}:{_BESIDE}",
            relay=(self.router.url,),
            lease_secs=lease,
        )

    def take(self, fault: PlannedFault) -> Sequence[int]:
        """The workers that a fault may strike: its own, or for a swizzle all others, unless something befalls them."""
        engaged = {number for taken in self._taken.values() for number in taken}
        if fault.kind in PASSING:
            return (fault.worker,) if self.workers[fault.worker].alive else ()
        if fault.kind in Sidecars.faults and not self._leases[fault.worker]:
            return ()
        wanted = [fault.worker]
        if fault.kind == "swizzle":
            wanted = [number for number in range(len(self.workers)) if number != fault.worker]
        free = tuple(number for number in wanted if number not in engaged)
        if free:
            self._taken[fault] = free
        return free

    def struck_workers(self, fault: PlannedFault) -> Sequence[int]:
        """The workers that a fault has struck."""
        return self._befallen.get(fault) or self._taken.get(fault) or (fault.worker,)

    def befell(self, fault: PlannedFault, workers: Sequence[int]) -> None:
        """A fault that takes no worker for itself has struck these."""
        self._befallen[fault] = workers

    def release(self, fault: PlannedFault) -> None:
        """A fault has been undone."""
        self._taken.pop(fault, None)

    def new_version(self) -> str:
        """A version of weights that nobody has had."""
        self._updates += 1
        return f"all.{self._updates}"

    def url(self, number: int) -> str:
        """The URL by which the router knows a worker."""
        over = "grpc" if self.over_grpc[number] and not self._leases[number] else "http"
        return f"{over}://{self.workers[number].host}:{self.port(number)}"

    def port(self, number: int) -> int:
        """The port at which the router reaches a worker."""
        worker = self.workers[number]
        own = worker.grpc_port if self.over_grpc[number] else None
        return _BESIDE if self._leases[number] else own or worker.port

    def door(self, number: int) -> str:
        """The same place, for whoever asks over HTTP; a gRPC server ends what it does not understand."""
        return f"http://{self.workers[number].host}:{self.port(number)}"

    @property
    def named(self) -> list[str]:
        """The URLs that the router is told of beforehand: who has a sidecar names itself."""
        return [self.url(at) for at, lease in enumerate(self._leases) if not lease]

    @property
    def serving(self) -> list[str]:
        """The URLs of those that give answers: all, or the decode workers of pairs."""
        return [self.url(at) for at, one in enumerate(self.workers) if one.options.disaggregation != "prefill"]

    @property
    def prefills(self) -> list[str]:
        """The URLs of those that compute prompts for others."""
        return [self.url(at) for at, one in enumerate(self.workers) if one.options.disaggregation == "prefill"]

    def name(self, fault: PlannedFault) -> str:
        """The target of a fault, for people."""
        return self.workers[fault.worker].host


def worker_options(plan: Plan) -> list[WorkerOptions]:
    """The options of a plan's workers: one model, the rest their own."""
    model = Model(vocab_size=VOCABULARY, eos_rate=plan.eos_rate, context_length=CONTEXT)
    return [
        WorkerOptions(
            model=model,
            dialect=worker.dialect,
            tick=worker.tick,
            tokens_per_tick=worker.tokens_per_tick,
            stream_interval=worker.stream_interval,
            health_delay=0.5,
            weight_version=f"{number}.0",
            routed_experts=True,
            min_new_tokens_needs_tokenizer=False,
            disaggregation=worker.role,
            grpc_port=30001 if worker.grpc else None,
            grpc_response_timeout=plan.patience,  # as slow as these are, 300 s are no silence
        )
        for number, worker in enumerate(plan.workers)
    ]


def make_network(plan: Plan, observe: Observer | None = None) -> SimNetwork:
    """The network of a plan."""
    link = Link(latency=plan.latency, fragmentation=Fragmentation(plan.fragment or None))
    return SimNetwork(plan.seed, link, observe=observe)
