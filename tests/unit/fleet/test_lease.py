"""Claims are counted, and given back exactly once."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from scripted_engines import make_fleet, ready

URLS = ("http://a:1", "http://b:1")


def test_a_lease_counts_until_its_block_ends() -> None:
    fleet = make_fleet(urls=URLS)
    worker = fleet.workers[0]
    with fleet.lease(worker), fleet.lease(worker):
        assert worker.in_flight == 2
    assert worker.in_flight == 0


def test_it_is_given_back_when_the_attempt_fails() -> None:
    fleet = make_fleet(urls=URLS)
    worker = fleet.workers[0]
    with pytest.raises(ZeroDivisionError), fleet.lease(worker):
        raise ZeroDivisionError
    assert worker.in_flight == 0


async def test_it_is_given_back_when_the_attempt_is_cancelled() -> None:
    fleet = make_fleet(urls=URLS)
    worker = fleet.workers[0]
    with trio.CancelScope() as scope, fleet.lease(worker):
        scope.cancel()
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert worker.in_flight == 0


def test_twice_is_an_error() -> None:
    """A11: a load released twice makes a busy worker look idle."""
    fleet = make_fleet(urls=URLS)
    worker = fleet.workers[0]
    lease = fleet.lease(worker)
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
        worker = fleet.pick()
        assert worker is not None
        leases.append(fleet.lease(worker).__enter__())
    assert [worker.in_flight for worker in fleet.workers] == [8, 8]
    for lease in leases:
        lease.release()
    assert [worker.in_flight for worker in fleet.workers] == [0, 0]


def test_a_dead_workers_streams_spread_evenly() -> None:
    """A9: 32 streams of one of four workers: the others differ by at most one afterwards."""
    fleet = make_fleet(urls=tuple(f"http://{name}:1" for name in "abcd"))
    dead, *others = ready(fleet)
    for _ in range(32):
        worker = fleet.pick({dead.id})
        assert worker is not None
        fleet.lease(worker).__enter__()
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
            live[n].append(fleet.lease(fleet.workers[n]).__enter__())
    assert [worker.in_flight for worker in fleet.workers] == [len(live[0]), len(live[1])]
