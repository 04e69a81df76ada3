"""Scenarios: what may happen in a run, as a small value, and the plan of one run that a seed draws from it.

A `Scenario` says how many workers, which requests, which faults, within which bounds; it is also a TOML file. A seed
turns it into a `Plan`, in which nothing is left to chance: every request and every fault has its time and its choice.
Plans are what runs, what is saved, and what is made smaller once one has failed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dyn_relay.config import Config, ConfigError
from dyn_testkit.simulation.nemeses import KINDS, OF_GRPC, OF_PAIRS, OF_SIDECARS
from dyn_testkit.users import USERS, Body, Wish, over_grpc
from dyn_testkit.worker import Dialect
from dyn_testkit.worker.options import Disaggregation

Count = Annotated[int, Meta(ge=0, le=10**6)]
#: Virtual seconds.
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
#: Bounds of a number, both included.
Whole = tuple[Count, Count]
Real = tuple[Seconds, Seconds]

DIALECTS: tuple[Dialect, ...] = ("cumulative", "incremental", "mixed")
VOCABULARY = 512
CONTEXT = 8192
#: Prompts begin with a number of their own, so that none is the beginning of another.
_NUMBERED = 4


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may happen. Times in virtual seconds; pairs are bounds."""

    name: str = "default"
    workers: Whole = (3, 5)
    #: Workers for prompts alone; with some, the others are for the rest of an answer.
    prefills: Whole = (0, 0)
    #: The share of workers that the router, or the sidecar before it, reaches over gRPC.
    grpc: Share = 0.0
    #: The share of workers before which a sidecar stands, and the seconds of its lease.
    sidecars: Share = 0.0
    lease: Real = (10.0, 120.0)
    dialects: Annotated[tuple[Dialect, ...], Meta(min_length=1)] = DIALECTS
    #: Seconds a token takes on a worker. One stands for some hundred of a real rollout, which also lasts minutes; but
    #: 32 of them, the cadence that the router asks for, must come within a stall timeout, for it is only told of one.
    tick: Real = (2.0, 12.0)
    #: Tokens a forward pass gives; tokens between two events.
    tokens_per_tick: Whole = (1, 3)
    stream_interval: Whole = (1, 4)
    eos_rate: Share = 0.004
    requests: Whole = (8, 20)
    #: Requests come, and faults begin, within this time.
    span: Seconds = 1200.0
    prompt: Whole = (5, 40)
    tokens: Whole = (1, 120)
    users: Annotated[tuple[str, ...], Meta(min_length=1)] = tuple(USERS)
    streaming: Share = 0.6
    experts: Share = 0.3
    faults: Whole = (1, 9)
    kinds: tuple[str, ...] = tuple(kind for kind in KINDS if kind not in OF_PAIRS | OF_GRPC | OF_SIDECARS)
    #: The share of runs in which all faults are of one kind: what befalls a request once, befalls it again.
    alike: Share = 0.3
    #: Seconds until a fault is undone.
    duration: Real = (5.0, 1500.0)
    #: Seconds one way, between any two hosts.
    latency: Real = (0.0, 0.05)
    #: The largest piece that one read gives, one of these; 0: all there is.
    fragments: Annotated[tuple[Count, ...], Meta(min_length=1)] = (0, 0, 0, 0, 0, 0, 2000, 300)
    #: Options of the router. A request that it cannot continue has nobody else to turn to: it waits for a worker that
    #: is well and says nothing, until a timeout of its own.
    router: dict[str, Any] = msgspec.field(
        default_factory=lambda: {
            "health_check_interval_secs": 60.0,
            "inhibited_duration_secs": 60.0,
            "request_timeout_secs": 5400.0,
            "stall_timeout_secs": 600.0,
        }
    )
    #: Seconds within which all must have ended once the last fault is undone.
    patience: Seconds = 7200.0


class WorkerPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker."""

    dialect: Dialect
    tick: Seconds
    tokens_per_tick: Annotated[int, Meta(ge=1)]
    stream_interval: Annotated[int, Meta(ge=1)]
    #: What it is for, if workers are pairs.
    role: Disaggregation = "null"
    #: The router, or its sidecar, reaches it over gRPC.
    grpc: bool = False
    #: Of the lease that its sidecar takes; 0: it has no sidecar.
    lease: Seconds = 0.0


class RequestPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of one client."""

    key: str
    at: Seconds
    body: Body


class PlannedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault. `choice` is a number in [0, 1) for whatever else its kind has to choose.

    A kind that strikes no worker (clients, all workers) ignores `worker`.
    """

    kind: str
    worker: int
    at: Seconds
    duration: Seconds
    choice: float = 0.0


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run, in every detail. `seed` steers what has no plan: cuts of reads, the order of tasks, the router."""

    scenario: str
    seed: int
    workers: tuple[WorkerPlan, ...]
    requests: tuple[RequestPlan, ...]
    faults: tuple[PlannedFault, ...]
    latency: Seconds
    fragment: Count
    eos_rate: Share
    router: dict[str, Any]
    patience: Seconds


#: Pairs, and what befalls them.
PAIRS = Scenario(
    name="pairs",
    workers=(2, 3),
    prefills=(2, 3),
    faults=(2, 20),
    kinds=(
        *sorted(OF_PAIRS),
        "kill",
        "stall",
        "cut",
        "late_cut",
        "error",
        "partition",
        "reset",
        "leave",
        "abort_storm",
    ),
)


#: What gRPC carries of what users ask for, and what befalls calls.
GRPC = Scenario(
    name="grpc",
    grpc=0.7,
    users=tuple(user for user in USERS if user != "greedy"),
    experts=0.0,
    kinds=tuple(kind for kind in KINDS if kind not in OF_PAIRS | OF_SIDECARS),
)

#: Sidecars before engines of both kinds, some workers without, and what befalls them.
SIDECARS = msgspec.structs.replace(
    GRPC,
    name="sidecars",
    grpc=0.4,
    sidecars=0.8,
    kinds=tuple(kind for kind in KINDS if kind not in OF_PAIRS),
)

#: By name; "" is the default.
BUILT_IN: Mapping[str, Scenario] = {"": Scenario()} | {one.name: one for one in (PAIRS, GRPC, SIDECARS)}


def read(path: Path) -> Scenario:
    """A scenario from a TOML file. Raises `ValueError` that names the key."""
    try:
        scenario = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Scenario)
        verify(scenario)
    except (ValueError, msgspec.ValidationError) as error:  # of TOML and UTF-8, too
        raise ValueError(f"{path}: {error}") from error
    return scenario


def read_plan(path: Path) -> Plan:
    """A plan from a JSON file. Raises `ValueError` that says what is wrong with it."""
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=Plan)
        verify_plan(plan)
    except (ValueError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return plan


#: The least of a field's lower bound: an answer of no tokens has no place that could be cut.
_LEAST = {"workers": 1, "requests": 1, "prompt": _NUMBERED, "tokens": 1, "tokens_per_tick": 1, "stream_interval": 1}
#: Options of the router that a run chooses itself.
_OURS = frozenset(
    {"host", "port", "worker_urls", "pd_disaggregation", "prefill", "decode", "seed", "log_level", "trace_file"}
)


def verify(scenario: Scenario) -> None:
    """Raise `ValueError` that names the field if its value cannot be used."""
    _known("users", scenario.users, USERS)
    _known("kinds", scenario.kinds, KINDS)
    if scenario.faults[1] and not scenario.kinds:
        raise ValueError("kinds: of which kinds shall the faults be?")
    for field in msgspec.structs.fields(scenario):
        value = getattr(scenario, field.name)
        if field.type not in (Whole, Real):
            continue
        if not value[0] <= value[1]:
            raise ValueError(f"{field.name}: {list(value)} are no bounds")
        if value[0] < _LEAST.get(field.name, 0):
            raise ValueError(f"{field.name}: at least {_LEAST[field.name]}, not {value[0]:g}")
    if scenario.prefills[1] and not scenario.prefills[0]:
        raise ValueError("prefills: at least 1, or none at all")
    if OF_PAIRS & {*scenario.kinds} and not scenario.prefills[1]:
        raise ValueError(f"kinds: {min(OF_PAIRS & {*scenario.kinds})} befalls pairs, and there are no prefills")
    if OF_GRPC & {*scenario.kinds} and not scenario.grpc:
        raise ValueError(f"kinds: {min(OF_GRPC & {*scenario.kinds})} befalls calls, and no worker is reached over gRPC")
    if OF_SIDECARS & {*scenario.kinds} and not scenario.sidecars:
        raise ValueError(f"kinds: {min(OF_SIDECARS & {*scenario.kinds})} befalls sidecars, and there are none")
    if scenario.sidecars and not scenario.lease[0]:
        raise ValueError("lease: sidecars need one that lasts")
    if scenario.sidecars and scenario.prefills[1]:
        raise ValueError("sidecars: pairs are reached without here")
    if scenario.prompt[1] + scenario.tokens[1] > CONTEXT:
        raise ValueError(f"prompt, tokens: together beyond a context of {CONTEXT}")
    _verify_router(scenario.router)


def verify_plan(plan: Plan) -> None:
    """Raise `ValueError` that names what cannot be run."""
    _known("faults: kind", [fault.kind for fault in plan.faults], KINDS)
    if not plan.workers or not plan.requests:
        raise ValueError("workers, requests: at least one of each")
    roles = {worker.role for worker in plan.workers}
    if roles not in ({"null"}, {"prefill", "decode"}):
        raise ValueError(f"workers: role: prefill and decode, or null; not {', '.join(sorted(roles))}")
    for fault in plan.faults:
        if not 0 <= fault.worker < len(plan.workers):
            raise ValueError(f"faults: worker: there is no worker {fault.worker} among {len(plan.workers)}")
        if not 0 <= fault.choice < 1:
            raise ValueError(f"faults: choice: {fault.choice} is not in [0, 1)")
    keys = [request.key for request in plan.requests]
    if len(set(keys)) < len(keys):
        raise ValueError(f"requests: key: {max(keys, key=keys.count)!r} is there twice")
    for request in plan.requests:
        if [type(request.body.get(name)) for name in ("input_ids", "sampling_params")] != [list, dict]:
            raise ValueError(f"requests: {request.key}: body: no input_ids, or no sampling_params")
    _verify_router(plan.router)


def _known(field: str, values: Iterable[str], known: Collection[str]) -> None:
    for value in values:
        if value not in known:
            raise ValueError(f"{field}: {value!r} is none of {', '.join(known)}")


def _verify_router(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _OURS or name not in Config.__dataclass_fields__:
            raise ValueError(f"router: {name!r} is no option" + (" that a scenario chooses" if name in _OURS else ""))
    try:
        msgspec.convert(dict(options), Config)
    except (ConfigError, msgspec.ValidationError) as error:
        raise ValueError(f"router: {error}") from error


def draw(scenario: Scenario, seed: int) -> Plan:
    """The plan of one seed. The same on every machine."""
    random = Random(f"{scenario.name}/{seed}")
    paired = scenario.prefills[1] > 0
    count = random.randint(*scenario.workers)
    workers = tuple(_worker(scenario, random, "decode" if paired else "null") for _ in range(count))
    if paired:
        workers += tuple(_worker(scenario, random, "prefill") for _ in range(random.randint(*scenario.prefills)))
    if scenario.grpc:
        workers = tuple(msgspec.structs.replace(one, grpc=random.random() < scenario.grpc) for one in workers)
    if scenario.sidecars:
        workers = tuple(_beside(scenario, random, one) for one in workers)
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


def _worker(scenario: Scenario, random: Random, role: Disaggregation) -> WorkerPlan:
    return WorkerPlan(
        dialect=random.choice(scenario.dialects),
        tick=round(random.uniform(*scenario.tick), 3),
        tokens_per_tick=random.randint(*scenario.tokens_per_tick),
        stream_interval=random.randint(*scenario.stream_interval),
        role=role,
    )


def _beside(scenario: Scenario, random: Random, worker: WorkerPlan) -> WorkerPlan:
    lease = round(random.uniform(*scenario.lease), 1) if random.random() < scenario.sidecars else 0.0
    return msgspec.structs.replace(worker, lease=lease)


def _request(scenario: Scenario, random: Random, number: int) -> RequestPlan:
    prompt = [number // VOCABULARY, number % VOCABULARY, *(random.randrange(3, VOCABULARY) for _ in range(2))]
    prompt += [random.randrange(3, VOCABULARY) for _ in range(random.randint(*scenario.prompt) - _NUMBERED)]
    wish = Wish(
        prompt=prompt,
        tokens=random.randint(*scenario.tokens),
        rid=f"request-{number:03d}",
        stream=random.random() < scenario.streaming,
        experts=random.random() < scenario.experts,
        vocabulary=VOCABULARY,
    )
    at = round(random.uniform(0, scenario.span), 3)
    body = USERS[random.choice(scenario.users)](wish, random)
    return RequestPlan(key=f"{number:03d}", at=at, body=over_grpc(body) if scenario.grpc else body)


def _fault(scenario: Scenario, kinds: tuple[str, ...], random: Random, workers: int) -> PlannedFault:
    return PlannedFault(
        kind=random.choice(kinds),
        worker=random.randrange(workers),
        at=round(random.uniform(0, scenario.span), 3),
        duration=round(random.uniform(*scenario.duration), 3),
        choice=round(random.random(), 6),
    )
