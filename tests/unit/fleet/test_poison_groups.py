"""Very many suspects of one death are tried a few at a time."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import trio
from poison_kit import URLS, World
from scripted_engines import choose, make_fleet, ready

from dyn_relay.fleet.poison import SINGLY, Finding
from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.worker import Worker


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
