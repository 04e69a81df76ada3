"""Membership and choice, without probes."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from scripted_engines import Engines, claim, make_fleet, picked, ready, running

from dyn_relay.fleet.rejoin import Standing
from dyn_relay.fleet.worker import State

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def test_adding_twice_gives_the_same_worker() -> None:
    fleet = make_fleet()
    first = fleet.add("http://a:1")
    assert fleet.add("http://a:1/") is first
    assert [(worker.id, worker.url) for worker in fleet.workers] == [("w1", "http://a:1")]
    with pytest.raises(ValueError, match="scheme"):
        fleet.add("ftp://a")


def test_an_id_is_never_used_again() -> None:
    fleet = make_fleet(urls=(A, B))
    fleet.remove("w2")
    assert fleet.add(C).id == "w3"


def test_workers_are_found_by_id_and_url() -> None:
    fleet = make_fleet(urls=(A,))
    assert fleet.get("w1") is fleet.get(A) is fleet.workers[0]
    assert fleet.get("w9") is None
    assert fleet.get("http://nobody:1") is None
    with pytest.raises(KeyError):
        fleet.remove("http://nobody:1")


def test_a_draining_worker_gets_nothing_new_and_leaves_when_idle() -> None:
    """A17."""
    fleet = make_fleet(urls=(A, B))
    a, b = ready(fleet)
    with claim(fleet, a):
        with claim(fleet, a):
            fleet.remove(a.id, drain=True)
            assert a.state is State.DRAINING
            assert {picked(fleet) for _ in range(5)} == {b}
            assert picked(fleet, {b.id}) is None
        assert a in fleet.workers
    assert fleet.workers == (b,)


def test_a_draining_worker_that_is_added_again_stays() -> None:
    fleet = make_fleet(urls=(A,))
    (a,) = ready(fleet)
    with claim(fleet, a):
        fleet.remove(A)
        assert fleet.add(A) is a
    assert fleet.workers == (a,)
    assert a.state is State.STARTING


def test_removing_at_once_does_not_touch_live_attempts() -> None:
    fleet = make_fleet(urls=(A,))
    (a,) = ready(fleet)
    with claim(fleet, a):
        fleet.remove(A, drain=False)
        assert fleet.workers == ()
        assert fleet.add(A).id == "w2"
    assert [worker.id for worker in fleet.workers] == ["w2"]


def test_excluded_and_unacceptable_ones_are_not_picked() -> None:
    """A1: the worker that failed this request is left out for this request at once."""
    fleet = make_fleet(urls=(A, B, C))
    a, b, c = ready(fleet)
    assert {picked(fleet, {a.id}) for _ in range(6)} == {b, c}
    assert {picked(fleet, {a.id}, lambda worker: worker is not b) for _ in range(6)} == {c}
    assert picked(fleet, {a.id, b.id, c.id}) is None
    assert picked(fleet, frozenset(), lambda worker: False) is None


def test_who_has_room_is_ready_and_lets_us_in() -> None:
    """A worker is emptied only if another takes its requests at once: not one that refuses our key, or is away."""
    fleet = make_fleet(urls=(A,))
    (a,) = ready(fleet)

    def room(*exclude: str) -> bool:
        return fleet.has_room(exclude, lambda worker: True)

    assert room()
    assert not room(a.id)
    a.locked = True
    assert not room()
    a.locked = False
    for standing in Standing:
        a.standing = standing
        assert room() is (standing is not Standing.AWAY)
    a.standing = Standing.KNOWN
    for state in State:
        a.state = state
        assert room() is (state is State.READY)


def test_a_failed_request_excludes_its_worker_for_everybody_at_once() -> None:
    fleet = make_fleet(urls=(A, B))
    a, b = ready(fleet)
    fleet.report(a, False, "end of stream", "cut")
    assert a.state is State.SUSPECT
    assert (a.failures, a.served) == (1, 1)
    assert {picked(fleet) for _ in range(5)} == {b}
    fleet.report(a, True)
    assert a.state is State.READY
    assert {picked(fleet) for _ in range(5)} == {a, b}


def test_when_nobody_is_ready_all_are_open_but_the_dead_come_last() -> None:
    fleet = make_fleet(urls=(A, B, C))
    a, b, c = fleet.workers
    a.state, b.state, c.state = State.DEAD, State.UNREADY, State.STARTING
    assert {picked(fleet) for _ in range(6)} == {b, c}
    assert picked(fleet, {b.id, c.id}) is a
    c.state = State.READY
    assert {picked(fleet) for _ in range(6)} == {c}


async def test_a_suspect_is_let_back_in_after_a_while(autojump_clock: trio.testing.MockClock) -> None:
    """No probe answers meanwhile: DYN_RUNTIME_INHIBITED_DURATION_SECS decides."""
    fleet = make_fleet(urls=(A, B), inhibited_duration_secs=5)
    a, b = ready(fleet)
    fleet.report(a, False, "", "stall")
    await trio.sleep(4.9)
    assert {picked(fleet) for _ in range(4)} == {b}
    await trio.sleep(0.2)
    assert {picked(fleet) for _ in range(4)} == {a, b}


async def test_a_worker_that_joins_later_is_probed(autojump_clock: trio.testing.MockClock) -> None:
    engines = Engines(A)
    async with running(engines) as fleet:
        engines.by_url[B] = type(engines[A])()
        b = fleet.add(B)
        await trio.testing.wait_all_tasks_blocked()
        assert b.state is State.READY


async def test_a_removed_worker_is_probed_no_more(autojump_clock: trio.testing.MockClock) -> None:
    engines = Engines(A, B)
    async with running(engines) as fleet:
        fleet.remove(A)
        before = len(engines.probes(A))
        await trio.sleep(100)
        assert len(engines.probes(A)) == before
        assert len(engines.probes(B)) > 5
