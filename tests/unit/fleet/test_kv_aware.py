"""Where an attempt goes when caches are known: prefill saved, weighed against load."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from dyn_relay.config import Config
from dyn_relay.fleet.kv.events import Stored
from dyn_relay.fleet.kv.index import RankId
from dyn_relay.fleet.policies.base import Ask, Prefix
from dyn_relay.fleet.policies.kv_aware import ASSUMED, KvAware
from dyn_relay.fleet.target import Lease, Target
from dyn_relay.fleet.worker import Worker
from dyn_relay.formats.traits import UNKNOWN, KvEvents, Traits
from dyn_relay.http11.client import Origin

PAGE = 16


class Bench:
    """A policy before workers whose caches are told by hand."""

    def __init__(self, workers: int, ranks: int = 1, **config: Any) -> None:
        self.now = 0.0
        self.policy = KvAware(Config(policy="kv_aware", **config), random.Random(1), lambda: self.now)
        traits = Traits(kv_events=KvEvents("*", 5557, "", PAGE, ranks))
        self.workers = [
            Worker(f"w{n}", n, Origin.parse(f"http://h:{n}"), since=0.0, traits=traits) for n in range(1, workers + 1)
        ]
        self.ranks = {
            (n, rank): self.policy.index.join(RankId(f"w{n}", rank))
            for n in range(1, workers + 1)
            for rank in range(ranks)
        }
        self._names = 0

    @property
    def targets(self) -> list[Target]:
        return [target for worker in self.workers for target in worker.targets]

    def caches(self, worker: int, tokens: Sequence[int], medium: str = "GPU", rank: int = 0) -> None:
        pages = len(tokens) // PAGE
        names = list(range(self._names, self._names + pages))
        self._names += pages
        event = Stored(names, None, list(tokens[: pages * PAGE]), PAGE, medium=medium)
        self.policy.index.apply(self.ranks[worker, rank], [event])

    def choose(self, tokens: Prefix | None, **ask: Any) -> Target:
        return self.policy.choose(self.targets, Ask(prefix=lambda: tokens, **ask))

    def send(self, tokens: Sequence[int], **ask: Any) -> str:
        """Choose, and hold the lease for ever."""
        target = self.choose(tokens, **ask)
        hold(target, len(tokens))
        return target.id


def hold(target: Target, tokens: int = 0, answers: int = 1) -> None:
    Lease(target, lambda target: None, answers, lambda: tokens).__enter__()


def prompt(seed: int, pages: int = 60) -> list[int]:
    return random.Random(seed).choices(range(1000), k=pages * PAGE + 1)


def test_the_most_of_the_prompt_is_where_it_goes() -> None:
    bench = Bench(3)
    bench.caches(2, prompt(1))
    bench.caches(3, prompt(1)[: 30 * PAGE])
    assert bench.choose(prompt(1)).id == "w2"
    bench.policy.forget(bench.workers[1])
    bench.policy.index.leave(bench.ranks[2, 0])
    assert bench.choose(prompt(1)).id == "w3"


def test_slower_tiers_count_less() -> None:
    bench = Bench(3)
    bench.caches(1, prompt(1), "DISK")
    bench.caches(2, prompt(1), "CPU_PINNED")
    bench.caches(3, prompt(1)[: 40 * PAGE])
    assert bench.choose(prompt(1)).id == "w2"  # 60 pages at 3/4; w3 has 40 at 1, w1 has 60 at 1/4
    bench.caches(3, prompt(1)[: 50 * PAGE])
    bench.now += ASSUMED + 1
    assert bench.choose(prompt(1)).id == "w3"


def test_load_outweighs_a_little_saved() -> None:
    bench = Bench(2)
    bench.caches(1, prompt(1)[: 2 * PAGE])
    hold(bench.targets[0], tokens=1000)
    assert bench.choose(prompt(1)).id == "w2"
    full = Bench(2)
    full.caches(1, prompt(1)[: 2 * PAGE])
    hold(full.targets[0], tokens=50_000, answers=0)
    assert full.choose(prompt(1)).id == "w2"
    light = Bench(2)
    light.caches(1, prompt(1))
    hold(light.targets[0], tokens=1000)
    assert light.choose(prompt(1)).id == "w1"


def test_the_weight_of_the_cache() -> None:
    """--kv-overlap-score-weight 0 looks at load alone; a great one hardly at it."""
    for weight, want in ((0.0, "w2"), (1.0, "w2"), (10.0, "w1")):
        bench = Bench(2, kv_overlap_score_weight=weight)
        bench.caches(1, prompt(1))
        hold(bench.targets[0], answers=6)
        assert bench.choose(prompt(1)).id == want


@pytest.mark.parametrize("tokens", [None, "a text"])
def test_without_token_ids_the_load_decides(tokens: Prefix | None) -> None:
    bench = Bench(2)
    hold(bench.targets[0], answers=2)
    hold(bench.targets[1], tokens=9999)
    assert bench.choose(tokens).id == "w2"
    assert bench.policy.counts() == {"by load": 1}


def test_where_nobody_publishes_the_prompt_is_not_even_read() -> None:
    bench = Bench(2)
    for worker in bench.workers:
        worker.traits = UNKNOWN

    def read() -> Prefix:
        raise AssertionError("read")

    assert bench.policy.choose(bench.targets, Ask(prefix=read)).id == "w1"


def test_a_worker_that_publishes_nothing_is_still_used() -> None:
    bench = Bench(2)
    bench.workers[1].traits = UNKNOWN
    assert {bench.send(prompt(seed)) for seed in range(6)} == {"w1", "w2"}


def test_the_samples_of_a_prompt_meet() -> None:
    """A burst of 8 samples, before any event can tell of the first."""
    bench = Bench(4)
    assert len({bench.send(prompt(1, pages=100)) for _ in range(8)}) == 1


def test_a_burst_of_64_prompts_with_8_samples_is_even() -> None:
    """The RL shape: hardly a prompt is computed twice, and nobody has more to do than the others."""
    for order in (lambda n: n // 8, lambda n: n % 64):
        bench = Bench(8)
        where: dict[int, set[str]] = {}
        for number in range(512):
            seed = order(number)
            where.setdefault(seed, set()).add(bench.send(prompt(seed, pages=random.Random(seed).randint(80, 320))))
        computed = sum(map(len, where.values()))
        loads = [target.load for target in bench.targets]
        assert computed <= 64 * 1.25
        assert max(loads) <= 64 * 1.4


def test_a_prefix_that_everybody_shares_makes_no_hot_spot() -> None:
    """Its first holder gives way as soon as it has more to do than the prefix saves; then others have it, too."""
    bench = Bench(8)
    system = prompt(0, pages=100)[:-1]
    for number in range(400):
        bench.send([*system, *prompt(number + 1, pages=4)])
    loads = [target.load for target in bench.targets]
    assert max(loads) <= 50 + 10
    assert min(loads) >= 50 - 10


def test_a_holder_with_more_answers_than_its_part_loses_credit() -> None:
    """However much it has cached: half of its prompt counts for it when it has twice its part."""
    bench = Bench(4)
    long = prompt(1, pages=2000)
    bench.caches(1, long)
    hold(bench.targets[0], answers=8)
    assert bench.choose(long).id == "w1"
    bench.caches(2, long[: 1200 * PAGE])
    assert bench.choose(long).id == "w1"
    hold(bench.targets[0], answers=32)
    assert bench.choose(long).id == "w2"


def test_temperature() -> None:
    """0: always the best; above, worse ones now and then, the worst least often."""
    assert {Bench(1).choose(prompt(1)).id} == {"w1"}
    for temperature, seen in ((0.0, {"w1"}), (0.5, {"w1", "w2", "w3"})):
        bench = Bench(3, router_temperature=temperature)
        bench.caches(1, prompt(1))
        bench.caches(2, prompt(1)[: 40 * PAGE])
        counts: Counter[str] = Counter()
        for _ in range(600):
            bench.now += ASSUMED + 1
            counts[bench.choose(prompt(1)).id] += 1
        assert set(counts) == seen
        assert counts["w1"] > counts["w2"] >= counts["w3"]


def test_what_was_sent_is_taken_to_be_there_for_a_while() -> None:
    bench = Bench(2)
    first = bench.send(prompt(1))
    assert bench.choose(prompt(1)).id == first
    bench.now += ASSUMED + 0.1
    bench.choose(prompt(2))
    assert bench.choose(prompt(1)).id != first, "nothing has told that it is there"


def test_what_a_new_process_was_sent_before_is_gone() -> None:
    bench = Bench(2)
    first = bench.send(prompt(1))
    bench.policy.forget(next(worker for worker in bench.workers if worker.id == first))
    assert bench.choose(prompt(1)).id != first


def test_resumed_answers_spread() -> None:
    """A9: a worker with 32 streams of one prompt dies; the survivors get equally many, though one has it cached."""
    bench = Bench(3, kv_overlap_score_weight=100.0)
    bench.caches(2, prompt(1))
    for _ in range(32):
        bench.send(prompt(1), resumed=True)
    loads = [target.load for target in bench.targets]
    assert max(loads) - min(loads) <= 1


def test_a_resumed_answer_goes_among_equals_where_it_is_cached() -> None:
    bench = Bench(3)
    bench.caches(3, prompt(1))
    assert bench.choose(prompt(1), resumed=True).id == "w3"


def test_a_resumed_answer_goes_among_equal_ranks_to_the_worker_with_less_to_do() -> None:
    """O2: though the other one has it cached."""
    bench = Bench(2, ranks=2)
    for worker in bench.workers:
        worker.divide(2)
    bench.caches(1, prompt(1), rank=1)
    with Lease(bench.workers[0].targets[0], lambda target: None):
        assert bench.choose(prompt(1), resumed=True).worker is bench.workers[1]


def test_ranks_are_targets_with_caches_of_their_own() -> None:
    bench = Bench(2, ranks=2)
    bench.caches(2, prompt(1), rank=1)
    assert bench.choose(prompt(1)).id == "w2"
    for worker in bench.workers:
        worker.divide(2)
    bench.now += ASSUMED + 1
    assert bench.choose(prompt(1)).id == "w2@1"


def test_who_names_no_rank_gets_any() -> None:
    """The engine chooses the rank without a look at its caches: what they have counts on the average."""
    bench = Bench(2, ranks=2)
    for rank in range(2):
        bench.caches(1, prompt(1)[: 40 * PAGE], rank=rank)
    bench.workers[1].traits = Traits(kv_events=KvEvents("*", 5557, "", PAGE))
    bench.caches(2, prompt(1)[: 50 * PAGE])
    assert bench.choose(prompt(1)).id == "w2"


def test_prompts_shorter_than_a_block_go_by_load() -> None:
    bench = Bench(2)
    assert [bench.send([1, 2, 3]) for _ in range(4)] == ["w1", "w2", "w1", "w2"]
    assert [bench.send([]) for _ in range(2)] == ["w1", "w2"]
