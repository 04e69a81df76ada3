"""The circuit of a worker: what opens it, what it keeps away, and what closes it."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from scripted_engines import Engines, claim, make_fleet, picked, ready, running
from trio.testing import MockClock

from dyn_relay.fleet.policies.base import Ask
from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.worker import State, Worker

A, B = "http://a:1", "http://b:1"
RESUMED = Ask(resumed=True)


def incident(fleet: Fleet, worker: Worker, streams: int = 1) -> None:
    """It fails so many requests at once, and a probe clears it."""
    for _ in range(streams):
        fleet.report(worker, False, "reset", "cut")
    if worker.state is State.SUSPECT:
        worker.state = State.READY


def opened() -> tuple[Fleet, Worker, Worker]:
    """Two workers, the first with an open circuit."""
    fleet = make_fleet(urls=(A, B), policy="round_robin")
    a, b = ready(fleet)
    for _ in range(5):
        incident(fleet, a)
    assert a.state is State.OPEN
    return fleet, a, b


def choices(fleet: Fleet, ask: Ask = RESUMED) -> set[Worker | None]:
    targets = [fleet.pick(ask=ask) for _ in range(6)]
    return {target.worker if target else None for target in targets}


def test_a_death_with_a_hundred_streams_is_one_incident() -> None:
    """B8."""
    fleet = make_fleet(urls=(A,))
    (a,) = ready(fleet)
    for _ in range(4):
        incident(fleet, a, streams=100)
        assert a.state is State.READY
    incident(fleet, a)
    assert a.state is State.OPEN


def test_an_attempt_that_worked_begins_the_count_anew() -> None:
    fleet = make_fleet(urls=(A,))
    (a,) = ready(fleet)
    for _ in range(3):
        for _ in range(4):
            incident(fleet, a)
        fleet.report(a, True)
    assert a.state is State.READY


def test_no_busy_answer_and_no_refused_key_opens_it() -> None:
    """A8, A13."""
    fleet = make_fleet(urls=(A,))
    (a,) = ready(fleet)
    for _ in range(50):
        fleet.report(a, False, "401", "key", key_refused=True)
        assert a.state is State.SUSPECT
        a.state = State.READY
        fleet.full(a.targets[0])
        assert a.state is State.BUSY
        a.state = State.READY


def test_it_never_opens_with_a_threshold_of_0() -> None:
    fleet = make_fleet(urls=(A,), cb_failure_threshold=0)
    (a,) = ready(fleet)
    for _ in range(50):
        incident(fleet, a)
    assert a.state is State.READY


async def test_it_stays_open_whatever_the_probes_say(autojump_clock: MockClock) -> None:
    """The health endpoint answers 200 all the time (B2)."""
    engines = Engines(A, B)
    async with running(engines, cb_timeout_duration_secs=60) as fleet:
        a, b = fleet.workers
        for _ in range(5):
            fleet.report(a, False, "reset", "cut")
            await trio.testing.wait_all_tasks_blocked()  # the probe that a failure hurries
        assert a.state is State.OPEN
        probes = len(engines.probes(A))
        await trio.sleep(59)
        assert a.state is State.OPEN
        assert choices(fleet) == {b}
        assert len(engines.probes(A)) >= probes + 5
        await trio.sleep(11)
        assert a.state is State.HALF_OPEN, "without any request, too"


async def test_half_open_takes_one_at_a_time_and_none_with_tokens(autojump_clock: MockClock) -> None:
    fleet, a, b = opened()
    await trio.sleep(60)
    assert choices(fleet) == {b}
    assert a.state is State.HALF_OPEN
    assert choices(fleet, Ask()) == {a, b}
    with claim(fleet, a):
        assert choices(fleet, Ask()) == {b}
    assert choices(fleet, Ask()) == {a, b}


async def test_streams_from_before_are_no_trial(autojump_clock: MockClock) -> None:
    """An hour-long stream that lives on at the worker must not keep it from being tried."""
    fleet = make_fleet(urls=(A, B), policy="round_robin")
    a, b = ready(fleet)
    with claim(fleet, a):
        for _ in range(5):
            incident(fleet, a)
        await trio.sleep(60)
        assert choices(fleet, Ask()) == {a, b}


async def test_enough_good_trials_close_it_and_a_bad_one_opens_it_again(autojump_clock: MockClock) -> None:
    fleet, a, _ = opened()
    await trio.sleep(60)
    picked(fleet)
    fleet.report(a, True)
    assert a.state is State.HALF_OPEN
    fleet.report(a, False, "reset", "cut")
    assert a.state is State.OPEN
    await trio.sleep(59)
    picked(fleet)
    assert a.state is State.OPEN
    await trio.sleep(1)
    picked(fleet)
    assert a.state is State.HALF_OPEN
    fleet.report(a, True)
    assert a.state is State.HALF_OPEN, "the good one from before counts no more"
    fleet.report(a, True)
    assert a.state is State.READY


async def test_a_refused_key_ends_no_trial(autojump_clock: MockClock) -> None:
    """A13: no 4xx opens it."""
    fleet, a, _ = opened()
    await trio.sleep(60)
    picked(fleet)
    fleet.report(a, False, "401", "key", key_refused=True)
    assert a.state is State.HALF_OPEN


def test_if_all_are_open_they_are_asked_all_the_same_but_the_dead_come_last() -> None:
    fleet, a, b = opened()
    b.state = State.DEAD
    assert choices(fleet) == choices(fleet, Ask()) == {a}
    for state in (State.BUSY, State.STARTING, State.UNREADY, State.SUSPECT):
        b.state = state
        assert choices(fleet) == {b}
    b.state = State.HALF_OPEN
    assert choices(fleet) == {a, b}
    assert choices(fleet, Ask()) == {b}


def test_a_half_open_one_whose_queue_is_full_comes_after_those_that_might_work() -> None:
    """A8: else its 503 would be the answer."""
    fleet, a, b = opened()
    a.state, b.state = State.HALF_OPEN, State.UNREADY
    assert choices(fleet, Ask()) == {a}
    fleet.full(a.targets[0])
    assert choices(fleet, Ask()) == {b}


async def test_a_worker_that_was_dead_has_a_closed_circuit(autojump_clock: MockClock) -> None:
    engines = Engines(A)
    async with running(engines) as fleet:
        (a,) = fleet.workers
        for _ in range(5):
            fleet.report(a, False, "reset", "cut")
            await trio.testing.wait_all_tasks_blocked()
        assert a.state is State.OPEN
        engines[A].listening = False
        await trio.sleep(31)
        assert a.state is State.DEAD
        engines[A].listening = True
        await trio.sleep(12)
        assert a.state is State.READY
        for _ in range(4):
            fleet.report(a, False, "reset", "cut")
            await trio.testing.wait_all_tasks_blocked()
            assert a.state is State.READY


@pytest.mark.parametrize(("asked", "avoided"), [(None, 1.0), (7.0, 7.0), (3600.0, 30.0)])
async def test_a_busy_one_is_avoided_as_long_as_it_asks_for(
    autojump_clock: MockClock, asked: float | None, avoided: float
) -> None:
    """A8: Retry-After, 1 s without, half a minute at most; it is healthy meanwhile."""
    fleet = make_fleet(urls=(A, B))
    a, b = ready(fleet)
    fleet.full(a.targets[0], asked)
    assert (a.state, a.healthy) == (State.BUSY, True)
    await trio.sleep(avoided - 0.1)
    assert choices(fleet) == {b}
    await trio.sleep(0.1)
    assert choices(fleet) == {a, b}
    assert a.state is State.READY


def test_if_all_are_busy_they_are_asked_all_the_same() -> None:
    fleet = make_fleet(urls=(A, B))
    a, b = ready(fleet)
    for worker in (a, b):
        fleet.full(worker.targets[0])
    assert choices(fleet) == {a, b}


def test_one_rank_that_is_full_is_avoided_alone() -> None:
    """O2: the others of its worker take more."""
    fleet = make_fleet(urls=(A,))
    (a,) = ready(fleet)
    a.divide(2)
    one, other = a.targets
    fleet.full(one)
    assert a.state is State.READY
    assert {fleet.pick() for _ in range(4)} == {other}
    fleet.full(other)
    assert a.state is State.BUSY
    assert {fleet.pick() for _ in range(4)} == {one, other}
