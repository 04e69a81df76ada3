"""Claims are counted, and given back exactly once."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from scripted_engines import claim, make_fleet, picked, ready

URLS = ("http://a:1", "http://b:1")


def test_a_lease_counts_until_its_block_ends() -> None:
    fleet = make_fleet(urls=URLS)
    worker = fleet.workers[0]
    with claim(fleet, worker), claim(fleet, worker):
        assert worker.in_flight == 2
    assert worker.in_flight == 0


def test_it_is_given_back_when_the_attempt_fails() -> None:
    fleet = make_fleet(urls=URLS)
    worker = fleet.workers[0]
    with pytest.raises(ZeroDivisionError), claim(fleet, worker):
        raise ZeroDivisionError
    assert worker.in_flight == 0


async def test_it_is_given_back_when_the_attempt_is_cancelled() -> None:
    fleet = make_fleet(urls=URLS)
    worker = fleet.workers[0]
    with trio.CancelScope() as scope, claim(fleet, worker):
        scope.cancel()
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert worker.in_flight == 0


def test_twice_is_an_error() -> None:
    """A11: a load released twice makes a busy worker look idle."""
    fleet = make_fleet(urls=URLS)
    worker = fleet.workers[0]
    lease = claim(fleet, worker)
    with pytest.raises(RuntimeError):
        lease.release()
    with lease:
        pass
    with pytest.raises(RuntimeError):
        lease.release()
    with pytest.raises(RuntimeError), lease:
        pass
    assert worker.in_flight == 0


def test_a_burst_is_split_before_any_answer_comes() -> None:
    """A11: 16 requests at two workers that hold back their first byte: 8 and 8."""
    fleet = make_fleet(urls=URLS)
    ready(fleet)
    leases = []
    for _ in range(16):
        target = fleet.pick()
        assert target is not None
        leases.append(fleet.lease(target).__enter__())
    assert [worker.in_flight for worker in fleet.workers] == [8, 8]
    for lease in leases:
        lease.release()
    assert [worker.in_flight for worker in fleet.workers] == [0, 0]


def test_a_dead_workers_streams_spread_evenly() -> None:
    """A9: 32 streams of one of four workers: the others differ by at most one afterwards."""
    fleet = make_fleet(urls=tuple(f"http://{name}:1" for name in "abcd"))
    dead, *others = ready(fleet)
    for _ in range(32):
        worker = picked(fleet, {dead.id})
        assert worker is not None
        claim(fleet, worker).__enter__()
    loads = [worker.in_flight for worker in others]
    assert sum(loads) == 32
    assert max(loads) - min(loads) <= 1


@given(st.lists(st.integers(0, 1), max_size=40))
def test_loads_never_leak(order: list[int]) -> None:
    """Whatever the order of taking and giving back, the counts are those of the live leases."""
    fleet = make_fleet(urls=URLS)
    live: list[list[object]] = [[], []]
    for n in order:
        if len(live[n]) > 2:
            live[n].pop().__exit__(None, None, None)  # type: ignore[attr-defined]
        else:
            live[n].append(claim(fleet, fleet.workers[n]).__enter__())
    assert [worker.in_flight for worker in fleet.workers] == [len(live[0]), len(live[1])]


async def test_tokens_are_counted_again_as_answers_grow(autojump_clock: trio.testing.MockClock) -> None:
    """A long answer weighs more the longer it is; a second old at most; and nothing is left of it afterwards."""
    fleet = make_fleet(urls=URLS)
    a, b = ready(fleet)
    held = 100
    with fleet.lease(a.targets[0], 1, lambda: held):
        assert a.tokens == 100
        held = 5000
        assert picked(fleet) is b
        assert a.tokens == 5000
        held = 6000
        picked(fleet)
        assert a.tokens == 5000
        await trio.sleep(1)
        picked(fleet)
        assert a.tokens == 6000
    assert (a.tokens, b.tokens) == (0, 0)


def test_ranks_are_targets_of_their_own() -> None:
    """O2: each rank has its own load; one that is divided while work is live loses none of it."""
    fleet = make_fleet(urls=URLS)
    a, b = ready(fleet)
    with claim(fleet, a):
        a.divide(2)
        assert [target.id for target in a.targets] == ["w1@0", "w1@1"]
        assert a.in_flight == a.load == 1
        with fleet.lease(a.targets[1], 3):
            assert (a.in_flight, a.load) == (2, 4)
            assert fleet.pick({b.id}) is a.targets[0]
            assert fleet.pick({b.id, "w1@0"}) is a.targets[1]
            assert fleet.pick({b.id, "w1"}) is None
    assert (a.in_flight, a.load) == (0, 0)
