"""A nemesis strikes when clients have seen enough, looks whether it did, and tells what it saw."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import pytest
import trio
from chaos_http import plain, serving

from dyn_chaos import audit
from dyn_chaos.actions import Scene, base
from dyn_chaos.campaigns.base import Order, When
from dyn_chaos.fleet import Attached
from dyn_chaos.nemesis import Nemesis
from dyn_chaos.selection import Mode
from dyn_testkit.history import Fault
from dyn_testkit.watch import Watch

PORTS = (1, 2, 3)
ENGINES = [Attached(f"http://127.0.0.1:{port}", port) for port in PORTS]
WELL = "it is well"


@dataclass
class Noted:
    """An action that writes down what is asked of it; `shows`: it has an effect."""

    shows: bool = True
    outlasts: bool = False
    kind: str = "noted"
    within: float = 0.0
    done: list[str] = field(default_factory=list)
    invoked: trio.Event = field(default_factory=trio.Event)

    async def invoke(self, scene: Scene, engine: Attached) -> dict[str, Any]:
        self.done.append(f"strike {engine.port}")
        self.invoked.set()
        if engine.port == 9:
            raise LookupError("nothing listens there")
        return {"port": engine.port}

    async def undo(self, scene: Scene, engine: Attached) -> None:
        self.done.append(f"undo {engine.port}")

    async def seen(self, scene: Scene, engine: Attached) -> str:
        return "seen" if self.shows and f"undo {engine.port}" not in self.done else ""


def fleet(request: httpx.Request) -> httpx.Response:
    workers = [{"url": engine.url, "load": engine.port, "state": "ready"} for engine in ENGINES]
    return httpx.Response(200, json={"workers": workers})


@dataclass
class Run:
    """One nemesis over a proxy that exists only as its answers."""

    action: Noted = field(default_factory=Noted)
    order: Order = field(default_factory=Order)
    engines: list[Attached] = field(default_factory=lambda: ENGINES)
    faults: list[Fault] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)
    load_ended: trio.Event = field(default_factory=trio.Event)

    async def run(self, when: When, streams: int = 2) -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(fleet)) as http:
            scene = Scene("http://relay", http)
            begin = trio.current_time()
            nemesis = Nemesis(
                self.action, scene, self.engines, self.order, Random(0), begin, self.faults.append, self.held.append
            )
            await nemesis.run(when, streams, self.watch, self.load_ended)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def health(url: str, within: float = 0.0) -> str:
        return "200"

    monkeypatch.setattr(audit, "health", health)


@pytest.mark.parametrize("when", [When(), When(streams=2), When(streams=1, tokens=5)])
async def test_it_waits_for_what_clients_see(when: When, autojump_clock: trio.testing.MockClock) -> None:
    run = Run()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.run, when)
        run.watch.saw("a", 4)
        await trio.sleep(1000)
        assert run.action.done == []
        run.watch.saw("b", 5)
        await run.action.invoked.wait()
        assert run.action.done == ["strike 3"]  # the busiest
    assert [(fault.target, fault.proof, fault.until) for fault in run.faults] == [(ENGINES[2].url, "seen", None)]
    assert run.held == [True, False]


async def test_or_for_a_time(autojump_clock: trio.testing.MockClock) -> None:
    run = Run()
    await run.run(When(at=30.0))
    assert run.faults[0].at == pytest.approx(30)


async def test_a_load_that_ends_before_is_not_disturbed(autojump_clock: trio.testing.MockClock) -> None:
    run = Run()
    run.load_ended.set()
    await run.run(When(streams=1))
    assert run.faults == []
    assert run.held == []


async def test_an_action_that_did_nothing_has_no_proof(autojump_clock: trio.testing.MockClock) -> None:
    run = Run(Noted(shows=False))
    await run.run(When(at=0.0))
    assert [fault.proof for fault in run.faults] == [""]


async def test_nor_has_one_that_found_nothing_to_strike(autojump_clock: trio.testing.MockClock) -> None:
    run = Run(engines=[Attached("http://127.0.0.1:9", 9)])
    await run.run(When(at=0.0))
    assert run.faults[0].proof == ""
    assert run.faults[0].choice["problem"] == "nothing listens there"


@pytest.mark.usefixtures("healthy")
async def test_all_at_once_and_back(autojump_clock: trio.testing.MockClock) -> None:
    run = Run(order=Order(mode=Mode("all-but-one"), duration=7.0))
    await run.run(When(at=0.0))
    assert run.action.done[:2] == ["strike 3", "strike 2"]
    assert sorted(run.action.done[2:]) == ["undo 2", "undo 3"]
    assert [fault.until for fault in run.faults] == [pytest.approx(7)] * 2
    assert all(fault.choice["undone"] for fault in run.faults)
    assert [fault.choice["certain"] for fault in run.faults] == [pytest.approx([0, 7])] * 2


@pytest.mark.usefixtures("healthy")
async def test_one_after_the_other(autojump_clock: trio.testing.MockClock) -> None:
    run = Run(order=Order(mode=Mode("all"), duration=1.0, rolling=True))
    await run.run(When(at=0.0))
    assert run.action.done == [f"{what} {port}" for port in (3, 2, 1) for what in ("strike", "undo")]


@pytest.mark.usefixtures("healthy")
async def test_with_time_between(autojump_clock: trio.testing.MockClock) -> None:
    run = Run(order=Order(mode=Mode("all"), duration=10.0, gap=2.0))
    await run.run(When(at=0.0))
    assert sorted(fault.at for fault in run.faults) == pytest.approx([0, 2, 4])
    assert sorted(fault.until or 0 for fault in run.faults) == pytest.approx([14, 16, 18])


@pytest.mark.usefixtures("healthy")
async def test_again_and_again_until_the_load_ends(autojump_clock: trio.testing.MockClock) -> None:
    run = Run(order=Order(duration=1.0, every=5.0))

    async def end() -> None:
        await trio.sleep(12)
        run.load_ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        await run.run(When(at=0.0))
    assert [fault.at for fault in run.faults] == pytest.approx([0, 5, 10])
    assert run.held == [True, False] * 3


@pytest.mark.usefixtures("healthy")
async def test_no_more_strikes_of_a_round_once_the_load_has_ended(autojump_clock: trio.testing.MockClock) -> None:
    """They would meet nobody."""
    run = Run(order=Order(mode=Mode("all"), duration=1.0, rolling=True, every=0.0))

    async def end() -> None:
        await trio.sleep(4.5)
        run.load_ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        await run.run(When(at=0.0))
    assert [fault.at for fault in run.faults] == pytest.approx([0, 1, 2, 3, 4])


@pytest.mark.parametrize("outlasts", [True, False])
async def test_what_would_outlast_the_campaign_is_undone_in_any_case(
    outlasts: bool, autojump_clock: trio.testing.MockClock
) -> None:
    run = Run(Noted(outlasts=outlasts), Order(duration=60.0))
    with trio.move_on_after(10):
        await run.run(When(at=0.0))
    assert run.action.done == (["strike 3", "undo 3"] if outlasts else ["strike 3"])
    assert [fault.until for fault in run.faults] == [None]


async def test_also_if_it_was_not_seen_yet(autojump_clock: trio.testing.MockClock) -> None:
    run = Run(Noted(outlasts=True, shows=False, within=60.0), Order(duration=60.0))
    with trio.move_on_after(10):
        await run.run(When(at=0.0))
    assert run.action.done == ["strike 3", "undo 3"]
    assert [(fault.proof, fault.until) for fault in run.faults] == [("", None)]


@pytest.mark.parametrize(
    ("health", "state", "well"), [("200 OK", "ready", True), ("503 Busy", "ready", False), ("200 OK", "unready", False)]
)
async def test_undone_is_what_the_proxy_uses_again(health: str, state: str, well: bool) -> None:
    async with (
        serving({"/health": lambda: plain(b"", health)}) as url,
        httpx.AsyncClient(
            transport=httpx.MockTransport(
                lambda _: httpx.Response(200, json={"workers": [{"url": f"{url}/", "load": 0, "state": state}]})
            )
        ) as http,
    ):
        engine = Attached(url, 1)
        assert bool(await base.undo(Noted(), Scene("http://relay", http), engine, within=0.0)) is well


async def test_undone_is_not_what_is_still_to_be_seen() -> None:
    class Stays(Noted):
        async def seen(self, scene: Scene, engine: Attached) -> str:
            return "still there"

    async with (
        serving({"/health": plain(b"")}) as url,
        httpx.AsyncClient(
            transport=httpx.MockTransport(
                lambda _: httpx.Response(200, json={"workers": [{"url": url, "load": 0, "state": "ready"}]})
            )
        ) as http,
    ):
        assert await base.undo(Stays(), Scene("http://relay", http), Attached(url, 1), within=0.0) == ""


async def test_the_busiest_worker_is_the_one_that_the_proxy_says() -> None:
    workers = b'{"workers":[{"url":"http://127.0.0.1:1/","load":2},{"url":"http://127.0.0.1:2","load":5}]}'
    async with serving({"/workers": plain(workers)}) as url:
        assert await audit.busiest(url, ENGINES[:2]) is ENGINES[1]
        with pytest.raises(LookupError):
            await audit.busiest(url, ENGINES[2:])


async def test_health_tells_silence_from_refusal() -> None:
    async with serving({"/health": plain(b"", "503 Busy")}) as url:
        assert await audit.health(url) == "503"
    assert await audit.health(url) == audit.REFUSED
    [deaf] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with deaf:
        silent = f"http://127.0.0.1:{deaf.socket.getsockname()[1]}"
        assert await audit.health(silent, within=0.01) == audit.SILENCE
        assert not audit.refuses(silent)
    assert audit.refuses(silent)
