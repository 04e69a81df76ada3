"""A worker that is another process than before starts clean."""

from __future__ import annotations

import trio
import trio.testing
from scripted_engines import Engines, running
from trio.testing import MockClock

from dyn_relay.fleet.policies.catalog import POLICIES
from dyn_relay.fleet.policies.least_loaded import LeastLoaded
from dyn_relay.fleet.worker import State, Worker

A = "http://a:1"


class Remembering(LeastLoaded):
    """Notes whom it was to forget."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[str] = []

    def forget(self, worker: Worker) -> None:
        self.forgotten.append(worker.id)


async def test_what_others_have_seen_is_believed(autojump_clock: MockClock, monkeypatch) -> None:
    """O4: its KV events begin anew. It gets nothing while another can take it, until a probe that comes at once."""
    policy = Remembering()
    monkeypatch.setitem(POLICIES, "least_loaded", lambda config, rng, clock: policy)
    engines = Engines(A)
    engines[A].delay = 1.0
    engines[A].infos["/server_info"] = b"first"
    async with running(engines) as fleet:
        (a,) = fleet.workers
        await trio.sleep(5)
        a.breaker.incidents = 4
        engines[A].infos |= {"/server_info": b"second", "/model_info": b"v2"}
        fleet.restarted(a, "its KV events begin anew")
        assert (a.state, a.cause) == (State.STARTING, "it is a new process: its KV events begin anew")
        assert a.breaker.incidents == 0
        await trio.sleep(1.1)
        assert (a.state, a.traits.weight_version) == (State.READY, "v2")
        assert policy.forgotten == ["w1"], "the infos tell the same restart, and it is not counted twice"


async def test_whom_to_forget(autojump_clock: MockClock, monkeypatch) -> None:
    """A10: the dead, new processes, and those that leave."""
    policy = Remembering()
    monkeypatch.setitem(POLICIES, "least_loaded", lambda config, rng, clock: policy)
    engines = Engines(A)
    engines[A].infos["/server_info"] = b"first"
    async with running(engines) as fleet:
        engines[A].infos["/server_info"] = b"second"
        await trio.sleep(65)
        assert policy.forgotten == ["w1"]
        engines[A].listening = False
        await trio.sleep(35)
        assert fleet.workers[0].state is State.DEAD
        assert policy.forgotten == ["w1", "w1"]
        fleet.remove(A)
        assert policy.forgotten == ["w1", "w1", "w1"]


async def test_one_that_is_found_by_the_way_is_probed_at_once(autojump_clock: MockClock) -> None:
    """A request has its infos read again, and they are another process's."""
    engines = Engines(A)
    engines[A].infos["/server_info"] = b"first"
    async with running(engines) as fleet:
        (a,) = fleet.workers
        await trio.sleep(2)
        engines[A].infos["/server_info"] = b"second"
        await fleet.relearn([a])
        assert a.state is State.STARTING
        await trio.testing.wait_all_tasks_blocked()
        assert a.state is State.READY
