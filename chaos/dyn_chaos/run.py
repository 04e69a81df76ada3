"""One campaign from its engines to its folder.

DIR/history.jsonl   everything: what clients sent and read, faults and their proofs, the proxy's rows, samples of it
DIR/summary.json    the verdict
DIR/*.log           the output of every process; DIR/relay.jsonl: the proxy's own trace file
"""

from __future__ import annotations

import itertools
import math
import shlex
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import trio

from dyn_chaos import audit, engines, fleet, html, mix, report, sampler
from dyn_chaos.actions import Scene
from dyn_chaos.campaigns.base import Campaign
from dyn_chaos.clients import Clients
from dyn_chaos.engines import TOLERANCE
from dyn_chaos.fleet import Attached, Engine
from dyn_chaos.load import Plan, ask_references, client
from dyn_chaos.namespaces import namespaces
from dyn_chaos.nemesis import Nemesis
from dyn_chaos.processes import NotReady
from dyn_chaos.recorder import Recorder, References
from dyn_chaos.report import Outcome
from dyn_chaos.simulate import commit
from dyn_chaos.verdict import MOVES, STRIKES, verdict
from dyn_relay.config import Config
from dyn_testkit import fold, history
from dyn_testkit.history import Arrival, End, Fault, Harm, Row, Run
from dyn_testkit.history import Order as Drop
from dyn_testkit.oracle import Oracle

HISTORY, SUMMARY = "history.jsonl", "summary.json"
#: What a sidecar, or an engine behind one, can do no more while it is struck.
HARMS: tuple[Harm, ...] = ("attempts", "health", "answers", "dials")
#: A sidecar's name, by its engine's number.
SIDECAR = "sidecar-{}"
#: An engine's.
WORKER = "worker-{}"

#: Requests that are asked of an engine beforehand, where a load has no end of its own.
POOL = 64
#: Requests that an engine is asked at once for references.
AT_ONCE = 4
#: Seconds after the end of a fault in which an attempt may still fail of it, beside two stall timeouts.
AFTERMATH = 10.0
#: Seconds in which a running engine must say that it is well (SGLang generates a token for it).
ANSWERS = 30.0
#: Seconds in which the proxy must have found its workers, and in which it must end.
READY, END = 60.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a campaign is run on."""

    #: Flags of mock workers; `oracle` knows what they say.
    mock: tuple[str, ...] = ()
    oracle: Oracle | None = None
    #: Or the command line of other engines.
    command: tuple[str, ...] = ()
    #: Or running ones.
    attached: tuple[Attached, ...] = ()
    workers: int = 2
    #: Flags of the proxy, and what they come to.
    relay: tuple[str, ...] = ()
    config: Config = field(default_factory=Config)
    seed: int = 0
    #: `Run.patience`.
    patience: float = 60.0
    #: The command line, for the history.
    said: str = ""


#: Hears of each fault.
Listener = Callable[[Fault], None]


async def run(campaign: Campaign, setup: Setup, out: Path, heard: Listener = lambda _: None) -> Outcome:
    """Run it and leave its folder. Raises `NotReady`, `Unable`, `fold.Incomplete`, `LookupError` for its target."""
    random = Random(f"{campaign.name}/{setup.seed}")
    async with trio.open_nursery() as nursery, _engines(campaign, setup, nursery, out) as started:
        plans, references = await _requests(campaign, setup, started)
        named = [] if campaign.beside else [engine.url for engine in started]
        relay = await engines.relay(nursery, named, out, setup.relay)
        workers = await _sided(campaign, nursery, out, started, relay.url) if campaign.beside else started
        async with client() as http:
            await _all_ready(Scene(relay.url, http), workers)
            begin, wall = trio.current_time(), time.time()
            about = _about(campaign, setup, workers, wall)
            with Recorder(out / HISTORY, references, about, whole=campaign.load.requests is not None) as recorder:
                stage = Stage(relay, workers, http, plans, begin, random, recorder, heard)
                died = await _while_it_lives(relay, partial(_play, campaign, setup, stage))
                if died is None:
                    relay.child.send(signal.SIGTERM)
                    with trio.move_on_after(END):
                        await relay.child.wait()
                for row in _rows(out / "relay.jsonl"):
                    recorder.note(Row(row))
                if campaign.beside:
                    for entry in _asked(out, workers, wall):
                        recorder.note(entry)
                recorder.note(End(died))
        nursery.cancel_scope.cancel()
    return finish(out)


def finish(out: Path) -> Outcome:
    """Judge the history of a folder and write the rest of it."""
    seen = history.load(out / HISTORY)
    outcome = verdict(seen)
    report.save(out / SUMMARY, [outcome])
    (out / html.REPORT).write_text(html.render(seen, outcome.findings), encoding="utf-8")
    return outcome


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything that takes part."""

    relay: engines.Server
    workers: Sequence[Engine]
    http: httpx.AsyncClient
    plans: Iterator[Plan]
    begin: float
    random: Random
    recorder: Recorder
    heard: Listener


async def _while_it_lives(relay: engines.Server, play: Callable[[], Awaitable[None]]) -> int | None:
    """Play until the proxy ends by itself; says with what, None if it does not."""
    try:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await relay.child.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await play()
            nursery.cancel_scope.cancel()
    except* httpx.TransportError:  # who asks a dying proxy may hear of it first
        with trio.move_on_after(END):
            await relay.child.wait()
        if relay.child.alive:
            raise
    return None if relay.child.alive else await relay.child.wait()


async def _play(campaign: Campaign, setup: Setup, stage: Stage) -> None:
    """The load and what disturbs it, until both are over, and the proxy has tidied up."""
    load = campaign.load

    def note(fault: Fault) -> None:
        stage.recorder.note(fault)
        stage.heard(fault)

    clients = Clients(
        url=stage.relay.url,
        plans=stage.plans,
        count=load.clients or load.requests or 1,
        think=load.think,
        random=stage.random,
        ended=stage.recorder.ended,
        begin=stage.begin,
        until=math.inf if load.requests is not None else stage.begin + 60 * load.minutes,
        patience=setup.patience + END,
        forgetful=load.requests is None,
    )
    nemesis = Nemesis(
        action=campaign.action(campaign.choices),
        scene=Scene(stage.relay.url, stage.http),
        engines=stage.workers,
        order=campaign.order,
        random=stage.random,
        begin=stage.begin,
        note=note,
        busy=clients.hold,
        harms=HARMS if campaign.beside else ("attempts",),
    )
    ended = trio.Event()
    async with trio.open_nursery() as samples:
        samples.start_soon(
            sampler.watch, stage.http, stage.relay.url, stage.relay.child.pid, stage.begin, stage.recorder.note
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nemesis.run, campaign.when, load.streams, clients.watch, ended)
            await clients.run()
            ended.set()
        samples.cancel_scope.cancel()
    stage.recorder.note(await sampler.settled(stage.http, stage.relay.url, stage.relay.child.pid, stage.begin))


@asynccontextmanager
async def _engines(
    campaign: Campaign, setup: Setup, nursery: trio.Nursery, logs: Path
) -> AsyncIterator[Sequence[Engine]]:
    """The workers, all of them ready."""
    if setup.attached:
        for engine in setup.attached:
            said = await audit.health(engine.url, within=ANSWERS)
            if said != "200":
                raise NotReady(f"{engine.url}/health is not 200 but {said}")
        yield setup.attached
        return
    async with AsyncExitStack() as stack:
        homes: Sequence[Any] = [None] * setup.workers
        if campaign.isolated:
            homes = await stack.enter_async_context(namespaces(setup.workers))
        make = (
            partial(fleet.by_command, words=setup.command) if setup.command else partial(fleet.mock, flags=setup.mock)
        )
        started = [make(nursery, WORKER.format(number), logs, namespace=home) for number, home in enumerate(homes)]
        async with trio.open_nursery() as starting:
            for worker in started:
                starting.start_soon(worker.start)
        yield started


async def _sided(
    campaign: Campaign, nursery: trio.Nursery, out: Path, started: Sequence[Engine], relay: str
) -> Sequence[Engine]:
    """A sidecar beside each engine, all of them serving: what the campaign strikes."""
    beside = [
        fleet.sidecar(nursery, SIDECAR.format(number), out, engine, relay) for number, engine in enumerate(started)
    ]
    async with trio.open_nursery() as starting:
        for one in beside:
            starting.start_soon(one.start)
    if campaign.beside == "sidecar":
        return beside
    return [fleet.Behind(engine, one) for engine, one in zip(started, beside, strict=True)]


def _asked(out: Path, workers: Sequence[Engine], began: float) -> Iterator[Arrival | Drop]:
    """What the sidecars have asked of their engines."""
    for number, worker in enumerate(workers):
        for row in _rows(out / f"{SIDECAR.format(number)}.jsonl"):
            at, body = row["time"] - began, row["body"]
            if row["path"] == "/generate":
                yield Arrival(worker.url, at, body)
            else:
                yield Drop(worker.url, at, body.get("rid") or "")


async def _requests(campaign: Campaign, setup: Setup, workers: Sequence[Engine]) -> tuple[Iterator[Plan], References]:
    """The load, and who says what is right."""
    drawn = mix.draw(campaign.load, setup.seed)
    if setup.oracle is not None:
        return itertools.islice(drawn, campaign.load.requests), partial(mix.of_oracle, setup.oracle)
    pool = [mix.repeatable(plan) for plan in itertools.islice(drawn, campaign.load.requests or POOL)]
    asked = await ask_references(workers[0].url, pool, at_once=AT_ONCE)
    for reference in asked.values():
        try:
            fold.answer(reference)
        except fold.Incomplete as error:
            raise NotReady(f"{workers[0].url} was asked for a reference, and it is no whole answer: {error}") from None
    return itertools.islice(mix.again(pool), campaign.load.requests), partial(mix.of_pool, asked)


async def _all_ready(scene: Scene, workers: Sequence[Engine]) -> None:
    async def look() -> str:
        states = await audit.states(scene.http, scene.relay)
        return "ready" if all(states.get(worker.url) == "ready" for worker in workers) else ""

    if not await audit.wait_for(look, READY):
        raise NotReady(f"the proxy does not find all workers ready: {await audit.states(scene.http, scene.relay)}")


def _about(campaign: Campaign, setup: Setup, workers: Sequence[Engine], began: float) -> Run:
    return Run(
        name=campaign.name,
        seed=setup.seed,
        commit=commit(),
        tolerance=0.0 if setup.oracle is not None else TOLERANCE,
        traced=True,
        tapped=bool(campaign.beside),
        # In a drain one is not there for a while.
        workers=[worker.url for worker in workers] if campaign.moves is not False else [],
        began=began,
        migration_limit=setup.config.migration_limit if campaign.lenient else None,
        aftermath=AFTERMATH + 2 * setup.config.stall_timeout_secs,
        patience=setup.patience,
        settings={
            MOVES: campaign.moves,
            STRIKES: True,
            "command": setup.said,
            "relay": shlex.join(setup.relay),
        },
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            yield msgspec.json.decode(line)
