"""Who is chosen among equals and unequals."""

from __future__ import annotations

import random
import typing
from collections import Counter

import pytest

from dyn_relay.config import Policy
from dyn_relay.fleet.policies.catalog import POLICIES
from dyn_relay.fleet.worker import Worker
from dyn_relay.http11.client import Origin


def workers(*loads: int) -> list[Worker]:
    return [
        Worker(id=f"w{n}", number=n, origin=Origin.parse(f"http://h:{n}"), since=0.0, load=load)
        for n, load in enumerate(loads, 1)
    ]


def chosen(policy: str, candidates: list[Worker], times: int) -> list[str]:
    chooser = POLICIES[policy](random.Random(1))
    return [chooser.choose(candidates).id for _ in range(times)]


def test_the_catalog_has_what_the_option_offers() -> None:
    assert set(POLICIES) == set(typing.get_args(Policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_candidate_is_chosen(policy: str) -> None:
    assert chosen(policy, workers(7), 3) == ["w1"] * 3


def test_round_robin_goes_round() -> None:
    assert chosen("round_robin", workers(5, 0, 0), 5) == ["w1", "w2", "w3", "w1", "w2"]


def test_round_robin_stays_fair_while_candidates_change() -> None:
    """A10: one that comes back gets its turn, not the whole traffic."""
    chooser = POLICIES["round_robin"](random.Random(1))
    a, b, c = workers(0, 0, 0)
    assert [chooser.choose([a, c]).id for _ in range(3)] == ["w1", "w3", "w1"]
    assert [chooser.choose([a, b, c]).id for _ in range(3)] == ["w2", "w3", "w1"]


def test_least_loaded_takes_the_idlest_and_rotates_among_equals() -> None:
    assert chosen("least_loaded", workers(2, 1, 2), 2) == ["w2", "w2"]
    assert chosen("least_loaded", workers(0, 1, 0), 4) == ["w1", "w3", "w1", "w3"]


def test_random_reaches_everybody() -> None:
    counts = Counter(chosen("random", workers(0, 9, 0), 300))
    assert set(counts) == {"w1", "w2", "w3"}
    assert min(counts.values()) > 60


def test_power_of_two_never_takes_the_busiest() -> None:
    counts = Counter(chosen("power_of_two", workers(3, 9, 1), 300))
    assert set(counts) == {"w1", "w3"}
    assert counts["w3"] > counts["w1"] > 0
