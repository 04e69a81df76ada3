"""Who is blamed when a worker dies before an attempt's first token."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engines import choose, claim, convicted, make_fleet, picked, ready

from dyn_relay.fleet.poison import SINGLY, Finding, PoisonRegister, Probation, SuspectedPoison
from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.worker import Worker

URLS = tuple(f"http://w{n}:1" for n in (1, 2, 3, 4))


class World:
    """Four workers; requests that are poison kill the one they are tried on once everybody there is in place."""

    def __init__(self, poison: set[bytes] = frozenset(), **options: object) -> None:  # type: ignore[assignment]
        self.fleet: Fleet = make_fleet(urls=URLS, **options)
        self.poison = poison
        self.died: dict[str, trio.Event] = {worker.id: trio.Event() for worker in ready(self.fleet)}
        self.outcomes: dict[str, str] = {}
        self.busiest = 0
        self.on_trial: dict[str, int] = {}

    @property
    def dead(self) -> list[str]:
        return [worker for worker, event in self.died.items() if event.is_set()]

    async def request(self, name: str, fingerprint: bytes, first: Worker | None = None) -> None:
        """One logical request, as the relay runs it, to its first token."""
        excluded: set[str] = set()
        worker: Worker | None = first
        while True:
            try:
                worker = worker or await choose(self.fleet, fingerprint, excluded)
            except SuspectedPoison:
                self.outcomes[name] = "refused"
                return
            if worker is None:
                self.outcomes[name] = "no worker"
                return
            finding = await self.attempt(worker, fingerprint)
            if finding is None or finding is Finding.CONVICTED:
                self.outcomes[name] = "token" if finding is None else "convicted"
                return
            excluded.add(worker.id)
            worker = None

    async def attempt(self, worker: Worker, fingerprint: bytes) -> Finding | None:
        died = self.died[worker.id]
        with claim(self.fleet, worker), self.fleet.trial(worker, fingerprint=fingerprint) as trial:
            if trial.suspect:
                self.on_trial[worker.id] = self.on_trial.get(worker.id, 0) + 1
                self.busiest = max(self.busiest, self.on_trial[worker.id])
            try:
                for _ in range(5):  # everybody takes a place before anything happens
                    await trio.lowlevel.checkpoint()
                if fingerprint in self.poison:
                    self.fleet.report(worker, False, "end of stream", "cut")
                    died.set()
                for _ in range(5):
                    await trio.lowlevel.checkpoint()
                if died.is_set():
                    return trial.died()
                trial.token()
                return None
            finally:
                if trial.suspect:
                    self.on_trial[worker.id] -= 1


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


@pytest.mark.parametrize(("others", "together"), [(SINGLY - 1, 1), (2 * SINGLY - 2, 1), (10 * SINGLY, 10)])
@pytest.mark.parametrize("poison", [False, True])
async def test_very_many_suspects_of_one_death_are_tried_a_few_at_a_time(
    others: int, together: int, poison: bool
) -> None:
    """If it was poison after all, it costs one worker more, and still nobody else."""
    world = World({b"P"} if poison else set())
    w1 = world.fleet.workers[0]
    if not poison:
        world.died[w1.id].set()
    async with trio.open_nursery() as nursery:
        for n in range(others):
            nursery.start_soon(world.request, f"b{n}", b"%d" % n, w1)
        nursery.start_soon(world.request, "p", b"P", w1)
    assert world.busiest == together
    assert len(world.dead) == (1 if not poison else 2 if together == 1 else 3)
    assert world.outcomes.pop("p") == ("convicted" if poison else "token")
    assert set(world.outcomes.values()) == {"token"}
    assert len(world.outcomes) == others


def suspected(fleet: Fleet, worker: Worker, names: list[bytes]) -> None:
    """The worker has died under all of them."""
    with ExitStack() as stack:
        trials = [stack.enter_context(fleet.trial(worker, fingerprint=name)) for name in names]
        assert {trial.died() for trial in trials} == {Finding.SUSPECT}


MANY = [b"%d" % n for n in range(3 * SINGLY)]


async def test_who_is_left_of_several_on_probation_is_alone() -> None:
    fleet = make_fleet(urls=URLS)
    w1, w2, *_ = ready(fleet)
    suspected(fleet, w1, MANY)
    with (
        fleet.trial(w2, fingerprint=MANY[0]) as first,
        fleet.trial(w2, fingerprint=MANY[1]) as second,
        fleet.trial(w2, fingerprint=b"B") as bystander,
    ):
        first.token()
        assert bystander.died() is Finding.INNOCENT
        assert second.died() is Finding.CONVICTED


async def test_when_all_of_several_on_probation_have_passed_they_excuse_nobody() -> None:
    fleet = make_fleet(urls=URLS)
    w1, w2, *_ = ready(fleet)
    suspected(fleet, w1, MANY)
    with (
        fleet.trial(w2, fingerprint=b"B") as bystander,
        fleet.trial(w2, fingerprint=MANY[0]) as first,
        fleet.trial(w2, fingerprint=MANY[1]) as second,
    ):
        first.token()
        second.token()
        assert bystander.died() is Finding.SUSPECT


async def test_those_on_whose_probation_a_worker_died_are_tried_alone() -> None:
    fleet = make_fleet(urls=URLS)
    w1, w2, w3, w4 = ready(fleet)
    suspected(fleet, w1, MANY)
    with fleet.trial(w2, fingerprint=MANY[0]) as first, fleet.trial(w2, fingerprint=MANY[1]) as second:
        assert [first.died(), second.died()] == [Finding.SUSPECT, Finding.SUSPECT]
    dead = {w1.id, w2.id}
    with fleet.trial(w3, fingerprint=MANY[0]):
        with trio.move_on_after(0) as late:
            await choose(fleet, MANY[1], dead)
        assert late.cancelled_caught  # of two workers one tries suspects, and this one does it alone
        with trio.move_on_after(0) as late:
            await choose(fleet, MANY[2], dead)
        assert late.cancelled_caught
    with fleet.trial(w3, fingerprint=MANY[2]):
        with trio.move_on_after(0) as late:
            await choose(fleet, MANY[1], dead)
        assert late.cancelled_caught  # it is to be alone
        assert await choose(fleet, MANY[3], dead) is w3
    assert w4.in_flight == 0


async def test_who_is_on_probation_together_is_bounded_by_the_smallest_of_their_deaths() -> None:
    fleet = make_fleet(urls=URLS)
    w1, w2, w3, w4 = ready(fleet)
    dead = {w1.id, w2.id, w4.id}
    with patch("dyn_relay.fleet.poison.SINGLY", 1):
        suspected(fleet, w1, [b"A1", b"A2", b"A3", b"A4"])
        suspected(fleet, w2, [b"B1", b"B2"])
        with fleet.trial(w3, fingerprint=b"A1"):
            assert await choose(fleet, b"A2", dead) is w3
            with fleet.trial(w3, fingerprint=b"B1"), trio.move_on_after(0) as late:
                await choose(fleet, b"A2", dead)
            assert late.cancelled_caught


async def test_of_few_whose_probation_killed_a_worker_nobody_is_tried_together_again() -> None:
    fleet = make_fleet(urls=URLS)
    w1, w2, w3, w4 = ready(fleet)
    with patch("dyn_relay.fleet.poison.SINGLY", 1):
        suspected(fleet, w1, [b"A1", b"A2", b"A3"])
        suspected(fleet, w2, [b"A1", b"A2"])
        with fleet.trial(w3, fingerprint=b"A1"), trio.move_on_after(0) as late:
            await choose(fleet, b"A2", {w1.id, w2.id, w4.id})
        assert late.cancelled_caught


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
