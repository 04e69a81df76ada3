"""What sources say, and what becomes of the fleet. In virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog.testing
import trio
import trio.testing
from scripted_engines import Engines, claim, make_fleet, picked

from dyn_relay.config import Config
from dyn_relay.fleet.discovery import discovery as module
from dyn_relay.fleet.discovery.base import Source, SourceError
from dyn_relay.fleet.discovery.catalog import sources
from dyn_relay.fleet.discovery.discovery import Discovery
from dyn_relay.fleet.discovery.static import Static
from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.stage import Named
from dyn_relay.fleet.worker import State
from dyn_relay.http11.origin import Origin

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Scripted(Source):
    """A source that says what the test says."""

    def __init__(self, name: str = "file") -> None:
        self.name = name
        #: When it was run.
        self.runs: list[float] = []
        self._send, self._receive = trio.open_memory_channel(100)

    async def run(self, report) -> None:
        self.runs.append(trio.current_time())
        while True:
            said = await self._receive.receive()
            if isinstance(said, Exception):
                raise said
            report(map(Origin.parse, said))

    async def say(self, *urls: str) -> None:
        self._send.send_nowait(urls)
        await trio.testing.wait_all_tasks_blocked()

    async def fail(self, exc: Exception) -> None:
        self._send.send_nowait(exc)
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def followed(*sources, fleet: Fleet | None = None) -> AsyncIterator[tuple[Fleet, Discovery]]:
    fleet = fleet or make_fleet(Engines())
    discovery = Discovery(fleet, sources)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(discovery.run)
        await trio.testing.wait_all_tasks_blocked()
        yield fleet, discovery
        nursery.cancel_scope.cancel()


def urls(fleet: Fleet) -> list[str]:
    return [worker.url for worker in fleet.workers]


async def test_who_is_named_joins_and_who_is_not_leaves(autojump_clock):
    source = Scripted()
    async with followed(source) as (fleet, discovery):
        await source.say(B, A)
        assert urls(fleet) == [B, A]
        assert [worker.named_by for worker in fleet.workers] == [{"file"}, {"file"}]
        await source.say(B, C)
        assert urls(fleet) == [B, C]
        assert discovery.samples() == [("file", True, 2)]


async def test_who_leaves_ends_its_live_streams_in_peace(autojump_clock):
    """A17: a pod that is being terminated gets nothing new; what it has goes on."""
    source = Scripted()
    async with followed(source) as (fleet, _):
        await source.say(A, B)
        a, b = fleet.workers
        with claim(fleet, a):
            await source.say(B)
            assert a.state is State.DRAINING
            assert {picked(fleet) for _ in range(4)} == {b}
            assert a in fleet.workers
        assert fleet.workers == (b,)


async def test_who_is_named_again_while_it_drains_is_the_same_worker(autojump_clock):
    source = Scripted()
    async with followed(source) as (fleet, _):
        await source.say(A)
        (a,) = fleet.workers
        with claim(fleet, a):
            await source.say()
            await source.say(A)
        assert fleet.workers == (a,)
        assert a.state is State.STARTING


@pytest.mark.parametrize("exc", [SourceError("the name server is gone"), RuntimeError("a defect")])
async def test_a_source_that_fails_keeps_its_last_answer(autojump_clock, exc):
    """And the others go on: neither an outage nor a defect of one source empties the fleet."""
    source, other = Scripted(), Scripted("dns")
    with structlog.testing.capture_logs() as lines:
        async with followed(source, other) as (fleet, discovery):
            await source.say(A)
            await source.fail(exc)
            assert urls(fleet) == [A]
            assert discovery.samples() == [("file", False, 1), ("dns", False, 0)]
            await other.say(B)
            assert urls(fleet) == [A, B]
            assert discovery.samples()[1] == ("dns", True, 1)
    (line,) = [line for line in lines if line["log_level"] == "error"]
    assert (line["source"], line["workers"]) == ("file", 1)
    assert str(exc) in line["cause"]


async def test_the_cause_of_a_failure_is_told_once_and_an_answer_ends_it(autojump_clock):
    source = Scripted()
    with structlog.testing.capture_logs() as lines:
        async with followed(source) as (fleet, _):
            for _ in range(5):
                await source.fail(SourceError("gone"))
                await trio.sleep(module.LONGEST_PAUSE)
            assert [line["cause"] for line in lines if line["log_level"] == "error"] == ["gone"]
            await source.say(A)
            assert urls(fleet) == [A]
            assert lines[-1]["event"] == "discovery works again"
            failed = trio.current_time()
            await source.fail(SourceError("gone"))
            await trio.sleep(module.PAUSE)
            await trio.testing.wait_all_tasks_blocked()
            assert source.runs[-1] == failed + module.PAUSE
            assert [line["cause"] for line in lines if line["log_level"] == "error"] == ["gone", "gone"]


async def test_the_pauses_double_up_to_the_longest(autojump_clock):
    class Broken:
        name = "file"

        def __init__(self) -> None:
            self.runs: list[float] = []

        async def run(self, report) -> None:
            self.runs.append(trio.current_time())
            raise SourceError("gone")

    source = Broken()
    async with followed(source):
        await trio.sleep(100)
    pauses = [later - before for before, later in zip(source.runs, source.runs[1:], strict=False)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


async def test_workers_added_by_hand_stay(autojump_clock):
    source = Scripted()
    async with followed(source) as (fleet, _):
        fleet.add(A)
        await source.say(A, B)
        assert fleet.workers[0].named_by == {"hand", "file"}
        fleet.add(B)
        await source.say()
        assert urls(fleet) == [A, B]
        assert [worker.named_by for worker in fleet.workers] == [{"hand"}, {"hand"}]


async def test_a_worker_stays_while_any_source_names_it(autojump_clock):
    file, dns = Scripted("file"), Scripted("dns")
    async with followed(file, dns) as (fleet, _):
        await file.say(A, B)
        await dns.say(A)
        await file.say(B)
        assert urls(fleet) == [A, B]
        await dns.say()
        assert urls(fleet) == [B]


async def test_who_was_removed_by_hand_stays_away_until_it_is_named_anew(autojump_clock):
    source = Scripted()
    async with followed(source) as (fleet, _):
        await source.say(A, B)
        fleet.remove(A)
        await source.say(A, B, C)
        assert urls(fleet) == [B, C]
        await source.say(B, C)
        await source.say(A, B, C)
        assert urls(fleet) == [B, C, A]


async def test_a_removal_by_hand_is_final_for_a_draining_worker(autojump_clock):
    """What a source says later of one that an operator has sent away does not cut its peace short."""
    source = Scripted()
    async with followed(source) as (fleet, _):
        await source.say(A)
        (a,) = fleet.workers
        with claim(fleet, a):
            fleet.remove(A)
            await source.say()
            assert fleet.workers == (a,)
        assert fleet.workers == ()


async def test_who_was_removed_by_hand_is_no_longer_kept_by_hand(autojump_clock):
    source = Scripted()
    async with followed(source) as (fleet, _):
        a = fleet.add(A)
        await source.say(A)
        with claim(fleet, a):
            fleet.remove(A)
            await source.say()
            await source.say(A)
            assert (a.state, a.named_by) == (State.STARTING, {"file"})
            await source.say()
            assert a.state is State.DRAINING
        assert fleet.workers == ()


async def test_one_worker_in_two_spellings_is_one(autojump_clock):
    source = Scripted()
    async with followed(source) as (fleet, _):
        await source.say("http://a:80")
        (a,) = fleet.workers
        await source.say("http://A/")
        assert fleet.workers == (a,)
        assert a.state is State.STARTING


async def test_a_fleet_that_is_exchanged_is_never_empty(autojump_clock, monkeypatch):
    source = Scripted()
    async with followed(source) as (fleet, _):
        await source.say(A)
        left = []
        remove = fleet.remove

        def watched(name: str):
            gone = remove(name)
            left.append(urls(fleet))
            return gone

        monkeypatch.setattr(fleet, "remove", watched)
        await source.say(B)
        assert left == [[B]]


async def test_it_has_started_once_each_source_has_answered_or_failed(autojump_clock):
    file, dns = Scripted("file"), Scripted("dns")
    fleet, started = make_fleet(Engines()), trio.Event()
    async with trio.open_nursery() as nursery:

        async def start() -> None:
            await nursery.start(Discovery(fleet, [Static([Named(Origin.parse(A))]), file, dns]).run)
            started.set()

        nursery.start_soon(start)
        await trio.testing.wait_all_tasks_blocked()
        assert urls(fleet) == [A]
        await file.say(B)
        assert not started.is_set()
        await dns.fail(SourceError("gone"))
        assert started.is_set()
        nursery.cancel_scope.cancel()


def test_a_configuration_may_ask_for_several_sources():
    config = Config(
        worker_urls=(A,),
        discovery_file="workers",
        discovery_dns="engines:30000",
        service_discovery=True,
        selector=("a=b",),
    )
    assert [source.name for source in sources(config)] == ["static", "file", "dns", "kubernetes"]
    assert [source.name for source in sources(Config())] == ["static"]
