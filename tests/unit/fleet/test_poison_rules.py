"""Who is blamed when a worker dies before an attempt's first token."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from poison_kit import URLS, World
from scripted_engines import choose, convicted, make_fleet, picked, ready

from dyn_relay.fleet.poison import SINGLY, Finding, PoisonRegister, Probation, SuspectedPoison
from dyn_relay.fleet.worker import Worker


async def test_poison_and_ten_bystanders_cost_two_workers() -> None:
    world = World({b"P"})
    w1 = world.fleet.workers[0]
    async with trio.open_nursery() as nursery:
        for n in range(10):
            nursery.start_soon(world.request, f"b{n}", b"%d" % n, w1)
        nursery.start_soon(world.request, "p", b"P", w1)
    assert len(world.dead) == 2
    assert world.outcomes.pop("p") == "convicted"
    assert set(world.outcomes.values()) == {"token"}
    assert len(world.outcomes) == 10
    assert world.busiest == 1


async def test_a_convicted_request_costs_nothing_more() -> None:
    """Sixty retries of the client, C1's kind, touch no worker."""
    world = World({b"P"})
    await world.request("p", b"P")
    assert (world.outcomes["p"], len(world.dead)) == ("convicted", 2)
    assert convicted(world.fleet, b"P")
    served = [worker.in_flight for worker in world.fleet.workers]
    for n in range(60):
        await world.request(f"retry{n}", b"P")
        assert world.outcomes[f"retry{n}"] == "refused"
    assert len(world.dead) == 2
    assert [worker.in_flight for worker in world.fleet.workers] == served
    assert not convicted(world.fleet, b"other")


async def test_the_conviction_expires(autojump_clock: trio.testing.MockClock) -> None:
    world = World({b"P"}, poison_ttl_secs=600)
    await world.request("p", b"P")
    await trio.sleep(599)
    assert convicted(world.fleet, b"P")
    await trio.sleep(2)
    assert not convicted(world.fleet, b"P")


async def test_a_group_of_equal_requests_is_tried_once() -> None:
    """Sixteen samples of one prompt on a worker that is killed from outside: one is tried, then all go on."""
    world = World()
    w1 = world.fleet.workers[0]
    world.died[w1.id].set()
    async with trio.open_nursery() as nursery:
        for n in range(16):
            nursery.start_soon(world.request, f"g{n}", b"G", w1)
    assert set(world.outcomes.values()) == {"token"}
    assert world.dead == [w1.id]


async def test_a_poisonous_group_is_convicted_once() -> None:
    world = World({b"P"})
    w1 = world.fleet.workers[0]
    async with trio.open_nursery() as nursery:
        for n in range(16):
            nursery.start_soon(world.request, f"g{n}", b"P", w1)
    assert len(world.dead) == 2
    assert sorted(set(world.outcomes.values())) == ["convicted", "refused"]


async def test_beside_a_suspect_everybody_is_innocent() -> None:
    """A worker dies under a suspect on probation: those that joined before and after it are not blamed."""
    fleet = make_fleet(urls=URLS)
    w1, w2, *_ = ready(fleet)
    with fleet.trial(w1, fingerprint=b"P") as trial:
        assert trial.died() is Finding.SUSPECT
    with (
        fleet.trial(w2, fingerprint=b"before") as before,
        fleet.trial(w2, fingerprint=b"P") as suspect,
        fleet.trial(w2, fingerprint=b"after") as after,
    ):
        assert before.died() is Finding.INNOCENT
        assert suspect.died() is Finding.CONVICTED
        assert after.died() is Finding.INNOCENT
    assert await choose(fleet, b"before") is not None


async def test_who_had_tokens_is_never_blamed() -> None:
    fleet = make_fleet(urls=URLS)
    w1, *_ = ready(fleet)
    with fleet.trial(w1, fingerprint=b"A") as trial:
        trial.token()
        trial.token()
        assert trial.died() is Finding.INNOCENT
    with fleet.trial(w1, fingerprint=b"B", proven=True) as trial:
        assert trial.died() is Finding.INNOCENT
    for name in (b"A", b"B"):
        assert await choose(fleet, name, frozenset()) is not None


async def test_a_proven_copy_of_a_suspect_shares_its_worker() -> None:
    """It has given tokens before, so it neither waits nor is on probation; nor does its end free the worker."""
    fleet = make_fleet(urls=URLS[:2])
    w1, w2 = ready(fleet)
    with fleet.trial(w1, fingerprint=b"G") as trial:
        trial.died()
    with fleet.trial(w2, fingerprint=b"G") as suspect:
        assert await choose(fleet, b"G", {w1.id}, proven=True) is w2
        with fleet.trial(w2, fingerprint=b"G", proven=True) as proven:
            assert not proven.suspect
            proven.token()
        assert suspect.died() is Finding.CONVICTED


async def test_a_suspect_that_passed_does_not_excuse_others() -> None:
    """Probation is over at the first token; who dies without one after that is a suspect."""
    fleet = make_fleet(urls=URLS)
    w1, w2, *_ = ready(fleet)
    with fleet.trial(w1, fingerprint=b"S") as trial:
        trial.died()
    with fleet.trial(w2, fingerprint=b"S") as passing, fleet.trial(w2, fingerprint=b"B") as other:
        passing.token()
        assert other.died() is Finding.SUSPECT


async def test_a_suspect_waits_for_a_worker_of_its_own() -> None:
    fleet = make_fleet(urls=URLS[:2])
    w1, w2 = ready(fleet)
    for name in (b"A", b"B"):
        with fleet.trial(w1, fingerprint=name) as trial:
            trial.died()
    chosen: list[Worker | None] = []

    async def wait() -> None:
        chosen.append(await choose(fleet, b"B", {w1.id}))

    async with trio.open_nursery() as nursery:
        with fleet.trial(w2, fingerprint=b"A") as trial:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert chosen == []
            # A dead worker is no way out, neither is a suspected one: it would have been tried after w2.
            fleet.report(w1, False, "", "cut")
            await trio.testing.wait_all_tasks_blocked()
            assert chosen == []
            trial.token()
    assert chosen == [w2]


async def test_a_waiting_suspect_gets_a_worker_that_joins() -> None:
    fleet = make_fleet(urls=URLS[:1])
    (w1,) = ready(fleet)
    for name in (b"A", b"B"):
        with fleet.trial(w1, fingerprint=name) as trial:
            trial.died()
    chosen: list[Worker | None] = []

    async def wait() -> None:
        chosen.append(await choose(fleet, b"B"))

    with fleet.trial(w1, fingerprint=b"A"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            added = [fleet.add(f"http://new{number}:1") for number in range(2)]
            await trio.testing.wait_all_tasks_blocked()
            assert chosen == []  # not ready yet: the ready one is waited for
            fleet.report(added[0], True)
            await trio.testing.wait_all_tasks_blocked()
            assert chosen == []  # one of two is on trial, and the other serves the rest
            fleet.report(added[1], True)
    assert chosen[0] in added


async def test_a_waiting_suspect_is_told_of_its_conviction() -> None:
    fleet = make_fleet(urls=URLS[:2])
    w1, w2 = ready(fleet)
    with fleet.trial(w1, fingerprint=b"P") as trial:
        trial.died()
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            with pytest.raises(SuspectedPoison):
                await choose(fleet, b"P")

        with fleet.trial(w2, fingerprint=b"P") as trial:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert trial.died() is Finding.CONVICTED


async def test_no_worker_left_for_a_suspect() -> None:
    fleet = make_fleet(urls=URLS[:1])
    (w1,) = ready(fleet)
    with fleet.trial(w1, fingerprint=b"P") as trial:
        trial.died()
    assert await choose(fleet, b"P", {w1.id}) is None


async def test_awaiting_between_choose_and_trial_is_found_out() -> None:
    fleet = make_fleet(urls=URLS)
    w1, w2, *_ = ready(fleet)
    for name in (b"A", b"B"):
        with fleet.trial(w1, fingerprint=name) as trial:
            trial.died()
    with (
        fleet.trial(w2, fingerprint=b"A"),
        pytest.raises(RuntimeError, match="between choose_now"),
        fleet.trial(w2, fingerprint=b"B"),
    ):
        pass


def register(attempts: int = 1, ttl: float = 10.0, capacity: int = 100) -> tuple[PoisonRegister, list[float]]:
    now = [0.0]
    return PoisonRegister(attempts, ttl, lambda: now[0], capacity), now


def test_attempts_on_one_dead_worker_count_once() -> None:
    poison, _ = register()
    for _ in range(5):
        assert not poison.suspect(b"x", alone=False)
    assert poison.suspicion(b"x") == 1
    assert poison.suspect(b"x", alone=True)


@pytest.mark.parametrize(("attempts", "deaths"), [(0, 1), (1, 2), (3, 4)])
def test_suspect_attempts(attempts: int, deaths: int) -> None:
    poison, _ = register(attempts)
    verdicts = [poison.suspect(b"x", alone=n > 0) for n in range(deaths)]
    assert verdicts == [False] * (deaths - 1) + [True]


def test_a_conviction_stands_when_a_copy_passes() -> None:
    """`logprob_start_len: -7` passes once and kills the second time."""
    poison, _ = register()
    poison.suspect(b"x", alone=False)
    poison.suspect(b"x", alone=True)
    assert not poison.clear(b"x")
    assert poison.convicted(b"x")


def test_suspicion_expires_and_is_bounded() -> None:
    poison, now = register(ttl=10.0, capacity=3)
    for n in range(5):
        now[0] = float(n)
        poison.suspect(b"%d" % n, alone=False)
    assert len(poison) == 3
    assert [poison.suspicion(b"%d" % n) for n in range(5)] == [0, 0, 1, 1, 1]
    now[0] = 13.0
    assert [poison.suspicion(b"%d" % n) for n in (2, 3, 4)] == [0, 0, 1]
    assert len(poison) == 1


@settings(max_examples=300)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["enter", "token", "died", "leave"]), st.integers(0, 5)), max_size=60),
    singly=st.sampled_from([1, SINGLY]),
)
def test_no_probation_outlives_its_attempt(steps: list[tuple[str, int]], singly: int) -> None:
    """Any order of events leaves nothing behind once every attempt is over."""
    poison, _ = register()
    probation = Probation(poison, lambda: None, lambda event: None)
    live = {}
    with patch("dyn_relay.fleet.poison.SINGLY", singly):
        for step, n in steps:
            trial = live.get(n)
            if step == "enter" and trial is None:
                name, worker = b"%d" % (n // 2), f"w{n % 2}"
                if poison.convicted(name) or (poison.suspicion(name) and not probation.may_begin(name, worker)):
                    continue
                live[n] = probation.trial([worker], name).__enter__()
            elif trial is not None and step == "token":
                trial.token()
            elif trial is not None and step == "died":
                trial.died()
            elif trial is not None:
                live.pop(n).__exit__(None, None, None)
    for trial in live.values():
        trial.__exit__(None, None, None)
    assert not probation._tokenless
    assert not probation._on_worker
    assert not probation._on_trial


async def test_other_requests_leave_a_suspects_worker_alone() -> None:
    """The suspects behind it wait for its first token, so its worker's queue must run empty."""
    fleet = make_fleet(urls=URLS[:2])
    w1, w2 = ready(fleet)
    with fleet.trial(w1, fingerprint=b"A") as trial:
        trial.died()
    with fleet.trial(w2, fingerprint=b"A"):
        assert [picked(fleet) for _ in range(4)] == [w1] * 4
        assert picked(fleet, {w1.id}) is w2  # but better there than nowhere
    assert {picked(fleet), picked(fleet)} == {w1, w2}
