"""Workers over gRPC in the simulator: whole runs, and each kind of fault that only calls know."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from dyn_testkit.checkers import Finding
from dyn_testkit.history import Fault
from dyn_testkit.simulation.campaign import try_seed
from dyn_testkit.simulation.nemeses import OF_GRPC
from dyn_testkit.simulation.nemeses.cuts import CUTS
from dyn_testkit.simulation.run import Ran, run
from dyn_testkit.simulation.scenario import (
    GRPC,
    Plan,
    PlannedFault,
    RequestPlan,
    Scenario,
    WorkerPlan,
    draw,
    read,
    verify,
)


@pytest.mark.parametrize("seed", range(10))
def test_a_run_of_the_scenario_of_grpc(seed: int) -> None:
    assert try_seed(GRPC, seed).findings == ()


def one(number: int, *, grpc: tuple[bool, ...] = (True, True, False)) -> Plan:
    """Three workers, two over gRPC; one request after the other; one call ends as this entry of the table says."""
    how = WorkerPlan(dialect="cumulative", tick=2.0, tokens_per_tick=1, stream_interval=1)
    workers = tuple(replace(how, grpc=over) for over in grpc)
    sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    requests = tuple(
        RequestPlan(
            f"{at:03d}",
            at * 10.0,
            {
                "rid": f"request-{at:03d}",
                "input_ids": [0, at, 5],
                "sampling_params": sampling,
                "return_logprob": True,
                "stream": at % 2 == 0,
            },
        )
        for at in range(8)
    )
    choice = (number + 0.5) / len(CUTS["call"])
    faults = (PlannedFault("call", 0, 5.0, 300.0, choice),)
    return Plan("test", 1, workers, requests, faults, 0.01, 0, 0.0, {"stall_timeout_secs": 60.0}, 2000.0)


def struck(ran: Ran) -> list[Fault]:
    return list(ran.history.faults)


@pytest.mark.parametrize("number", range(len(CUTS["call"])), ids=lambda at: "{}@{}".format(*reversed(spell(at))))
def test_nobody_notices_how_a_call_ends(number: int) -> None:
    ran = run(one(number))
    assert ran.findings == []
    [fault] = struck(ran)
    assert fault.target == "grpc://w0:30001"
    assert {worker for row in ran.history.rows for worker in (one["url"] for one in row["attempts"])} == {
        "grpc://w0:30001",
        "grpc://w1:30001",
        "http://w2:30000",
    }


def spell(number: int) -> tuple[str, str]:
    where, what = CUTS["call"][number]
    return f"{where.spot.value}{where.token}", f"{what.kind.value}{what.code or ''}"


def test_a_fault_of_calls_never_strikes_a_worker_over_http() -> None:
    ran = run(one(0, grpc=(False, True, True)))
    assert (ran.findings, struck(ran)) == ([], [])


def test_a_run_is_the_same_again() -> None:
    plan = draw(GRPC, 4)
    assert any(worker.grpc for worker in plan.workers)
    first, again = run(plan, log=True), run(plan, log=True)
    assert first.log == again.log
    assert len(first.log) > 1000


def test_the_share_is_that_of_the_scenario() -> None:
    plans = [draw(GRPC, seed) for seed in range(200)]
    workers = [worker.grpc for plan in plans for worker in plan.workers]
    assert 0.6 < sum(workers) / len(workers) < 0.8
    none = [worker.grpc for seed in range(20) for worker in draw(Scenario(), seed).workers]
    assert not any(none)
    spelled = {name for plan in plans for request in plan.requests for name in request.body["sampling_params"]}
    assert not spelled & {"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens"}


def test_faults_of_calls_want_calls(tmp_path: Path) -> None:
    verify(GRPC)
    with pytest.raises(ValueError, match=r"kinds: call befalls calls, and no worker is reached over gRPC"):
        verify(replace(GRPC, grpc=0.0))
    path = tmp_path / "scenario.toml"
    path.write_text('grpc = 1.0\nkinds = ["call"]\nexperts = 0.0\n')
    assert read(path).grpc == 1.0
    path.write_text("grpc = 1.5\n")
    with pytest.raises(ValueError, match="grpc"):
        read(path)
    assert {"call"} == OF_GRPC
    assert not OF_GRPC & {*Scenario().kinds}
    assert {*GRPC.kinds} > OF_GRPC


def test_what_asks_for_nothing_is_the_same_over_grpc() -> None:
    from dyn_testkit.checkers import requests
    from dyn_testkit.history import Arrival, History

    ran = run(replace(one(0), faults=()))
    history: History = ran.history
    assert list(requests.check(history)) == []

    def asked(change: dict[str, object]) -> list[Finding]:
        at = next(at for at, one in enumerate(history.arrivals) if one.worker.startswith("grpc"))
        kept = history.arrivals[at]
        history.arrivals[at] = Arrival(kept.worker, kept.at, {**kept.body, **change}, kept.made, kept.left)
        found = list(requests.check(history))
        history.arrivals[at] = kept
        return found

    assert asked({"image_data": None, "return_indexer_topk": False, "stop": []}) == []
    for change in ({"return_logprob": False}, {"top_logprobs_num": 1}, {"lora_path": "x"}, {"priority": 0}):
        assert [finding.check for finding in asked(change)] == ["requests"], change
