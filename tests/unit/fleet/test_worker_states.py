"""The table of a worker's states."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from dyn_relay.fleet.worker import TRANSITIONS, Signal, State, Worker
from dyn_relay.formats.traits import UNKNOWN, Traits
from dyn_relay.http11.client import Origin


def worker(state: State = State.STARTING) -> Worker:
    return Worker(id="w1", number=1, origin=Origin.parse("http://h:1"), since=0.0, state=state, traits=Traits("1"))


def test_every_state_can_be_left_and_entered() -> None:
    assert {before for before, _ in TRANSITIONS} == set(State)
    assert set(TRANSITIONS.values()) == set(State)


def test_no_row_stands_still() -> None:
    assert not [row for row in TRANSITIONS.items() if row[0][0] is row[1]]


@pytest.mark.parametrize("signal", [Signal.PROBE_FAILED, Signal.FAILED, Signal.UNHEALTHY, Signal.GONE, Signal.PROBE_OK])
def test_only_being_added_again_ends_a_draining(signal: Signal) -> None:
    """A17: draining is final for requests and probes alike."""
    leaving = worker(State.DRAINING)
    assert not leaving.apply(signal, "", 1.0)
    assert leaving.apply(Signal.REJOIN, "", 1.0)
    assert leaving.state is State.STARTING


@pytest.mark.parametrize("state", [State.UNREADY, State.DEAD])
def test_one_good_probe_does_not_bring_back_an_unhealthy_one(state: State) -> None:
    """B4: it takes --health-success-threshold of them."""
    sick = worker(state)
    assert not sick.apply(Signal.PROBE_OK, "", 1.0)
    assert not sick.apply(Signal.WORKED, "", 1.0)
    assert sick.apply(Signal.RECOVERED, "", 1.0)


@pytest.mark.parametrize(
    ("state", "then"),
    [(State.READY, State.UNREADY), (State.BUSY, State.UNREADY), (State.HALF_OPEN, State.OPEN)],
)
def test_who_fails_too_many_probes_is_not_well(state: State, then: State) -> None:
    """B4: whatever its queue says; and it is no time for trials."""
    sick = worker(state)
    assert sick.apply(Signal.UNHEALTHY, "", 1.0)
    assert sick.state is then


def test_a_failed_probe_alone_changes_nothing() -> None:
    """B1, B4."""
    assert not [row for row in TRANSITIONS if row[1] is Signal.PROBE_FAILED]


def test_a_change_is_logged_once_with_its_cause() -> None:
    it = worker(State.READY)
    with capture_logs() as logs:
        assert it.apply(Signal.FAILED, "cut: reset", 7.0)
        assert not it.apply(Signal.FAILED, "cut: reset", 8.0)
    assert it.since == 7.0
    assert logs == [
        {
            "event": "worker is suspect",
            "log_level": "warning",
            "worker": "w1",
            "url": "http://h:1",
            "was": "ready",
            "cause": "a request failed: cut: reset",
        }
    ]


@pytest.mark.parametrize("signal", [Signal.FAILED, Signal.GONE])
def test_what_comes_back_may_be_another_process(signal: Signal) -> None:
    """A15: its traits are to be read again; until then the old ones are all there is."""
    it = worker(State.READY)
    it.learnt = True
    it.apply(signal, "", 1.0)
    assert not it.learnt
    assert it.traits != UNKNOWN
