"""Sidecars in the simulator: whole runs, what befalls each, and who is asked without a lease."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from dyn_relay.fleet.discovery.base import Report
from dyn_relay.fleet.discovery.leased import Leased
from dyn_relay.sidecar.sidecar import Sidecar
from dyn_testkit.checkers import exclusion, silence, tenure
from dyn_testkit.checkers.tenure import BACK, LISTED, WELL
from dyn_testkit.client import fetch
from dyn_testkit.gate import GatedNetwork
from dyn_testkit.history import Fault, History, Lease, Run, Sample
from dyn_testkit.simnet import Fragmentation, Link, SimNetwork
from dyn_testkit.simulation.campaign import try_plan, try_seed
from dyn_testkit.simulation.goals import BACK as CAME_BACK
from dyn_testkit.simulation.goals import GIVEN_BACK, LAPSED, OF_LEASES, goals_of, met
from dyn_testkit.simulation.leases import Overhearing
from dyn_testkit.simulation.nemeses import OF_SIDECARS
from dyn_testkit.simulation.run import run
from dyn_testkit.simulation.scenario import (
    SIDECARS,
    Plan,
    PlannedFault,
    RequestPlan,
    Scenario,
    WorkerPlan,
    draw,
    verify,
)

LEASE = 20.0


@pytest.mark.parametrize("seed", range(3))
def test_a_run_of_the_scenario_of_sidecars(seed: int) -> None:
    assert try_seed(replace(SIDECARS, requests=(5, 8), span=600.0, faults=(2, 5)), seed).findings == ()


def one(kind: str, *, grpc: bool = False, duration: float = 100.0) -> Plan:
    """Three workers, two behind sidecars; one request after the other; one fault of the first worker."""
    bare = WorkerPlan(dialect="incremental", tick=2.0, tokens_per_tick=1, stream_interval=1)
    workers = (replace(bare, lease=LEASE, grpc=grpc), replace(bare, lease=LEASE), bare)
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    requests = tuple(
        RequestPlan(
            f"{at:03d}",
            at * 10.0,
            {"rid": f"request-{at:03d}", "input_ids": [0, at, 5], "sampling_params": sampling, "stream": at % 2 == 0},
        )
        for at in range(24)
    )
    router = {"stall_timeout_secs": 60.0, "policy": "round_robin"}
    faults = (PlannedFault(kind, 0, 21.0, duration, 0.3),)
    return Plan("test", 1, workers, requests, faults, 0.01, 0, 0.0, router, 2000.0)


#: By kind of fault: is its worker away because of it, and how its lease ends.
ENDS = {
    "kill": GIVEN_BACK,
    "kill_sidecar": LAPSED,
    "stall_sidecar": LAPSED,
    "partition": LAPSED,
    "sever": GIVEN_BACK,
    "stall": None,
}


@pytest.mark.parametrize("grpc", [False, True], ids=["http", "grpc"])
@pytest.mark.parametrize("kind", ENDS)
def test_what_befalls_a_sidecar_or_its_engine_ends_its_lease_and_it_comes_back(kind: str, grpc: bool) -> None:
    ran = run(one(kind, grpc=grpc, duration=200.0))
    assert ran.findings == []
    [fault] = ran.history.faults
    assert (fault.kind, fault.target, bool(fault.proof)) == (kind, "http://w0:31000", True)
    counts = met(ran.history)
    assert [counts[name] for name in (LAPSED, GIVEN_BACK, CAME_BACK)] == [
        ENDS[kind] == LAPSED,
        ENDS[kind] == GIVEN_BACK,
        ENDS[kind] is not None,
    ]
    assert counts[f"an attempt at a sidecar ended by {kind}"]
    assert {row["outcome"] for row in ran.history.rows} <= {"done", "completed_here"}


def test_a_partition_shorter_than_the_lease_takes_nothing() -> None:
    ran = run(one("partition", duration=LEASE / 2))
    assert (ran.findings, met(ran.history)[CAME_BACK]) == ([], 0)


@pytest.mark.parametrize("kind", sorted(OF_SIDECARS))
def test_who_has_no_sidecar_suffers_nothing_of_them(kind: str) -> None:
    plan = one(kind)
    ran = run(replace(plan, faults=tuple(replace(fault, worker=2) for fault in plan.faults)))
    assert (ran.findings, ran.history.faults) == ([], [])


def test_a_run_is_the_same_again() -> None:
    plan = one("stall_sidecar", grpc=True)
    first, again = run(plan, log=True), run(plan, log=True)
    assert first.log == again.log
    assert len(first.log) > 500


def test_the_share_is_that_of_the_scenario() -> None:
    workers = [worker for seed in range(200) for worker in draw(SIDECARS, seed).workers]
    leased = [worker.lease for worker in workers if worker.lease]
    assert 0.7 < len(leased) / len(workers) < 0.9
    assert SIDECARS.lease[0] <= min(leased) <= max(leased) <= SIDECARS.lease[1]
    assert any(worker.lease and worker.grpc for worker in workers)
    assert not any(worker.lease for seed in range(20) for worker in draw(Scenario(), seed).workers)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (replace(SIDECARS, sidecars=0.0), "kinds: kill_sidecar befalls sidecars, and there are none"),
        (replace(SIDECARS, lease=(0.0, 5.0)), "lease: sidecars need one that lasts"),
        (replace(SIDECARS, prefills=(1, 2)), "sidecars: pairs are reached without here"),
    ],
)
def test_a_bad_scenario_names_its_field(scenario: Scenario, words: str) -> None:
    verify(SIDECARS)
    with pytest.raises(ValueError, match=words):
        verify(scenario)


def test_what_becomes_of_leases_is_a_goal() -> None:
    assert {*OF_LEASES} <= {*goals_of(SIDECARS)}
    assert not {*OF_LEASES} & {*goals_of(Scenario())}


# -- bugs that must be found


def test_a_lease_that_never_lapses_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def kept(self: Leased, report: Report) -> None:
        self._report = report
        report(self.named)
        await trio.sleep_forever()

    monkeypatch.setattr(Leased, "run", kept)
    found = try_plan(one("kill_sidecar")).findings
    assert any(finding.check == "tenure" and "the router lists it" in finding.message for finding in found)


def test_an_engine_s_death_that_withdraws_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: Sidecar, *args: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(Sidecar, "_end_with_engine", never)
    found = try_plan(one("kill")).findings
    assert any(finding.check == "tenure" and "after its engine's death" in finding.message for finding in found)


# -- the checkers


def history(
    *leases: tuple[float, float],
    faults: tuple[Fault, ...] = (),
    end: float = 500.0,
    well: int = 1,
    listed: tuple[float, ...] = (),
) -> History:
    """A worker `s` with these (time, seconds) of leases."""
    return History(
        Run(workers=["s", "t"], notice=1.0),
        faults=list(faults),
        leases=[Lease("s", at, seconds) for at, seconds in leases],
        samples=[*(Sample(at, {LISTED + "s": 1.0}) for at in listed), Sample(end, {WELL + "s": float(well)})],
    )


def fault(at: float, until: float, *harms: str) -> Fault:
    return Fault("f", "s", at, until, harms=harms or ("attempts", "lease"))  # type: ignore[arg-type]


STEADY = [(float(at), 10.0) for at in range(0, 500, 5)]


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (history(*STEADY), None),
        (history(*STEADY, well=0), "router gives it nothing"),
        (history(*STEADY[:20], *STEADY[40:], faults=(fault(90, 195),), listed=(104.0, 200.0)), None),
        (history(*STEADY[:20], *STEADY[40:], faults=(fault(90, 195),), listed=(106.0,)), "the router lists it"),
        # A list is read a little after it was asked for.
        (history(*STEADY[:20], *STEADY[40:], faults=(fault(90, 195),), listed=(199.5,)), None),
        (history(*STEADY[:20], *STEADY[40:], faults=(fault(90, 195),), listed=(198.5,)), "the router lists it"),
        (history(*STEADY, well=0, faults=(fault(400, 481, "dials"),)), None),
        (history(*STEADY, well=0, faults=(fault(400, 470, "dials"),)), "router gives it nothing"),
        (history(*STEADY[:20]), "s had no lease from 105.0 s on, and nothing took it"),
        (history(*STEADY[:20], (100.0, 0.0), *STEADY[22:]), "s had no lease from 100.0 s on"),
        (history(*STEADY[:20], *STEADY[40:], faults=(fault(90, 195),)), None),
        (history(*STEADY[:20], *STEADY[40:], faults=(fault(90, 195, "attempts", "health"),)), "nothing took it"),
        (history(*STEADY[:20], *STEADY[40:], faults=(fault(90, 94),)), "s had no lease from 105.0 s on"),
        (history(*STEADY[:20], *STEADY[40:], faults=(fault(90, 200 - BACK - 1),)), "s was well for 21.0 s"),
        (history(*STEADY, faults=(fault(90, 190, "lease", "engine"),)), "s had a lease 15 s after its engine's death"),
        (history(*STEADY[:20], *STEADY[40:], faults=(fault(96, 200, "lease", "engine"),)), None),
        (history(*STEADY[:20], *STEADY[40:], faults=(fault(96, 225, "lease", "engine"),)), "s had a lease 15 s after"),
        (history(*STEADY[:20], *STEADY[40:], faults=(fault(90, 96), fault(150, 199, "health"))), None),
    ],
)
def test_absences(seen: History, words: str | None) -> None:
    found = [finding.message for finding in tenure.check(seen)]
    assert len(found) == (words is not None) or (words and any(words in one for one in found))
    assert words is None or any(words in one for one in found)


def row(*attempts: tuple[str, float, str | None]) -> dict[str, Any]:
    fields = [
        {"number": number, "worker": url, "url": url, "started": at, "ended": at + 1, "cause": cause, "detail": ""}
        for number, (url, at, cause) in enumerate(attempts)
    ]
    return {"time": 0.0, "rid": "r", "attempts": fields}


@pytest.mark.parametrize(
    ("at", "findings"), [(0.0, 0), (14.9, 0), (15.1, 1), (59.9, 1), (60.0, 0), (500.0, 0), (-1.0, 1)]
)
def test_nobody_is_asked_without_a_lease(at: float, findings: int) -> None:
    seen = history((0, 10), (5, 10), *STEADY[12:], faults=(fault(0, 50),))
    seen.rows = [row(("s", at, None), ("t", at, None))]
    assert len(list(tenure.check(seen))) == findings


@pytest.mark.parametrize(
    ("attempts", "findings"),
    [
        ([("s", 1, "cut"), ("s", 2, None)], 1),
        ([("s", 1, "cut"), ("t", 2, "cut"), ("s", 3, None)], 0),
        ([("s", 1, "cut"), ("s", 61, None)], 0),  # another lease
        ([("t", 17, "cut"), ("t", 18, None)], 0),  # nobody else is there
        ([("t", 1, "cut"), ("t", 18, None)], 0),
        ([("t", 61, "cut"), ("t", 62, None)], 1),
    ],
)
def test_whoever_is_away_is_nobody_to_go_to(attempts: list[tuple[str, float, str | None]], findings: int) -> None:
    seen = history((0, 10), (5, 10), *STEADY[12:], faults=(fault(0, 50),))
    seen.samples, seen.rows = [], [row(*attempts)]
    assert len(list(exclusion.check(seen))) == findings


@pytest.mark.parametrize(
    ("looks", "findings"),
    [
        ([(59.0, 1.0), (61.5, 0.0)], 0),  # what it was before is no matter
        ([(61.5, 1.0)], 1),
        ([(62.5, 1.0)], 0),
        ([(61.5, 1.0), (61.8, 0.0)], 1),
    ],
)
def test_whoever_is_back_is_gone_to_once_the_router_has_found_it_well(
    looks: list[tuple[float, float]], findings: int
) -> None:
    seen = history((0, 10), (5, 10), *STEADY[12:], faults=(fault(0, 50),))
    seen.samples = [Sample(at, {tenure.WELL + "s": well}) for at, well in looks]
    seen.rows = [row(("t", 61, "cut"), ("t", 62, None))]
    assert len(list(exclusion.check(seen))) == findings


@pytest.mark.parametrize(
    ("migratable", "grpc", "harms", "findings"),
    [
        (True, True, (), 1),
        (False, False, (), 1),
        (False, True, (), 0),  # a gateway answers for its engine
        (False, True, ("lease",), 1),
    ],
)
def test_who_is_answered_for_is_waited_for(migratable: bool, grpc: bool, harms: tuple[str, ...], findings: int) -> None:
    seen = history(faults=(fault(10, 200, "health", "answers", *harms),))
    seen.run = replace(seen.run, silence=60.0, grpc=["s"] if grpc else [])
    seen.rows = [row(("s", 1, None)) | {"migratable": migratable}]
    seen.rows[0]["attempts"][0]["ended"] = 100.0
    assert len(list(silence.check(seen))) == findings


# -- what it is made of


@pytest.mark.parametrize("piece", [None, 1, 7])
async def test_leases_are_overheard_as_they_are_read(autojump_clock: object, piece: int | None) -> None:
    network = SimNetwork(1, Link(fragmentation=Fragmentation(piece)))
    heard = Overhearing(network)
    listener = await heard.listen("proxy", 1)

    async def serve() -> None:
        while True:
            connection = await listener.accept()
            while await connection.receive():
                pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        for path, body in (
            ("/workers", {"url": "http://s:1", "lease_secs": 7.5}),
            ("/generate", {"input_ids": [1]}),
            ("/workers", {"url": "http://s:1", "lease_secs": 0}),
        ):
            with trio.move_on_after(1):
                await fetch(network, "http://proxy:1", path, body)
        nursery.cancel_scope.cancel()
    assert [(one.worker, one.seconds) for one in heard.leases] == [("http://s:1", 7.5), ("http://s:1", 0)]
    assert math.isclose(heard.leases[1].at - heard.leases[0].at, 2.0, abs_tol=0.1)


async def test_who_is_stopped_is_dialled_and_sent_to_and_says_nothing(autojump_clock: object) -> None:
    network = SimNetwork(1)
    gate = GatedNetwork(network.host("side"))
    listener = await gate.listen("side", 1)
    client = await network.connect("side", 1)
    mine = await listener.accept()
    got: list[bytes] = []

    async def read() -> None:
        while data := await mine.receive(3):
            got.append(data)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.sleep(1)
        gate.shut()
        await client.send(b"abcdef")
        other = await network.connect("side", 1)
        for waits in (listener.accept, lambda: mine.send(b"x"), lambda: gate.connect("side", 1)):
            with trio.move_on_after(1) as scope:
                await waits()
            assert scope.cancelled_caught
        assert (got, mine.offer(b"x"), mine.quiet()) == ([], False, False)
        gate.open()
        await trio.sleep(1)
        assert b"".join(got) == b"abcdef"
        assert mine.offer(b"x")
        assert await client.receive() == b"x"
        other.close()
        client.close()
