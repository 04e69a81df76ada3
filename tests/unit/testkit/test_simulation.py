"""Simulated campaigns: the same seed gives the same run, faults are proven, failures become small."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from dyn_chaos.cli import main
from dyn_testkit.checkers import Finding
from dyn_testkit.simulation.campaign import Result, search, smallest, try_plan, try_seed
from dyn_testkit.simulation.goals import goals_of, met
from dyn_testkit.simulation.nemeses import KINDS, LASTING, PROOFS, Missed, Unproven, Validated
from dyn_testkit.simulation.nemeses.workers import Death
from dyn_testkit.simulation.run import run
from dyn_testkit.simulation.scenario import (
    BUILT_IN,
    Plan,
    PlannedFault,
    RequestPlan,
    Scenario,
    WorkerPlan,
    draw,
    read,
    read_plan,
)
from dyn_testkit.simulation.shrink import shrink

SMALL = Scenario(requests=(3, 5), tokens=(1, 30), span=200.0, duration=(5.0, 100.0))

DIGEST = """
import hashlib, sys
import msgspec
from dyn_testkit.simulation.campaign import quiet
from dyn_testkit.simulation.run import run
from dyn_testkit.simulation.scenario import Scenario, draw
quiet()
for seed in range(3):
    ran = run(draw(Scenario(), seed), log=True)
    log = "\\n".join(ran.log).encode()
    history = b"\\n".join(msgspec.json.encode(entry) for entry in ran.history.entries())
    print(len(ran.log), hashlib.sha256(log + history).hexdigest())
"""


def test_the_same_seed_gives_the_same_run_byte_for_byte() -> None:
    """Event logs and histories of two processes whose sets and dictionaries of strings are ordered differently."""
    told = [
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert all(int(line.split()[0]) > 1000 for line in told[0].splitlines())


def test_another_seed_gives_another_run() -> None:
    digests = {hashlib.sha256(repr(draw(Scenario(), seed)).encode()).digest() for seed in range(50)}
    assert len(digests) == 50


@pytest.mark.parametrize("seed", range(8))
def test_a_run_of_the_default_scenario(seed: int) -> None:
    result = try_seed(Scenario(), seed)
    assert result.findings == ()
    assert result.duration > 600


def one(kind: str, **changes: object) -> Plan:
    """Three workers, some streams before and after, one fault of this kind in the midst of the first ones."""
    worker = WorkerPlan(dialect="incremental", tick=2.0, tokens_per_tick=1, stream_interval=1)
    sampling = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    body = {"rid": "request-000", "input_ids": [0, 0, 5], "sampling_params": sampling, "stream": True}
    requests = tuple(
        RequestPlan(f"{number:03d}", at, {**body, "rid": f"request-{number:03d}", "input_ids": [0, number, 5]})
        for number, at in enumerate((0.0, 0.0, 0.0, 21.0, 21.0, 21.0))
    )
    router = {"stall_timeout_secs": 60.0}
    faults = (PlannedFault(kind, 0, 20.0, 300.0, 0.3),)
    plan = Plan("test", 1, (worker,) * 3, requests, faults, 0.01, 0, 0.0, router, 2000.0)
    return replace(plan, **changes)


@pytest.mark.parametrize("kind", Scenario().kinds)
def test_each_kind_of_fault_happens_and_is_survived(kind: str) -> None:
    ran = run(one(kind))
    assert ran.findings == []
    assert {fault.kind for fault in ran.history.faults} == {kind}
    assert all(fault.proof for fault in ran.history.faults)


class Idle:
    """Claims to kill."""

    faults = frozenset({"kill"})

    async def setup(self, world: object) -> None: ...

    async def invoke(self, world: object, fault: object) -> None: ...

    async def teardown(self, world: object, fault: object) -> None: ...


class Forgetful(Death):
    """Kills, and does not bring back."""

    async def teardown(self, world: object, fault: object) -> None: ...


@pytest.mark.parametrize(("nemesis", "words"), [(Idle, "nothing is to be seen"), (Forgetful, "was undone, but")])
def test_a_nemesis_that_does_not_do_what_it_says_is_caught(
    nemesis: type, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "kill", nemesis)  # type: ignore[misc]
    result = try_plan(one("kill"))
    assert [finding.check for finding in result.findings] == ["crash"]
    assert "Unproven" in result.findings[0].message
    assert words in result.findings[0].message


async def test_the_protocol_of_a_nemesis_is_held() -> None:
    world, fault = object(), PlannedFault("kill", 0, 0.0, 1.0)
    watched = Validated(Idle(), PROOFS, LASTING)
    with pytest.raises(AssertionError, match="not set up"):
        await watched.invoke(world, fault)  # type: ignore[arg-type]
    await watched.setup(world)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="set up twice"):
        await watched.setup(world)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="does not offer stall"):
        await watched.invoke(world, replace(fault, kind="stall"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing would prove kill"):
        Validated(Idle(), {}, LASTING)


def test_every_kind_has_a_proof_and_a_goal() -> None:
    assert set(KINDS) == set(PROOFS)
    assert set(KINDS) >= LASTING
    assert {f"fault: {kind}" for kind in KINDS} <= {goal for one in BUILT_IN.values() for goal in goals_of(one)}
    assert issubclass(Unproven, AssertionError)
    assert not issubclass(Missed, AssertionError)


def test_goals_are_counted() -> None:
    counts = met(run(one("kill")).history)
    assert {"a stream continued", "an attempt ended by cut", "fault: kill"} <= set(counts) <= set(goals_of(Scenario()))
    counts = met(run(one("leave")).history)
    assert counts["the client left"] == 1
    assert counts["a stream continued"] == 0


def test_a_failure_becomes_small() -> None:
    """Whatever fails because of one fault and one request ends with these, in their simplest form."""
    plan = draw(Scenario(), 3)
    plan = replace(plan, faults=(*plan.faults, PlannedFault("kill", 1, 321.5, 77.0, 0.5)))
    key = plan.requests[4].key

    def fails(candidate: Plan) -> bool:
        kills = any(fault.kind == "kill" and fault.worker == 1 for fault in candidate.faults)
        return kills and any(request.key == key for request in candidate.requests)

    small = shrink(plan, fails)
    assert [(fault.kind, fault.at, fault.duration) for fault in small.faults] == [("kill", 0.0, 1.0)]
    [request] = small.requests
    assert (request.key, request.at, len(request.body["input_ids"])) == (key, 0.0, 2)
    assert request.body["sampling_params"]["max_new_tokens"] == 1
    assert (small.latency, small.fragment, small.eos_rate) == (0.0, 0, 0.0)


def test_shrinking_keeps_to_the_same_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretended(plan: Plan) -> Result:
        return Result(plan.seed, (Finding("run", "leases" if len(plan.requests) < 2 else "tokens", ""),))

    monkeypatch.setattr("dyn_testkit.simulation.campaign.try_plan", pretended)
    assert len(smallest(draw(Scenario(), 0), (Finding("run", "tokens", ""),)).requests) == 2


def test_a_search_ends_at_the_first_failure() -> None:
    results = list(search(replace(SMALL, router={"migration_limit": 0}), range(200), processes=2))
    failed = [result for result in results if result.findings]
    assert len(failed) == 1
    assert len(results) < 200


def test_a_scenario_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('name = "mine"\nworkers = [2, 2]\nkinds = ["kill"]\nrouter = {stall_timeout_secs = 30.0}\n')
    scenario = read(path)
    assert (scenario.name, scenario.workers, scenario.kinds) == ("mine", (2, 2), ("kill",))
    assert {fault.kind for seed in range(5) for fault in draw(scenario, seed).faults} == {"kill"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wrokers = [1, 2]", "wrokers"),
        ("workers = [0, 2]", "workers: at least 1"),
        ("workers = [3, 2]", "workers: [3, 2] are no bounds"),
        ('kinds = ["kil"]', "kinds: 'kil'"),
        ('users = ["nobody"]', "users: 'nobody'"),
        ("prompt = [1, 9]", "prompt: at least 4"),
        ('span = "long"', "span"),
        ("span = inf", "span"),
        ("span = nan", "span"),
        ("patience = -1.0", "patience"),
        ("eos_rate = 2.5", "eos_rate"),
        ("streaming = -1.0", "streaming"),
        ("alike = 7.0", "alike"),
        ("tokens = [0, 0]", "tokens: at least 1"),
        ("stream_interval = [0, 1]", "stream_interval: at least 1"),
        ("fragments = []", "fragments"),
        ("fragments = [-4]", "fragments"),
        ("dialects = []", "dialects"),
        ("users = []", "users"),
        ("kinds = []", "kinds: of which"),
        ('kinds = ["kill_in_transfer"]', "kinds: kill_in_transfer befalls pairs"),
        ("prefills = [0, 2]", "prefills: at least 1"),
        ("prompt = [9000, 9000]", "prompt, tokens: together"),
        ("router = {stall_timeot_secs = 5.0}", "router: 'stall_timeot_secs'"),
        ('router = {stall_timeout_secs = "x"}', "router: "),
        ("router = {migration_limit = -3}", "router: migration_limit"),
        ('router = {host = "1.2.3.4"}', "router: 'host' is no option that a scenario chooses"),
        ("workers = [", "s.toml"),
    ],
)
def test_a_bad_scenario_names_its_field(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"s\.toml") as caught:
        read(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"faults": [{"kind": "kill", "worker": 0, "at": 1.0, "duration": 1.0, "duratoin": 1.0}]}, "duratoin"),
        ({"faults": [{"kind": "kil", "worker": 0, "at": 1.0, "duration": 1.0}]}, "faults: kind: 'kil'"),
        ({"faults": [{"kind": "kill", "worker": 99, "at": 1.0, "duration": 1.0}]}, "there is no worker 99"),
        ({"faults": [{"kind": "kill", "worker": 0, "at": 1.0, "duration": 1.0, "choice": 1.0}]}, "faults: choice"),
        ({"faults": [{"kind": "kill", "worker": 0, "at": -1.0, "duration": 1.0}]}, "at"),
        ({"workers": []}, "workers, requests"),
        ({"workers": [msgspec.to_builtins(replace(one("kill").workers[0], role="decode"))]}, "workers: role"),
        ({"requests": []}, "workers, requests"),
        ({"requests": [{"key": "0", "at": 0.0, "body": {"input_ids": [1, 2]}}]}, "requests: 0: body"),
        (
            {"requests": [{"key": "0", "at": 0.0, "body": {"input_ids": [1], "sampling_params": {}}}] * 2},
            "'0' is there",
        ),
        ({"router": {"polcy": "x"}}, "router: 'polcy'"),
    ],
)
def test_a_bad_plan_says_what_is_wrong(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "plan.json"
    whole = msgspec.to_builtins(one("kill"))
    path.write_bytes(msgspec.json.encode(whole))
    assert read_plan(path) == one("kill")
    path.write_bytes(msgspec.json.encode({**whole, **change}))
    with pytest.raises(ValueError, match=r"plan\.json") as caught:
        read_plan(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("one", ["--plan {plan} --seed 3", "--plan {plan} --seeds 3", "--seed 3 --from 7"])
def test_options_that_exclude_each_other_are_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: str
) -> None:
    monkeypatch.setattr("dyn_chaos.cli.quiet", lambda: None)  # it lasts as long as the process
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    said = CliRunner().invoke(main, ["simulate", *one.format(plan=plan).split()])
    assert said.exit_code == 2
    assert "either --" in said.output


def test_a_replayed_plan_says_that_nothing_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dyn_chaos.cli.quiet", lambda: None)  # it lasts as long as the process
    plan = tmp_path / "plan.json"
    plan.write_bytes(msgspec.json.encode(one("kill")))
    said = CliRunner().invoke(main, ["simulate", "--plan", str(plan)])
    assert said.exit_code == 0
    assert "nothing was found" in said.output


def test_a_cut_that_came_too_late_does_not_come() -> None:
    """Nothing is there to be cut while the fault lasts; what is asked for later is not cut."""
    plan = one("cut")
    [fault] = plan.faults
    calm = replace(plan, faults=(replace(fault, at=0.0, duration=1.0),), requests=plan.requests[3:])
    ran = run(calm)
    assert ran.history.faults == []
    assert [attempt["cause"] for row in ran.history.rows for attempt in row["attempts"]] == [None, None, None]
