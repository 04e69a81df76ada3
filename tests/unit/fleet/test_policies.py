"""Who is chosen among equals and unequals."""

from __future__ import annotations

import random
import typing
from collections import Counter

import pytest

from dyn_relay.config import Config
from dyn_relay.config import Policy as Names
from dyn_relay.fleet.policies.base import Ask, Policy
from dyn_relay.fleet.policies.catalog import POLICIES
from dyn_relay.fleet.target import Lease, Target
from dyn_relay.fleet.worker import Worker
from dyn_relay.http11.client import Origin


def targets(*loads: int) -> list[Target]:
    workers = [
        Worker(id=f"w{n}", number=n, origin=Origin.parse(f"http://h:{n}"), since=0.0) for n, _ in enumerate(loads, 1)
    ]
    made = [worker.targets[0] for worker in workers]
    for one, load in zip(made, loads, strict=True):
        Lease(one, lambda target: None, load).__enter__()
    return made


def make(policy: str) -> Policy:
    return POLICIES[policy](Config(), random.Random(1), lambda: 0.0)


def chosen(policy: str, candidates: list[Target], times: int) -> list[str]:
    chooser = make(policy)
    return [chooser.choose(candidates, Ask()).id for _ in range(times)]


def test_the_catalog_has_what_the_option_offers() -> None:
    assert set(POLICIES) == set(typing.get_args(Names))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_candidate_is_chosen(policy: str) -> None:
    assert chosen(policy, targets(7), 3) == ["w1"] * 3


def test_round_robin_goes_round() -> None:
    assert chosen("round_robin", targets(5, 0, 0), 5) == ["w1", "w2", "w3", "w1", "w2"]


def test_round_robin_stays_fair_while_candidates_change() -> None:
    """A10: one that comes back gets its turn, not the whole traffic."""
    chooser = make("round_robin")
    a, b, c = targets(0, 0, 0)
    assert [chooser.choose([a, c], Ask()).id for _ in range(3)] == ["w1", "w3", "w1"]
    assert [chooser.choose([a, b, c], Ask()).id for _ in range(3)] == ["w2", "w3", "w1"]


def test_least_loaded_takes_the_idlest_and_rotates_among_equals() -> None:
    assert chosen("least_loaded", targets(2, 1, 2), 2) == ["w2", "w2"]
    assert chosen("least_loaded", targets(0, 1, 0), 4) == ["w1", "w3", "w1", "w3"]


def test_random_reaches_everybody() -> None:
    counts = Counter(chosen("random", targets(0, 9, 0), 300))
    assert set(counts) == {"w1", "w2", "w3"}
    assert min(counts.values()) > 60


def test_power_of_two_never_takes_the_busiest() -> None:
    counts = Counter(chosen("power_of_two", targets(3, 9, 1), 300))
    assert set(counts) == {"w1", "w3"}
    assert counts["w3"] > counts["w1"] > 0


@pytest.mark.parametrize("policy", ["least_loaded", "power_of_two"])
def test_among_equal_ranks_the_worker_with_less_to_do(policy: str) -> None:
    """O2: two idle ranks, one of them of a worker whose other rank is busy."""
    busy, idle = (target.worker for target in targets(0, 0))
    for worker in (busy, idle):
        worker.divide(2)
    Lease(busy.targets[0], lambda target: None).__enter__()
    assert chosen(policy, [busy.targets[1], idle.targets[1]], 3) == ["w2@1"] * 3


def test_among_equals_tokens_decide() -> None:
    """Two streams each, but one worker's are long: the next one goes to the other."""
    long, short = targets(1, 1)
    Lease(long, lambda target: None, tokens=lambda: 60_000).__enter__()
    Lease(short, lambda target: None, tokens=lambda: 10).__enter__()
    assert make("least_loaded").choose([long, short], Ask()) is short
    assert make("power_of_two").choose([long, short], Ask()) is short
