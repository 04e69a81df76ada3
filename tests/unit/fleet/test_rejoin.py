"""`--rejoin`: who was away serves again with the right weights only."""

from __future__ import annotations

import pytest
import trio
from scripted_engines import Engines, make_fleet, picked, running
from trio.testing import MockClock

from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.rejoin import Standing, judge
from dyn_relay.fleet.worker import State, Worker
from dyn_relay.formats.traits import Traits
from dyn_relay.http11.client import Origin

A, B, C = "http://a:1", "http://b:1", "http://c:1"
MATCH = "weight-version-match"
#: Virtual seconds in which probes see that nobody listens, or that somebody listens again.
SEEN = 35


def weights(engines: Engines, **versions: str) -> None:
    """What the engines have from now on, by the name of their host."""
    for host, version in versions.items():
        engines[f"http://{host}:1"].infos["/model_info"] = version.encode()


async def away(engines: Engines, *urls: str) -> None:
    for url in urls:
        engines[url].listening = False
    await trio.sleep(SEEN)


async def back(engines: Engines, *urls: str) -> None:
    for url in urls:
        engines[url].listening = True
    await trio.sleep(SEEN)


def states(fleet: Fleet) -> list[str]:
    return [worker.state.value for worker in fleet.workers]


async def test_older_weights_serve_nothing_until_they_match(autojump_clock: MockClock) -> None:
    """A15: it dies at 7 and returns with 5 while the fleet has 7."""
    engines = Engines(A, B)
    weights(engines, a="7", b="7")
    async with running(engines, rejoin=MATCH) as fleet:
        a, b = fleet.workers
        await away(engines, A)
        weights(engines, a="5")
        await back(engines, A)
        assert a.state is State.STALE
        assert "it has '5', the fleet '7'" in a.cause
        assert {picked(fleet) for _ in range(4)} == {b}
        assert picked(fleet, {b.id}) is None, "not even if nobody else is left"
        before = len(engines.infos(A))
        await trio.sleep(60)
        assert len(engines.infos(A)) >= before + 2 * 6, "its infos are read at every probe"
        weights(engines, a="7")
        await trio.sleep(10.1)
        assert a.state is State.READY
        assert {picked(fleet) for _ in range(4)} == {a, b}


async def test_the_others_go_on_meanwhile(autojump_clock: MockClock) -> None:
    """What the fleet has is what it has now, not what it had when the worker left."""
    engines = Engines(A, B)
    weights(engines, a="7", b="7")
    async with running(engines, rejoin=MATCH) as fleet:
        await away(engines, A)
        weights(engines, b="8")
        await back(engines, A)
        assert states(fleet) == ["stale", "ready"]
        weights(engines, b="9")
        await trio.sleep(SEEN)
        assert "it has '7', the fleet '9'" in fleet.workers[0].cause
        weights(engines, a="9")
        await trio.sleep(SEEN)
        assert states(fleet) == ["ready", "ready"]


async def test_always_and_a_first_join_are_not_judged(autojump_clock: MockClock) -> None:
    engines = Engines(A, B)
    weights(engines, a="7", b="5")
    async with running(engines, rejoin=MATCH) as fleet:
        await trio.sleep(SEEN)
        assert states(fleet) == ["ready", "ready"]
    async with running(engines) as fleet:
        await away(engines, B)
        await back(engines, B)
        assert states(fleet) == ["ready", "ready"]


async def test_who_is_dead_gets_no_dial_that_might_meet_other_weights(autojump_clock: MockClock) -> None:
    """In the moment between its return and the probe that sees it."""
    engines = Engines(A)
    async with running(engines, rejoin=MATCH) as fleet:
        await away(engines, A)
        assert states(fleet) == ["dead"]
        assert picked(fleet) is None
    async with running(engines) as fleet:
        (a,) = fleet.workers
        a.state = State.DEAD
        assert picked(fleet) is a


@pytest.mark.parametrize("rejoin", [MATCH, "manual"])
async def test_a_new_process_is_judged_though_nobody_saw_it_die(autojump_clock: MockClock, rejoin: str) -> None:
    """A15: it was restarted between two probes, and its infos say so within the next two."""
    engines = Engines(A, B)
    weights(engines, a="7", b="7")
    for url in (A, B):
        engines[url].infos["/server_info"] = b"first"
    async with running(engines, rejoin=rejoin) as fleet:
        a, _ = fleet.workers
        engines[A].infos |= {"/server_info": b"second", "/model_info": b"5"}
        await trio.sleep(25)
        assert a.state is State.STALE


async def test_infos_that_cannot_be_read_are_no_match(autojump_clock: MockClock) -> None:
    """What was read before its death says nothing."""
    engines = Engines(A, B)
    async with running(engines, rejoin=MATCH) as fleet:
        a, _ = fleet.workers
        await away(engines, A)
        engines[A].info_delay = 60.0
        await back(engines, A)
        assert a.state is State.STALE
        assert "its infos cannot be read" in a.cause
        engines[A].info_delay = 0.0
        await trio.sleep(30)
        assert a.state is State.READY


async def test_manual_waits_for_an_operator(autojump_clock: MockClock) -> None:
    engines = Engines(A, B)
    async with running(engines, rejoin="manual") as fleet:
        a, _ = fleet.workers
        await away(engines, A)
        await back(engines, A)
        await trio.sleep(3600)
        assert a.state is State.STALE
        assert "it waits to be admitted" in a.cause
        fleet.admit(a.id)
        assert a.state is State.READY
        await away(engines, A)
        await back(engines, A)
        assert a.state is State.STALE, "it was away once more"
        fleet.add(A)
        assert a.state is State.READY, "trainers add who they have restarted"


@pytest.mark.parametrize("rejoin", [MATCH, "manual"])
async def test_who_is_let_in_while_dead_or_unnoticed_is_judged_no_more(autojump_clock: MockClock, rejoin: str) -> None:
    """A trainer is faster than our probes."""
    engines = Engines(A, B)
    weights(engines, a="7", b="7")
    engines[A].infos["/server_info"] = b"first"
    async with running(engines, rejoin=rejoin) as fleet:
        await away(engines, A)
        weights(engines, a="5")
        fleet.add(A)
        assert states(fleet) == ["dead", "ready"]
        await back(engines, A)
        assert states(fleet) == ["ready", "ready"]
        engines[A].infos |= {"/server_info": b"second", "/model_info": b"6"}
        fleet.add(A)
        await trio.sleep(120)
        assert states(fleet) == ["ready", "ready"]
        engines[A].infos["/server_info"] = b"third"
        await trio.sleep(120)
        assert states(fleet) == ["stale", "ready"], "that was once"


@pytest.mark.parametrize("rejoin", [MATCH, "manual"])
async def test_who_is_welcome_and_cannot_be_read_at_first_is_let_in_later(
    autojump_clock: MockClock, rejoin: str
) -> None:
    """A15: added while it was dead, by the trainer that restarts it; one of its infos takes too long at its return."""
    engines = Engines(A, B)
    async with running(engines, rejoin=rejoin) as fleet:
        a, _ = fleet.workers
        await away(engines, A)
        fleet.add(A)
        engines[A].info_delay = 60.0
        await back(engines, A)
        assert a.state is State.STALE
        engines[A].info_delay = 0.0
        await trio.sleep(30)
        assert a.state is State.READY


async def test_who_is_let_in_while_the_others_are_asked_stays(autojump_clock: MockClock) -> None:
    """The operator's word is the last, though the fleet turns out to have moved on."""
    engines = Engines(A, B)
    weights(engines, a="7", b="7")
    async with running(engines, rejoin=MATCH) as fleet:
        await away(engines, A)
        weights(engines, a="5")
        await back(engines, A)
        assert states(fleet) == ["stale", "ready"]
        engines[B].info_delay = 3.0
        weights(engines, a="7", b="8")
        before = len(engines.infos(A))
        while len(engines.infos(A)) == before:  # noqa: ASYNC110 - virtual time
            await trio.sleep(0.1)
        await trio.sleep(1)
        assert states(fleet) == ["stale", "ready"], "the other is being asked"
        fleet.admit(A)
        await trio.sleep(8)
        assert states(fleet) == ["ready", "ready"]


async def test_no_deadlock_after_a_total_outage(autojump_clock: MockClock) -> None:
    """All were restarted with the weights of the beginning: whoever comes first serves."""
    engines = Engines(A, B)
    weights(engines, a="7", b="7")
    async with running(engines, rejoin=MATCH) as fleet:
        await away(engines, A, B)
        weights(engines, a="default", b="default")
        await back(engines, A)
        assert states(fleet) == ["ready", "dead"]
        await back(engines, B)
        assert states(fleet) == ["ready", "ready"]
        assert {worker.standing for worker in fleet.workers} == {Standing.KNOWN}


async def test_after_a_total_outage_the_largest_wins_whoever_comes_first(autojump_clock: MockClock) -> None:
    """A was restarted, B only could not be reached: it has the weights of the run."""
    engines = Engines(A, B)
    weights(engines, a="7", b="7")
    async with running(engines, rejoin=MATCH) as fleet:
        await away(engines, A, B)
        weights(engines, a="5")
        await back(engines, A)
        assert states(fleet) == ["ready", "dead"]
        await back(engines, B)
        assert states(fleet) == ["stale", "ready"]
        weights(engines, a="7")
        await trio.sleep(SEEN)
        assert states(fleet) == ["ready", "ready"]


async def test_after_a_total_outage_names_that_differ_do_not_end_the_service(autojump_clock: MockClock) -> None:
    """Which one is right cannot be told: the one that serves goes on, the other waits."""
    engines = Engines(A, B)
    weights(engines, a="x", b="x")
    async with running(engines, rejoin=MATCH) as fleet:
        await away(engines, A, B)
        weights(engines, a="y")
        await back(engines, A)
        await back(engines, B)
        assert states(fleet) == ["ready", "stale"]
        weights(engines, a="z", b="z")
        await trio.sleep(SEEN)
        assert states(fleet) == ["ready", "ready"]


async def test_a_stale_one_serves_when_all_others_are_gone(autojump_clock: MockClock) -> None:
    """And no longer than until one is back that has never been away, or knows better."""
    engines = Engines(A, B)
    weights(engines, a="7", b="7")
    async with running(engines, rejoin=MATCH) as fleet:
        await away(engines, A)
        weights(engines, a="5")
        await back(engines, A)
        await away(engines, B)
        assert states(fleet) == ["ready", "dead"]
        await back(engines, B)
        assert states(fleet) == ["stale", "ready"]


def worker(
    version: str | None,
    state: State = State.READY,
    standing: Standing = Standing.KNOWN,
    answers: bool = True,
) -> Worker:
    origin = Origin.parse("http://h:1")
    return Worker(
        "w1", 1, origin, 0.0, state, traits=Traits(weight_version=version), standing=standing, answers=answers
    )


def fits(version: str | None, *others: Worker, state: State = State.STALE) -> Standing:
    return judge(worker(version, state, Standing.AWAY), others, "weight-version-match")[0]


def test_what_the_fleet_has() -> None:
    """The largest if all are integers, else that of most of those that serve and were not away."""
    assert fits("10", worker("9"), worker("9"), worker("10")) is Standing.KNOWN
    assert fits("9", worker("9"), worker("9"), worker("10")) is Standing.AWAY
    assert fits("a", worker("a"), worker("a"), worker("9")) is Standing.KNOWN
    assert fits("9", worker("a"), worker("a"), worker("9")) is Standing.AWAY
    assert fits("a", worker("a"), worker("b")) is fits("b", worker("a"), worker("b")) is Standing.KNOWN
    assert fits("10", worker("9")) is Standing.AWAY, "newer ones are others, too"
    assert fits(None, worker("9")) is Standing.AWAY
    assert fits(None, worker(None)) is fits("9", worker(None)) is Standing.KNOWN, "nothing to compare with"


def test_with_whom_it_is_compared() -> None:
    """Busy ones serve; who is suspect, dead or let in for want of others does not, as long as one of the former is."""
    assert fits("7", worker("7", State.BUSY), worker("8", State.SUSPECT)) is Standing.KNOWN
    assert fits("7", worker("7"), worker("8", standing=Standing.PROVISIONAL)) is Standing.KNOWN
    assert fits("7", worker("8", State.SUSPECT)) is Standing.AWAY
    assert fits("7", worker("8", State.DEAD, answers=False)) is Standing.PROVISIONAL
    assert fits("7", worker("8", State.UNREADY, answers=False)) is Standing.PROVISIONAL, "one that hangs"
    assert fits("7", worker("7", State.DEAD, answers=False)) is Standing.PROVISIONAL, "what it had says nothing"
    assert fits("a", worker("b", State.UNREADY)) is Standing.AWAY
    assert fits("a") is Standing.KNOWN, "it is the whole fleet"


def test_a_fleet_updated_one_by_one_after_an_outage_serves_on() -> None:
    """Names have no order: who has been let in stays, whether it is updated already or not."""
    new, old = worker("new", standing=Standing.PROVISIONAL), worker("old", standing=Standing.PROVISIONAL)
    for one, other in ((new, old), (old, new)):
        assert judge(one, [other], "weight-version-match")[0] is Standing.PROVISIONAL


def test_a_drained_worker_that_is_added_again_is_not_judged() -> None:
    fleet = make_fleet(urls=(A,), rejoin="manual")
    (a,) = fleet.workers
    a.state, a.standing = State.DRAINING, Standing.AWAY
    fleet.add(A)
    assert (a.state, a.welcome) == (State.STARTING, True)
