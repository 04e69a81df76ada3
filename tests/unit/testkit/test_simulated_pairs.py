"""Prefill/decode pairs in the simulator: either leg dies in every phase, and every answer is exact or says so."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from dyn_relay.http11.client import Response as ClientResponse
from dyn_relay.http11.client import fetch
from dyn_relay.net import ConnectFailed, ConnectionBroken
from dyn_relay.relay.attempt import Attempt
from dyn_relay.relay.rooms import Rooms
from dyn_testkit.checkers import Finding, pairs
from dyn_testkit.history import Arrival, End, History, Run
from dyn_testkit.simulation.campaign import try_plan, try_seed
from dyn_testkit.simulation.goals import NEVER, OF_PAIRS, goals_of, met
from dyn_testkit.simulation.nemeses import OF_PAIRS as KINDS
from dyn_testkit.simulation.run import run
from dyn_testkit.simulation.scenario import PAIRS, Plan, PlannedFault, RequestPlan, WorkerPlan
from dyn_testkit.simulation.shrink import shrink

PREFILL, DECODE = 2, 0


@pytest.mark.parametrize("seed", range(24))
def test_a_run_of_the_scenario_of_pairs(seed: int) -> None:
    """I1, I3, I6."""
    assert try_seed(PAIRS, seed).findings == ()


def one(kind: str, worker: int) -> Plan:
    """Two workers for prompts, two for the rest; one request after the other, one fault in their midst."""
    plans = [WorkerPlan(dialect="incremental", tick=2.0, tokens_per_tick=1, stream_interval=1, role="decode")] * 2
    plans += [replace(plans[0], role="prefill")] * 2
    sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    fields = {"return_logprob": True, "logprob_start_len": 0, "return_routed_experts": True, "stream": True}
    requests = tuple(
        RequestPlan(
            f"{number:03d}",
            number * 10.0,
            {"rid": f"request-{number:03d}", "input_ids": [0, number, 5], "sampling_params": sampling, **fields},
        )
        for number in range(8)
    )
    faults = (PlannedFault(kind, worker, 15.0, 300.0, 0.3),)
    router = {"stall_timeout_secs": 60.0}
    return Plan("test", 1, tuple(plans), requests, faults, 0.01, 0, 0.0, router, 2000.0)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_each_leg_dies_in_each_phase_and_nobody_notices(role: str, kind: str) -> None:
    """A2, I1: the client gets the uninterrupted answer; the other leg is free within a second."""
    ran = run(one(kind, PREFILL if role == "prefill" else DECODE))
    assert ran.findings == []
    if (role, kind) == NEVER:
        assert ran.history.faults == []
        return
    assert met(ran.history)[f"{role}: {kind}"] == 1
    assert {row["outcome"] for row in ran.history.rows} <= {"done", "completed_here"}
    assert {record.done for record in ran.history.records.values()} == {True}


@pytest.mark.parametrize("seed", range(1, 7))
def test_an_attempt_is_not_taken_for_the_one_before_it(seed: int) -> None:
    """What is not protected keeps its name: the order to drop its first attempt must not meet the second one."""
    plan = one("partition", PREFILL)
    decode, _, *prefills = plan.workers
    penalty = {"max_new_tokens": 20, "temperature": 0, "frequency_penalty": 0.5}
    bodies = [{"rid": request.key, "input_ids": request.body["input_ids"]} for request in plan.requests]
    requests = tuple(
        replace(request, body={**body, "sampling_params": penalty})
        for request, body in zip(plan.requests, bodies, strict=True)
    )
    faults = tuple(replace(fault, worker=1) for fault in plan.faults)
    ran = run(replace(plan, seed=seed, requests=requests, faults=faults, workers=(decode, *prefills)))
    assert ran.findings == []
    assert met(ran.history)["an attempt ended by connect"] == 1


def test_every_phase_of_each_leg_is_a_goal() -> None:
    assert len(OF_PAIRS) == 2 * len(KINDS) - 1
    assert set(OF_PAIRS) <= set(goals_of(PAIRS))


def test_a_room_that_two_attempts_have_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: their schedulers die of it."""
    monkeypatch.setattr(Rooms, "draw", lambda self, rank=0, ranks=1: 7)
    found = try_plan(replace(one("kill_at_bootstrap", PREFILL), faults=())).findings
    assert {"pairs", "causes"} <= {finding.check for finding in found}
    assert any("room 7 was given to" in finding.message for finding in found)


def test_a_leg_that_is_left_at_work_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode dies, and the prefill worker's connection is kept: it waits for the other leg, or for nobody."""

    async def kept(*args: Any, **kwargs: Any) -> ClientResponse:
        answers: list[ClientResponse] = []
        ended = trio.Event()

        async def ask() -> None:
            with suppress(ConnectionBroken, ConnectFailed, trio.TooSlowError):
                answers.append(await fetch(*args, **kwargs))
            ended.set()

        trio.lowlevel.spawn_system_task(ask)
        await ended.wait()
        if not answers:
            raise ConnectionBroken("lost")
        return answers[0]

    monkeypatch.setattr("dyn_relay.relay.leg.fetch", kept)
    monkeypatch.setattr(Attempt, "at_work", ())
    found = try_plan(one("kill_at_bootstrap", DECODE)).findings
    assert any(finding.check == "pairs" and "was at work on attempt" in finding.message for finding in found)


def history(*arrivals: Arrival) -> History:
    return History(Run(prefills=["p"], workers=["d", "e"]), arrivals=list(arrivals), end=End())


@pytest.mark.parametrize(
    ("legs", "words"),
    [
        ([("p", 1, 8), ("d", 1, 8), ("p", 2, 8), ("e", 2, 8)], None),
        ([("p", 1, 8), ("d", 1, 8), ("p", 1, 8)], "room 1 was given to p, d, p"),
        ([("d", 1, 8), ("e", 1, 8)], "room 1 was given to d, e"),
        ([("p", 1, 8), ("d", 1, 9)], "asked for different things"),
        ([("d", 2**63 - 1, 8)], None),
        ([("d", 2**63, 8)], "room 9223372036854775808"),
        ([("d", 0, 8)], "room 0"),
        ([("d", 2.0**62, 8)], "room 4.6"),
        ([("d", None, 8)], "room None"),
    ],
)
def test_rooms(legs: list[tuple[str, object, int]], words: str | None) -> None:
    arrivals = [Arrival(who, 1.0, {"bootstrap_room": room, "input_ids": [last]}) for who, room, last in legs]
    found = [finding.message for finding in pairs.check(history(*arrivals))]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def _row(**more: object) -> dict[str, object]:
    attempt = {"number": 0, "worker": "w2", "url": "d", "prefill_url": "p", "rid": "r", "started": 0.0, "ended": 5.0}
    return {"time": 10.0, "rid": "r", "attempts": [{**attempt, "cause": "cut", "detail": "", **more}]}


@pytest.mark.parametrize(
    ("left", "cause", "findings"), [(15.5, "cut", 0), (16.5, "cut", 1), (None, "cut", 1), (99.0, None, 0)]
)
def test_a_lost_attempt_is_left_within_a_second(left: float | None, cause: str | None, findings: int) -> None:
    seen = history(Arrival("p", 10.0, {"rid": "r", "bootstrap_room": 1}, left=left))
    seen.rows = [_row(cause=cause)]
    found: list[Finding] = list(pairs.check(seen))
    assert len(found) == findings


def test_what_fails_stays_a_fleet_of_pairs_as_it_becomes_small() -> None:
    plan = one("kill_at_bootstrap", PREFILL)
    small = shrink(plan, lambda candidate: any(fault.kind == "kill_at_bootstrap" for fault in candidate.faults))
    assert [worker.role for worker in small.workers] == ["decode", "decode", "prefill"]
    assert len(small.requests) == 1
