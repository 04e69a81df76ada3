"""Scenarios: what may happen in a run, as a small value, and the plan of one run that a seed draws from it.

A `Scenario` says how many workers, which requests, which faults, within which bounds; it is also a TOML file. A seed
turns it into a `Plan`, in which nothing is left to chance: every request and every fault has its time and its choice.
Plans are what runs, what is saved, and what is made smaller once one has failed.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from dyn_testkit.simulation.nemeses import KINDS
from dyn_testkit.users import USERS, Body, Wish
from dyn_testkit.worker import Dialect

#: Bounds of a number, both included.
Whole = tuple[int, int]
Real = tuple[float, float]

DIALECTS: tuple[Dialect, ...] = ("cumulative", "incremental", "mixed")
VOCABULARY = 512
#: Prompts begin with a number of their own, so that none is the beginning of another.
_NUMBERED = 4


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may happen. Times in virtual seconds; pairs are bounds."""

    name: str = "default"
    workers: Whole = (3, 5)
    dialects: tuple[Dialect, ...] = DIALECTS
    #: Seconds a token takes on a worker. One stands for some hundred of a real rollout, which also lasts minutes; but
    #: 32 of them, the cadence that the router asks for, must come within a stall timeout, for it is only told of one.
    tick: Real = (2.0, 12.0)
    #: Tokens a forward pass gives; tokens between two events.
    tokens_per_tick: Whole = (1, 3)
    stream_interval: Whole = (1, 4)
    eos_rate: float = 0.004
    requests: Whole = (8, 20)
    #: Requests come, and faults begin, within this time.
    span: float = 1200.0
    prompt: Whole = (5, 40)
    tokens: Whole = (1, 120)
    users: tuple[str, ...] = tuple(USERS)
    streaming: float = 0.6
    faults: Whole = (1, 9)
    kinds: tuple[str, ...] = tuple(KINDS)
    #: The share of runs in which all faults are of one kind: what befalls a request once, befalls it again.
    alike: float = 0.3
    #: Seconds until a fault is undone.
    duration: Real = (5.0, 1500.0)
    #: Seconds one way, between any two hosts.
    latency: Real = (0.0, 0.05)
    #: The largest piece that one read gives, one of these; 0: all there is.
    fragments: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 2000, 300)
    #: Options of the router.
    router: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"health_check_interval_secs": 60.0, "stall_timeout_secs": 600.0}
    )
    #: Seconds within which all must have ended once the last fault is undone.
    patience: float = 7200.0


class WorkerPlan(msgspec.Struct, frozen=True):
    """One worker."""

    dialect: Dialect
    tick: float
    tokens_per_tick: int
    stream_interval: int


class RequestPlan(msgspec.Struct, frozen=True):
    """One request of one client."""

    key: str
    at: float
    body: Body


class PlannedFault(msgspec.Struct, frozen=True):
    """One fault. `choice` is a number in [0, 1) for whatever else its kind has to choose.

    A kind that strikes no worker (clients, all workers) ignores `worker`.
    """

    kind: str
    worker: int
    at: float
    duration: float
    choice: float = 0.0


class Plan(msgspec.Struct, frozen=True):
    """One run, in every detail. `seed` steers what has no plan: cuts of reads, the order of tasks, the router."""

    scenario: str
    seed: int
    workers: tuple[WorkerPlan, ...]
    requests: tuple[RequestPlan, ...]
    faults: tuple[PlannedFault, ...]
    latency: float
    fragment: int
    eos_rate: float
    router: dict[str, Any]
    patience: float


def read(path: Path) -> Scenario:
    """A scenario from a TOML file. Raises `ValueError` that names the key."""
    try:
        scenario = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Scenario)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    verify(scenario, str(path))
    return scenario


def verify(scenario: Scenario, source: str = "scenario") -> None:
    """Raise `ValueError` that names the field if its value cannot be used."""
    for name, known in (("users", USERS), ("kinds", KINDS)):
        unknown = [item for item in getattr(scenario, name) if item not in known]
        if unknown:
            raise ValueError(f"{source}: {name}: {unknown[0]!r} is none of {', '.join(known)}")
    for field in msgspec.structs.fields(scenario):
        value = getattr(scenario, field.name)
        if field.type in (Whole, Real) and not 0 <= value[0] <= value[1]:
            raise ValueError(f"{source}: {field.name}: {list(value)} are no bounds")
    for name, least in (("workers", 1), ("requests", 1), ("prompt", _NUMBERED), ("tokens_per_tick", 1)):
        if getattr(scenario, name)[0] < least:
            raise ValueError(f"{source}: {name}: at least {least}, not {getattr(scenario, name)[0]}")


def draw(scenario: Scenario, seed: int) -> Plan:
    """The plan of one seed. The same on every machine."""
    random = Random(f"{scenario.name}/{seed}")
    workers = tuple(_worker(scenario, random) for _ in range(random.randint(*scenario.workers)))
    requests = [_request(scenario, random, number) for number in range(random.randint(*scenario.requests))]
    kinds = scenario.kinds
    if kinds and random.random() < scenario.alike:
        kinds = (random.choice(kinds),)
    faults = [_fault(scenario, kinds, random, len(workers)) for _ in range(random.randint(*scenario.faults))]
    return Plan(
        scenario=scenario.name,
        seed=seed,
        workers=workers,
        requests=tuple(sorted(requests, key=lambda request: request.at)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        latency=round(random.uniform(*scenario.latency), 4),
        fragment=random.choice(scenario.fragments),
        eos_rate=scenario.eos_rate,
        router=scenario.router,
        patience=scenario.patience,
    )


def _worker(scenario: Scenario, random: Random) -> WorkerPlan:
    return WorkerPlan(
        dialect=random.choice(scenario.dialects),
        tick=round(random.uniform(*scenario.tick), 3),
        tokens_per_tick=random.randint(*scenario.tokens_per_tick),
        stream_interval=random.randint(*scenario.stream_interval),
    )


def _request(scenario: Scenario, random: Random, number: int) -> RequestPlan:
    prompt = [number // VOCABULARY, number % VOCABULARY, *(random.randrange(3, VOCABULARY) for _ in range(2))]
    prompt += [random.randrange(3, VOCABULARY) for _ in range(random.randint(*scenario.prompt) - _NUMBERED)]
    wish = Wish(
        prompt=prompt,
        tokens=random.randint(*scenario.tokens),
        rid=f"request-{number:03d}",
        stream=random.random() < scenario.streaming,
        vocabulary=VOCABULARY,
    )
    return RequestPlan(
        key=f"{number:03d}",
        at=round(random.uniform(0, scenario.span), 3),
        body=USERS[random.choice(scenario.users)](wish, random),
    )


def _fault(scenario: Scenario, kinds: tuple[str, ...], random: Random, workers: int) -> PlannedFault:
    return PlannedFault(
        kind=random.choice(kinds),
        worker=random.randrange(workers),
        at=round(random.uniform(0, scenario.span), 3),
        duration=round(random.uniform(*scenario.duration), 3),
        choice=round(random.random(), 6),
    )
