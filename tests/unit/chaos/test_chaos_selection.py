"""Whom a campaign strikes, what its clients send: chosen by a seed, the same each time."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from dyn_chaos import distribution, mix
from dyn_chaos.campaigns.base import Load
from dyn_chaos.distribution import Distribution
from dyn_chaos.selection import BUSIEST, IDLEST, RANDOM, Mode, choose
from dyn_testkit.engine import Model
from dyn_testkit.oracle import Oracle

NAMES = ["a", "b", "c", "d"]
LOADS = {"a": 1.0, "b": 5.0, "c": 5.0, "d": 0.0}


@pytest.mark.parametrize(
    ("text", "count"),
    [("one", 1), ("all", 5), ("all-but-one", 4), ("3", 3), ("50%", 3), ("1%", 1), ("100%", 5), ("5", 5)],
)
def test_a_mode_says_how_many(text: str, count: int) -> None:
    assert Mode(text).count(5) == count


@pytest.mark.parametrize("text", ["", "0", "two", "0%", "101%", "-1", "one "])
def test_a_mode_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is none of one, all"):
        Mode(text)


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="6 of 5 workers"):
        Mode("6").count(5)


def test_targets() -> None:
    def chosen(target: str, mode: str) -> list[str]:
        return choose(NAMES, LOADS, target, Mode(mode), Random(1))

    assert set(chosen(BUSIEST, "2")) == {"b", "c"}
    assert chosen(BUSIEST, "all")[2:] == ["a", "d"]
    assert chosen(IDLEST, "2") == ["d", "a"]
    assert chosen("c", "one") == ["c"]
    with pytest.raises(LookupError, match="'e' is none of a, b, c, d"):
        chosen("e", "one")


@pytest.mark.parametrize("target", [BUSIEST, RANDOM, "c"])
def test_a_seed_chooses_the_same_each_time(target: str) -> None:
    for seed in range(20):
        first, second = (choose(NAMES, LOADS, target, Mode("all"), Random(seed)) for _ in range(2))
        assert first == second
    many = {tuple(choose(NAMES, LOADS, target, Mode("all"), Random(seed))) for seed in range(20)}
    assert len(many) > 1


@pytest.mark.parametrize("text", ["7", "2-9", "log:2-900", "0.1-0.5"])
def test_a_distribution_stays_in_its_bounds_and_says_itself(text: str) -> None:
    read = distribution.parse(text)
    assert str(read) == text
    assert all(read.low <= read.draw(Random(seed)) <= read.high * 1.000001 for seed in range(50))


def test_most_of_a_skewed_distribution_is_small() -> None:
    drawn = [Distribution(1, 10_000, skewed=True).draw(Random(seed)) for seed in range(200)]
    assert sum(value < 100 for value in drawn) > 80


@pytest.mark.parametrize(("text", "said"), [("x", "neither N"), ("9-2", "9 is more than 2"), ("log:0-5", "logarithm")])
def test_a_distribution_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        distribution.parse(text)


def test_a_load_is_the_same_for_a_seed_and_has_its_share_of_streams() -> None:
    load = Load(requests=20, sse=0.3, tokens=Distribution(4, 8))
    plans, others = (list(islice(mix.draw(load, seed), 40)) for seed in (3, 4))
    assert plans == list(islice(mix.draw(load, 3), 40))
    assert plans != others
    for some in (plans[:20], plans[20:]):
        assert sum(plan.body.get("stream") is True for plan in some) == load.streams == 6
    assert {plan.body["sampling_params"]["max_new_tokens"] for plan in plans} <= {1, 4, 5, 6, 7, 8}
    prompts = [tuple(plan.body["input_ids"]) for plan in plans]
    assert not any(a != b and b[: len(a)] == a for a in prompts for b in prompts)


def test_only_the_users_that_are_wanted_send() -> None:
    plans = list(islice(mix.draw(Load(users=("greedy",)), 0), 16))
    assert all("token_ids_logprob" in plan.body for plan in plans)


def test_a_pool_is_asked_again_under_other_names_and_at_temperature_0() -> None:
    pool = [mix.repeatable(plan) for plan in islice(mix.draw(Load(users=("slime_agent",)), 0), 2)]
    assert {plan.body["sampling_params"]["temperature"] for plan in pool} == {0}
    sent = list(islice(mix.again(pool), 6))
    assert len({plan.key for plan in sent}) == len({plan.body["rid"] for plan in sent}) == 6
    asked = {plan.key: mix.of_oracle(Oracle(Model()), plan) for plan in pool}
    assert mix.of_pool(asked, sent[5]).text == asked[pool[1].key].text
    assert mix.of_pool(asked, sent[5]).key == sent[5].key
