"""A whole proxy before a stage of mock workers: in memory under virtual time, or on real sockets."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial

import structlog
import trio
from trio.testing import MockClock

from dyn_relay.direct import gateways
from dyn_relay.fleet import keeper
from dyn_relay.fleet.policies.base import Policy
from dyn_relay.fleet.policies.catalog import POLICIES
from dyn_relay.net import Network
from dyn_relay.relay import budget
from dyn_relay.sockets import open_network
from dyn_testkit.background import background
from dyn_testkit.laws import Stage
from dyn_testkit.laws.answers import DIALECTS
from dyn_testkit.laws.cases import MODEL
from dyn_testkit.laws.levels import RouterLevel
from dyn_testkit.relay import open_relay
from dyn_testkit.sidecar import open_sidecar
from dyn_testkit.simnet import Link, SimNetwork
from dyn_testkit.worker import WorkerOptions

OPTIONS = WorkerOptions(model=MODEL, min_new_tokens_needs_tokenizer=False)
_POLICY = "least_loaded"
#: s in virtual time, beyond the stalls of all attempts: who waits longer waits for something that never comes.
_FOREVER = 3600


class _Directed(Policy):
    """A policy that gives each attempt the dialect that the case wants: what happens does not hang on luck."""

    def __init__(self, stage):
        self._stage = stage

    def choose(self, candidates, ask):
        by_url = {target.worker.url: target for target in candidates}
        return by_url[self._stage.pick(by_url)]


@asynccontextmanager
async def proxied(
    network: Network, stage: Stage, host: str, port: int, *, sided: bool = False, **config
) -> AsyncIterator[RouterLevel]:
    """A proxy before the workers of `stage`, or before sidecars of theirs; all run as long as the block does."""
    with _silence():
        async with background() as nursery, AsyncExitStack() as sidecars:
            await nursery.start(stage.run)
            if sided:
                await _beside(network, stage, sidecars)
            settings = {"seed": 1, "log_level": "error", "health_success_threshold": 1, "inhibited_duration_secs": 0.0}
            settings["cb_failure_threshold"] = 0  # the faults of one case are nothing to the next
            prefills = tuple(stage.url_of(worker) for worker in stage.prefills)
            urls = () if prefills else stage.urls
            if prefills:
                settings |= {"pd_disaggregation": True, "prefill": prefills, "decode": stage.urls}
            async with open_relay(network, host, port, urls, policy=_POLICY, **settings | config) as relay:
                fleet, live = relay.app.fleet, relay.app.live

                async def settled() -> None:
                    ready = False
                    everyone = [*stage.workers, *stage.prefills]
                    while not ready:
                        await trio.sleep(0.0005)
                        fleet.pick()  # lets those back in whose time is over
                        alive = {stage.url_of(worker) for worker in everyone if worker.alive}
                        back = all(worker.state == "ready" for worker in fleet.workers if worker.url in alive)
                        ready = back and stage.quiet and not len(live)

                async def evidence():
                    await settled()
                    seen = list(relay.rows)
                    relay.rows.clear()
                    return seen, relay.gauges

                await settled()
                yield RouterLevel(network, relay.url, stage, evidence)


async def _beside(network: Network, stage: Stage, stack: AsyncExitStack) -> None:
    """A sidecar beside each worker, all of them serving."""
    for number, worker in enumerate([*stage.workers, *stage.prefills]):
        url = stage.own_url_of(worker)
        engine = {"engine_grpc" if url.startswith("grpc") else "engine": url}
        host = await stack.enter_async_context(open_sidecar(network, listen=f"side{number}:31000", **engine))
        stage.beside_of[url] = host.url
        await host.sidecar.open.wait()


@contextmanager
def _silence():
    """What a proxy logs under thousands of faults is nobody's news. Tests that come after it see logs again."""
    before = structlog.get_config()
    silent = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=silent, cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


@contextmanager
def _directed(stage: Stage):
    """The stage's own policy instead of a stock one."""
    stock = POLICIES[_POLICY]
    POLICIES[_POLICY] = lambda config, rng, clock: _Directed(stage)
    try:
        yield
    finally:
        POLICIES[_POLICY] = stock


@contextmanager
def _overheard(stage: Stage):
    """What the proxy's gateways to gRPC engines say to it is the workers' answer, for the laws."""
    stock = gateways.pipe

    def tapped(near: str, far: str):
        dialled, served = stock(near, far)
        return dialled, stage.overhear(far, served)

    gateways.pipe = tapped
    try:
        yield
    finally:
        gateways.pipe = stock


class Simulated:
    """A new world for each case, in no real time. Four workers, so that every attempt has one of its own."""

    def __init__(self, options=OPTIONS, *, prefills=None, grpc=False, **config):
        """`prefills`: they are pairs; the options of the prefill workers, of which there are as many.

        `grpc`: the proxy reaches all of them over gRPC, in direct mode. `sided`: it reaches their sidecars, and those
        reach them so.
        """
        self._options, self._config = options, config
        self._grpc = grpc
        self._prefills = [prefills] * 4 if prefills is not None else []

    def observe(self, case):
        return trio.run(partial(self._observe, case), clock=MockClock(autojump_threshold=0))

    async def _observe(self, case):
        network = SimNetwork(1, Link(fragmentation=case.fragmentation))
        dialects = [case.dialect(number) for number in range(4)]
        stage = Stage(network, dialects, self._options, "w{}", 30000, prefills=self._prefills, grpc=self._grpc)
        with _directed(stage), _overheard(stage), trio.fail_after(_FOREVER):
            async with proxied(network, stage, "proxy", 30000, **self._config) as level:
                return await level.observe(case)


class Sockets:
    """One proxy and its workers on real sockets, in a thread with a loop of its own; cases one after the other."""

    def __init__(self, **config):
        self._config = config
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._serve,), name="sockets")

    def __enter__(self):
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_):
        trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        self._thread.join()

    def observe(self, case):
        return trio.from_thread.run(self._level.observe, case, trio_token=self._token)

    async def _serve(self):
        self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
        async with open_network() as network:
            # Three of each dialect: the attempts of one request may all want the same one.
            stage = Stage(network, DIALECTS * 3, OPTIONS)
            with _directed(stage):
                async with proxied(network, stage, "127.0.0.1", 0, **self._config) as self._level:
                    self._ready.set()
                    await self._stop.wait()


@contextmanager
def impatient():
    """Retries, and workers whose queue is full, without a pause worth the name: real time is dear."""
    pauses = budget.BACKOFF_BASE, keeper.FULL_FOR
    budget.BACKOFF_BASE = keeper.FULL_FOR = 0.0001
    try:
        yield
    finally:
        budget.BACKOFF_BASE, keeper.FULL_FOR = pauses
