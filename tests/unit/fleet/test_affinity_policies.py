"""Who gets what belongs together, and when it may not."""

from __future__ import annotations

import random
import zlib
from array import array
from collections import Counter

import pytest

from dyn_relay.config import Config
from dyn_relay.fleet.policies.base import Ask, Policy
from dyn_relay.fleet.policies.cache_aware import CacheAware
from dyn_relay.fleet.policies.catalog import POLICIES
from dyn_relay.fleet.policies.consistent_hashing import MOVED
from dyn_relay.fleet.policies.pins import IDLE, Pins
from dyn_relay.fleet.policies.sent import BLOCK, BLOCK_TEXT
from dyn_relay.fleet.target import Lease, Target
from dyn_relay.fleet.worker import Worker
from dyn_relay.http11.client import Origin

AFFINITY = ("consistent_hashing", "cache_aware", "manual")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def worker(number: int, ranks: int = 1) -> Worker:
    made = Worker(id=f"w{number}", number=number, origin=Origin.parse(f"http://h{number}:30000"), since=0.0)
    made.divide(ranks)
    return made


def targets(*loads: int) -> list[Target]:
    made = [worker(number).targets[0] for number in range(1, len(loads) + 1)]
    for target, load in zip(made, loads, strict=True):
        if load:
            hold(target, load)
    return made


def hold(target: Target, answers: int = 1) -> Lease:
    lease = Lease(target, lambda target: None, answers)
    lease.__enter__()
    return lease


def make(policy: str, clock: Clock | None = None, **options: object) -> Policy:
    return POLICIES[policy](Config(**options), random.Random(1), clock or Clock())  # type: ignore[arg-type]


def prompt(number: int, blocks: int = 8) -> array[int]:
    """Unlike any other from its first block on."""
    return array("I", range(number * 100_000, number * 100_000 + blocks * BLOCK))


def ask(policy: str, name: object, blocks: int = 8, **more: object) -> Ask:
    """For one session, which is known by its key, and by its prompt."""
    ids = prompt(zlib.crc32(str(name).encode()) % 10_000, blocks)
    return Ask(key=str(name), prefix=lambda: ids, **more)  # type: ignore[arg-type]


# -- all of them


@pytest.mark.parametrize("policy", AFFINITY)
def test_what_belongs_together_stays_together(policy: str) -> None:
    """A3: the requests of one session go to one worker, and sessions to all."""
    candidates, chooser = targets(*[0] * 4), make(policy)
    found = {}
    for name in range(200):
        found[name] = chooser.choose(candidates, ask(policy, name))
        hold(found[name])
    for _ in range(3):
        assert {name: chooser.choose(candidates, ask(policy, name)) for name in range(200)} == found
    assert min(Counter(target.id for target in found.values()).values()) >= 30


@pytest.mark.parametrize("policy", AFFINITY)
def test_a_session_whose_worker_is_away_moves_and_stays(policy: str) -> None:
    """A3, A8: not to be had (dead, or excluded since it is busy): another one, and that one from then on."""
    candidates, chooser = targets(*[0] * 3), make(policy)
    home = chooser.choose(candidates, ask(policy, "s"))
    left = [target for target in candidates if target is not home]
    second = chooser.choose(left, ask(policy, "s"))
    assert second in left
    assert [chooser.choose(candidates, ask(policy, "s")) for _ in range(3)] == [second] * 3


@pytest.mark.parametrize("policy", AFFINITY)
def test_the_sessions_of_a_dead_worker_spread(policy: str) -> None:
    """A9: 32 streams of one worker are resumed by three others: at most one more on one of them than on another."""
    candidates, chooser = targets(0, 32, 32, 32), make(policy)
    sessions = [name for name in range(1000) if chooser.choose(candidates, ask(policy, name)) is candidates[0]][:32]
    left = candidates[1:]
    for name in sessions:
        hold(chooser.choose(left, ask(policy, name, resumed=True)))
    loads = [target.load for target in left]
    assert sum(loads) == 96 + len(sessions)
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("policy", ["consistent_hashing", "cache_aware"])
def test_even_those_of_one_session_spread(policy: str) -> None:
    """A9: 32 samples of one prompt, under one key, which a survivor has: its cache is not worth a crowd."""
    candidates, chooser = targets(0, 32, 32, 32), make(policy)
    left = candidates[1:]
    chooser.choose(left, ask(policy, "s", 800))
    for _ in range(32):
        hold(chooser.choose(left, ask(policy, "s", 800, resumed=True)))
    loads = [target.load for target in left]
    assert max(loads) - min(loads) <= 2


@pytest.mark.parametrize("policy", AFFINITY)
def test_a_resumed_answer_that_has_lost_its_home_goes_by_load(policy: str) -> None:
    """Not to the next in its row, nor to who is merely not above the mean."""
    chooser = make(policy)
    home, *left = targets(0, 10, 11, 15)
    for name in range(200):
        if chooser.choose([home, *left], ask(policy, name)) is home:
            assert chooser.choose(left, ask(policy, name, resumed=True)) is left[0]


@pytest.mark.parametrize("policy", ["consistent_hashing", "cache_aware"])
def test_an_overloaded_worker_gets_nothing_more_by_affinity(policy: str) -> None:
    """A9: a saturated engine is left, however hot its key."""
    candidates = targets(0, 0, 0, 0)
    chooser = make(policy, balance_abs_threshold=8, balance_rel_threshold=1.5)
    for _ in range(200):
        hold(chooser.choose(candidates, ask(policy, "hot", 800)))
    loads = sorted(target.load for target in candidates)
    assert loads[-1] <= 1.5 * 50 + 1
    assert loads[1] >= 40, "others help"


def test_both_thresholds_must_be_exceeded() -> None:
    """SMG's: 64 more, and one and a half times as many."""
    chooser = make("consistent_hashing")
    candidates = targets(0, 0)
    home = chooser.choose(candidates, Ask(key="k"))
    other = next(target for target in candidates if target is not home)
    hold(home, 120)
    assert chooser.choose(candidates, Ask(key="k")) is home  # 60 above the mean of 60
    hold(home, 10)
    assert chooser.choose(candidates, Ask(key="k")) is other  # 65 above the mean of 65
    busy = targets(400, 250)
    chooser = make("consistent_hashing")
    assert chooser.choose(busy, Ask(key=key_at(chooser, busy, 0))) is busy[0]  # 75 above the mean, but 1.23 times it


def key_at(chooser: Policy, candidates: list[Target], wanted: int) -> str:
    """A key that belongs to this one of them."""
    fresh = make("consistent_hashing")
    idle = [worker(target.worker.number).targets[0] for target in candidates]
    return next(str(key) for key in range(100) if fresh.choose(idle, Ask(key=str(key))) is idle[wanted])


@pytest.mark.parametrize("policy", AFFINITY)
def test_what_names_nothing_goes_by_load(policy: str) -> None:
    candidates, chooser = targets(3, 1, 2), make(policy)
    assert {chooser.choose(candidates, Ask()).id for _ in range(5)} == {"w2"}


# -- consistent_hashing


def homes(candidates: list[Target], keys: int = 2000) -> dict[str, str]:
    chooser = make("consistent_hashing")
    return {str(key): chooser.choose(candidates, Ask(key=str(key))).url for key in range(keys)}


def test_proxies_agree_whatever_their_order() -> None:
    """The URL decides, not when a worker joined here."""
    one = targets(*[0] * 5)
    other = [
        Worker(id=f"w{at}", number=at, origin=target.worker.origin, since=0.0).targets[0]
        for at, target in enumerate(reversed(one), 1)
    ]
    assert homes(one) == homes(other)


def test_a_leaving_worker_moves_its_own_keys_only_and_they_spread() -> None:
    all_five = targets(*[0] * 5)
    before, after = homes(all_five), homes(all_five[:-1])
    moved = {key: after[key] for key in before if before[key] != after[key]}
    assert all(before[key] == all_five[-1].url for key in moved)
    counts = Counter(moved.values())
    assert len(counts) == 4
    assert min(counts.values()) > 60  # of about 100 each
    assert min(Counter(before.values()).values()) > 330  # of 400 each


def test_each_rank_has_keys_of_its_own() -> None:
    ranks = [*worker(1, 2).targets, *worker(2, 2).targets]
    assert min(Counter(homes(ranks).values()).values()) > 430


def test_a_moved_session_goes_home_when_it_was_idle() -> None:
    """So that proxies agree again."""
    clock = Clock()
    candidates, chooser = targets(0, 0, 0), make("consistent_hashing", clock)
    home = chooser.choose(candidates, Ask(key="k"))
    away = chooser.choose([target for target in candidates if target is not home], Ask(key="k"))
    for _ in range(3):
        clock.now += MOVED - 1
        assert chooser.choose(candidates, Ask(key="k")) is away
    clock.now += MOVED + 1
    assert chooser.choose(candidates, Ask(key="k")) is home


def test_a_worker_that_has_left_is_no_home() -> None:
    """Its sessions have new homes, and are not thought to be moved."""
    clock = Clock()
    candidates, chooser = targets(0, 0, 0), make("consistent_hashing", clock)
    home = chooser.choose(candidates, Ask(key="k"))
    chooser.forget(home.worker)
    left = [target for target in candidates if target is not home]
    second = chooser.choose(left, Ask(key="k"))
    assert chooser.choose(candidates, Ask(key="k")) is home, "it joined again, and nobody had moved"
    assert second is not home


# -- manual


def test_manual_moves_nothing_for_load_or_newcomers() -> None:
    candidates, chooser = targets(0, 0), make("manual")
    home = chooser.choose(candidates, Ask(key="k"))
    hold(home, 1000)
    more = [*candidates, worker(7).targets[0]]
    assert [chooser.choose(more, Ask(key="k")) for _ in range(3)] == [home] * 3
    assert chooser.choose(more, Ask(key="new")) is not home


# -- pins


def test_pins_end_and_are_bounded() -> None:
    clock = Clock()
    pins = Pins(clock, most=3)
    for key in "abcd":
        pins.set(key, "w" + key)
    assert [pins.get(key) for key in "abcd"] == ["", "wb", "wc", "wd"]
    pins.get("b")
    pins.set("e", "we")
    assert [pins.get(key) for key in "bc"] == ["wb", ""]
    clock.now = IDLE + 1
    assert pins.get("b") == ""
    assert len(pins) == 2


# -- cache_aware


def sent(chooser: Policy, candidates: list[Target], prefix: object, space: bytes = b"") -> Target:
    return chooser.choose(candidates, Ask(prefix=lambda: prefix, cache_space=space))  # type: ignore[return-value, arg-type]


def test_the_longest_beginning_wins() -> None:
    chooser = make("cache_aware")
    a, b = candidates = targets(0, 0)
    short, long = prompt(1, 4), prompt(1, 12)
    first = sent(chooser, candidates, short)
    other = b if first is a else a
    assert sent(chooser, [other], long) is other
    assert [sent(chooser, candidates, prompt(1, 16)) for _ in range(3)] == [other] * 3


def test_too_little_in_common_goes_by_load() -> None:
    """--cache-threshold 0.3: a fourth of the prompt is no reason, a half is."""
    chooser = make("cache_aware")
    candidates = targets(0, 0)
    home = sent(chooser, candidates, prompt(1, 4))
    hold(home)
    other = next(target for target in candidates if target is not home)
    assert sent(chooser, candidates, prompt(1, 16)) is other
    chooser = make("cache_aware")
    candidates = targets(0, 0)
    home = sent(chooser, candidates, prompt(1, 16))
    hold(home)
    assert sent(chooser, candidates, prompt(1, 32)) is home


def test_a_text_and_its_ids_are_not_compared() -> None:
    chooser = make("cache_aware")
    candidates = targets(0, 0)
    home = sent(chooser, candidates, "x" * 12 * BLOCK_TEXT)
    hold(home)
    assert sent(chooser, candidates, "x" * 15 * BLOCK_TEXT) is home
    assert sent(chooser, candidates, array("I", [ord("x")] * 12 * BLOCK)) is not home


def test_cache_spaces_are_apart() -> None:
    """miles' multi-LoRA: the same prompt under two adapters shares nothing."""
    chooser = make("cache_aware")
    candidates = targets(0, 0)
    home = sent(chooser, candidates, prompt(1, 16), b"a")
    hold(home)
    assert sent(chooser, candidates, prompt(1, 16), b"b") is not home
    assert sent(chooser, candidates, prompt(1, 16), b"a") is home


def test_a_restarted_worker_does_not_attract_everything() -> None:
    """A10: the 100 prompts after it came back, of which nobody knows any, go to all; so do 100 that others know."""
    candidates, chooser = targets(0, 0, 0, 0), make("cache_aware")
    for number in range(200):
        hold(sent(chooser, candidates, prompt(number)))
    chooser.forget(candidates[0].worker)
    counts: Counter[str] = Counter()
    for number in range(200, 300):
        target = sent(chooser, candidates, prompt(number))
        hold(target)
        counts[target.id] += 1
    assert max(counts.values()) - min(counts.values()) <= 1
    again = Counter(sent(chooser, candidates, prompt(number)).id for number in range(50, 150))
    assert again["w1"] <= 50


def test_what_a_restarted_worker_had_is_gone() -> None:
    chooser = make("cache_aware")
    assert isinstance(chooser, CacheAware)
    a, b = candidates = targets(0, 0)
    home = sent(chooser, candidates, prompt(1))
    chooser.forget(home.worker)
    hold(home)
    assert sent(chooser, candidates, prompt(1)) is (b if home is a else a)
    for _ in range(1000):
        sent(chooser, candidates, prompt(1))
        chooser.forget(a.worker)
        chooser.forget(b.worker)
    assert chooser._index._live == 0, "numbers of what is forgotten are free"


def test_a_beginning_that_all_share_does_not_keep_all_in_one_place() -> None:
    """Not even far below the guard: a thousand sessions that begin with the same 1024 tokens."""
    candidates, chooser = targets(0, 0, 0, 0), make("cache_aware")
    shared = prompt(999, 32)
    for number in range(1000):
        hold(sent(chooser, candidates, shared + prompt(number, 8)))
    loads = [target.load for target in candidates]
    assert max(loads) - min(loads) <= 6
