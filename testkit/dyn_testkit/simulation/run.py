"""One run of a plan: the world is built, requests and faults come at their times, all is undone, and the rest ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import trio

from dyn_relay.config import Config
from dyn_testkit import checkers
from dyn_testkit.checkers import Finding, tenure
from dyn_testkit.client import fetch
from dyn_testkit.determinism import run_seeded
from dyn_testkit.history import Arrival, End, Fault, History, Order, Reference, Run, Sample
from dyn_testkit.oracle import Oracle
from dyn_testkit.simnet import NetEvent
from dyn_testkit.simulation.nemeses import AUDITOR, HARMS, KINDS, LASTING, PROOFS, Missed, Validated
from dyn_testkit.simulation.router import RouterFactory, relay
from dyn_testkit.simulation.scenario import Plan, PlannedFault, RequestPlan
from dyn_testkit.simulation.world import World, make_network
from dyn_testkit.worker import MockWorker

#: Seconds after the end of a fault in which an attempt may still fail of it, beside two stall timeouts: a worker whose
#: health is good gets two of them.
AFTERMATH = 30.0

#: Seconds in which the router finds out that workers which have named themselves are well.
JOINING = 10.0

#: Seconds between two looks at the router's list.
LOOK = 30.0

#: What SGLang 0.5.23 says to `users.mistaken`.
TOP_P = '{"error":{"message":"top_p must be in (0, 1], got 2.0."}}'


@dataclass(slots=True)
class Ran:
    """What came of a plan."""

    plan: Plan
    history: History
    #: What happened on the network, in order; a function of the plan, byte for byte.
    log: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    #: Virtual seconds.
    duration: float = 0.0


def run(plan: Plan, router: RouterFactory = relay, *, log: bool = False) -> Ran:
    """Run a plan in virtual time and check it. `log` keeps an event log.

    Raises what is a defect of the simulation itself, `Unproven` among it.
    """
    ran = Ran(plan, History())
    observe = (lambda event: ran.log.append(str(event))) if log else None
    run_seeded(partial(_run, ran, router, observe), plan.seed)
    ran.findings = checkers.check(ran.history)
    return ran


async def _run(ran: Ran, factory: RouterFactory, observe: Callable[[NetEvent], None] | None) -> None:
    plan, history = ran.plan, ran.history
    world = World(plan, make_network(plan, observe))
    async with trio.open_nursery() as fleet:
        for worker in world.workers:
            await fleet.start(worker.run)
        urls, prefills = world.serving, world.prefills
        settings = dict(plan.router)
        if prefills:
            settings |= {"pd_disaggregation": True, "prefill": tuple(prefills), "decode": tuple(urls)}
        async with factory(
            world.from_router, world.ROUTER, () if prefills else world.named, plan.seed, settings
        ) as world.router:
            config = Config(**plan.router)
            async with trio.open_nursery() as watching:
                if world.leased:
                    await world.run_sidecars(fleet)
                    await trio.sleep(JOINING)
                    watching.start_soon(_watch, world, history)
                await _play(world, ran)
                if world.leased:
                    await trio.sleep(_notice(config))  # whoever was away for long is looked at rarely
                watching.cancel_scope.cancel()
            history.run = Run(
                name=plan.scenario,
                seed=plan.seed,
                traced=True,
                tapped=True,
                workers=urls,
                prefills=prefills,
                grpc=[world.url(number) for number, over in enumerate(world.over_grpc) if over],
                migration_limit=config.migration_limit,
                aftermath=AFTERMATH + 2 * config.stall_timeout_secs,
                patience=plan.patience,
                notice=_notice(config),
                inhibited=config.inhibited_duration_secs,
                # The silence of a decode worker counts from when its prefill worker has answered; over gRPC an engine
                # that hangs is said to be ill (503), which is worth one more stall timeout before the first token.
                silence=AFTERMATH + (2 if prefills or any(world.over_grpc) else 1) * config.stall_timeout_secs,
            )
            history.rows = [dict(row) for row in world.router.rows]
            history.arrivals = _arrivals(world)
            history.orders = _orders(world)
            history.leases = list(world.leases)
            history.add(Sample(trio.current_time(), dict(world.router.gauges) | await _listed(world)))
            history.end = End()
        fleet.cancel_scope.cancel()
    ran.duration = trio.current_time()


async def _play(world: World, ran: Ran) -> None:
    """Everything that is planned; then, once all is undone, the time that the rest may take."""
    plan, history = ran.plan, ran.history
    nemeses = {nemesis: Validated(nemesis(), PROOFS, LASTING) for nemesis in dict.fromkeys(KINDS.values())}
    for nemesis in nemeses.values():
        await nemesis.setup(world)
    began = trio.current_time()
    oracle = Oracle(world.workers[0].options.model, routed_experts=True)

    async def ask(request: RequestPlan) -> None:
        await trio.sleep_until(began + request.at)
        record = await world.clients.run(request, world.network.host("clients"), world.router.url)
        history.add(record)

    async def strike(fault: PlannedFault) -> None:
        await trio.sleep_until(began + fault.at)
        struck = world.take(fault)
        if not struck:
            return
        nemesis = nemeses[KINDS[fault.kind]]
        at = trio.current_time()
        try:
            proof = await nemesis.invoke(world, fault)
            await trio.sleep(fault.duration)
            await nemesis.teardown(world, fault)
        except Missed:
            world.release(fault)
            return
        for number in world.struck_workers(fault):
            target, until, harms = world.url(number), trio.current_time(), HARMS[fault.kind]
            history.add(Fault(fault.kind, target, at, until, proof, {"choice": fault.choice}, harms))
        world.release(fault)

    async with trio.open_nursery() as faults, trio.open_nursery() as clients:
        for request in plan.requests:
            history.add(reference(oracle, request))
            clients.start_soon(ask, request)
        for fault in plan.faults:
            faults.start_soon(strike, fault)
        last = max((fault.at + fault.duration for fault in plan.faults), default=0.0)
        end = max(last, max(request.at for request in plan.requests)) + 2 * plan.patience
        clients.cancel_scope.deadline = began + end
    await _settle(world, plan.patience)


async def _settle(world: World, patience: float) -> None:
    """Wait until the router holds nothing any more, as long as that may take; what stays is for a checker to find.

    Then its last orders have some time to arrive.
    """
    pause = 1.0
    with trio.move_on_after(patience):
        while any(world.router.gauges.values()):
            await trio.sleep(pause)
            pause *= 2
    await trio.sleep(AFTERMATH)


def reference(oracle: Oracle, request: RequestPlan) -> Reference:
    """What an undisturbed engine says to a request."""
    body = {name: value for name, value in request.body.items() if value is not None}
    if body["sampling_params"].get("top_p", 1.0) > 1:
        return Reference(request.key, request.body, 400, text=TOP_P)
    answer = msgspec.json.encode(oracle.answer(body)).decode()
    return Reference(request.key, {**request.body, "stream": False}, 200, text=answer)


def _notice(config: Config) -> float:
    """Seconds in which enough probes begin and end to tell a worker's health."""
    probes = max(config.health_failure_threshold, config.health_success_threshold) + 1
    return probes * (config.health_check_interval_secs + config.health_check_timeout_secs)


def _arrivals(world: World) -> list[Arrival]:
    """The generations that workers have read from the router; the auditor asks, too."""
    return [
        Arrival(
            world.url(at),
            recorded.at,
            body,
            worker.made.get(body.get("rid", "")),
            _left(worker, body, recorded.at),
        )
        for at, worker in enumerate(world.workers)
        for recorded, body in ((each, each.json()) for each in worker.generates)
        if body.get("rid") != AUDITOR
    ]


def _left(worker: MockWorker, body: Mapping[str, Any], at: float) -> float | None:
    """When it was done with it: at once, if that came to nothing; None if it is at work on it still."""
    name = body.get("rid", ""), body.get("bootstrap_room")
    live = {(one.job.rid, one.job.bootstrap_room) for one in worker.scheduler.live.values()}
    return None if name in live else worker.left.get(name, at)


async def _watch(world: World, history: History) -> None:
    while True:
        history.add(Sample(trio.current_time(), await _listed(world)))
        await trio.sleep(LOOK)


async def _listed(world: World) -> dict[str, float]:
    """Of each worker that names itself, what the router says: is it there, and may it get requests?"""
    if not world.leased:
        return {}
    listed = (await fetch(world.auditor, world.router.url, "/workers")).json()["workers"]
    there = {one["url"]: one for one in listed if one["state"] != "draining"}
    urls = [world.url(number) for number in world.sidecars]
    well = {tenure.WELL + url: float(url in there and _usable(there[url])) for url in urls}
    return well | {tenure.LISTED + url: float(url in there) for url in urls}


def _usable(listed: Mapping[str, Any]) -> bool:
    """A breaker that has opened since requests were cut waits for the next ones."""
    return listed["is_healthy"] or listed["state"] in ("open", "half_open")


def _orders(world: World) -> list[Order]:
    """The aborts that workers have read."""
    return [
        Order(world.url(at), recorded.at, recorded.json().get("rid", ""))
        for at, worker in enumerate(world.workers)
        for recorded in worker.requests
        if recorded.path == "/abort_request"
    ]
