"""KV-aware routing over real ZeroMQ: what mock workers publish is followed, and requests go where their prefix is."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from dyn_relay.fleet.kv.index import RankId
from dyn_relay.fleet.policies.base import Ask
from dyn_relay.fleet.policies.kv_aware import KvAware
from dyn_relay.fleet.worker import Role
from dyn_relay.sockets import open_network
from dyn_testkit.fleet import Fleet, open_fleet
from dyn_testkit.relay import Relay, open_relay, until
from dyn_testkit.worker import MockWorker, WorkerOptions
from dyn_testkit.worker.kv_cache import KvOptions

PAGE = 4


def options(dp_size: int = 1, **kv: Any) -> WorkerOptions:
    return WorkerOptions(kv_events=KvOptions(page_size=PAGE, **kv), dp_size=dp_size)


class World:
    """A proxy that follows the caches of real mock workers."""

    def __init__(self, relay: Relay, fleet: Fleet) -> None:
        self.relay = relay
        self.start = fleet
        self.workers = fleet.workers
        policy = relay.app.fleet.policies[Role.REGULAR]
        assert isinstance(policy, KvAware)
        self.policy = policy

    def known(self, tokens: Sequence[int]) -> dict[RankId, int]:
        """Blocks of these tokens that the proxy takes to be cached, by rank."""
        index = self.policy.index
        return {rank: sum(blocks) for rank, blocks in index.match(index.chain(tokens, PAGE)).items()}

    async def becomes(self, tokens: Sequence[int], known: dict[RankId, int]) -> None:
        with trio.fail_after(30):
            await until(lambda: self.known(tokens) == known, lambda: f"{self.known(tokens)}, not {known}")

    async def follows(self, count: int) -> None:
        with trio.fail_after(30):
            await until(lambda: self.policy.sizes()["subscriptions"] == count)

    async def hears(self, number: int) -> None:
        """Return when the batches of a worker come live: those of a new connection are asked for first."""
        for seed in (1001, 1002):
            await generate(self.workers[number - 1], prompt(seed))
            await self.becomes(prompt(seed), self.known(prompt(seed)) | {RankId(f"w{number}"): 5})

    def chosen(self, tokens: Sequence[int]) -> str | None:
        target = self.relay.app.fleet.pick(ask=Ask(prefix=lambda: tokens))
        return None if target is None else target.id

    def metric(self, what: str) -> float:
        return self.relay.metric(f'dyn_relay_policy_events_total{{event="{what}",role="regular"}}')


@asynccontextmanager
async def world(count: int = 2, kv: WorkerOptions | None = None, **config: Any) -> AsyncIterator[World]:
    async with open_network() as network, open_fleet(network) as fleet:
        workers = await fleet(count, options=kv or options())
        urls = [worker.url for worker in workers]
        config = {"log_level": "error", "health_check_interval_secs": 0.05, "health_success_threshold": 1} | config
        async with open_relay(network, workers=urls, policy="kv_aware", seed=1, **config) as relay:
            await relay.ready()
            yield World(relay, fleet)


async def generate(worker: MockWorker, prompt: Sequence[int], tokens: int = 1, **fields: Any) -> dict[str, Any]:
    """One answer of the worker itself."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer: dict[str, Any] = (
        await worker.ask({"input_ids": list(prompt), "sampling_params": sampling, **fields})
    ).json()
    return answer


def prompt(seed: int, pages: int = 5, beyond: int = 1) -> list[int]:
    return random.Random(seed).choices(range(5, 1000), k=pages * PAGE + beyond)


W1, W2 = RankId("w1"), RankId("w2")


@pytest.mark.parametrize("kv", [{}, {"arrays": True}, {"coalesce": False}, {"first": 1}], ids=str)
async def test_the_second_request_goes_where_the_first_was(kv):
    """Map- and array-encoded events, coalesced stores or not, sequences from 0 or 1."""
    async with world(kv=options(**kv)) as w:
        await w.follows(2)
        for number, worker in enumerate((w.workers[1], w.workers[0], w.workers[1])):
            asked = prompt(number)
            await generate(worker, asked)
            id_ = RankId(f"w{w.workers.index(worker) + 1}")
            await w.becomes(asked, {id_: 5})
            assert {w.chosen([*asked, 7, 8, 9]) for _ in range(3)} == {id_.worker}
            assert w.known([*asked[: 3 * PAGE], 1, 1, 1, 1]) == {id_: 3}
        assert not w.metric("gap")
        assert not w.metric("malformed")


async def test_who_joins_late_learns_what_is_cached():
    """Cold start (O4): the worker has published before anybody followed it."""
    async with world(count=1) as w:
        (late,) = await w.start(1, options=options())
        asked = prompt(1)
        answer = await generate(late, asked, tokens=PAGE)
        w.relay.app.fleet.add(late.url)
        await w.becomes([*asked, *answer["output_ids"]], {W2: 6})
        await w.follows(2)
        w.relay.app.fleet.remove(late.url)
        await w.follows(1)
        assert w.known(asked) == {}


async def test_a_skipped_batch_is_asked_for_again_and_a_restart_empties_the_index():
    """O4: the publisher skips batch 5, then restarts at 0: the index of that worker is emptied, and counted so."""
    async with world() as w:
        await w.follows(2)
        await w.hears(1)
        worker, log = w.workers[0], w.workers[0].kv_logs[0]
        worker.kv_faults.skip.add(5)
        prompts = [prompt(number) for number in range(9)]
        for asked in prompts:
            await generate(worker, asked)
        for asked in prompts:
            await w.becomes(asked, {W1: 5})
        assert (w.metric("gap"), w.metric("lost")) == (1, 0)
        await generate(w.workers[1], prompts[3])
        await w.becomes(prompts[3], {W1: 5, W2: 5})
        log.begin_anew()
        await generate(worker, prompts[0])
        await w.becomes(prompts[3], {W2: 5})
        await w.becomes(prompts[0], {W1: 5})
        assert w.metric("restarted") == 1
        with trio.fail_after(30):
            await until(lambda: w.relay.metric('dyn_relay_policy_size{role="regular",what="blocks"}') == 10)
        assert w.chosen(prompts[3]) == "w2"
        assert w.chosen(prompts[0]) == "w1"


async def test_what_is_lost_for_good_costs_that_ranks_index_and_no_other():
    async with world() as w:
        await w.follows(2)
        await w.hears(1)
        lost, before, after = prompt(1), prompt(2), prompt(3)
        for worker in w.workers:
            await generate(worker, before)
        await w.becomes(before, {W1: 5, W2: 5})
        log = w.workers[0].kv_logs[0]
        w.workers[0].kv_faults.lose.add(log.next)
        await generate(w.workers[0], lost)
        await generate(w.workers[0], after)
        await w.becomes(after, {W1: 5})
        assert w.known(before) == {W2: 5}
        assert w.known(lost) == {}
        assert (w.metric("gap"), w.metric("lost")) == (1, 1)
        log.cache.clear()
        await w.becomes(after, {})


async def test_a_late_replay_does_not_bring_back_what_was_removed():
    """O4: the answer to a replay holds an old store; when it arrives the block is gone, and stays gone."""
    async with world(count=1) as w:
        await w.follows(1)
        worker, log = w.workers[0], w.workers[0].kv_logs[0]
        first, second = prompt(1), prompt(2)
        await w.hears(1)
        worker.kv_faults.skip.add(log.next)
        worker.kv_faults.late = release = trio.Event()
        await generate(worker, first)
        await generate(worker, second)  # a gap: the replay is asked for, and held
        with trio.fail_after(30):
            await until(lambda: w.metric("gap"))
        log.cache.evict(20)
        release.set()
        await w.becomes(second, {})
        await generate(worker, prompt(3))
        await w.becomes(prompt(3), {W1: 5})
        assert w.known(first) == w.known(second) == {}
        assert w.metric("lost") == 0


async def test_a_worker_dies_and_comes_back_empty():
    """Its subscription ends with it, its blocks are forgotten, and what its next life says is followed."""
    async with world(health_failure_threshold=1) as w:
        await w.follows(2)
        old, new = prompt(1), prompt(2)
        await generate(w.workers[0], old)
        await generate(w.workers[1], old)
        await w.becomes(old, {W1: 5, W2: 5})
        w.workers[0].kill()
        await w.becomes(old, {W2: 5})
        await w.follows(1)
        await w.workers[0].restart()
        await w.follows(2)
        await generate(w.workers[0], new)
        await w.becomes(new, {W1: 5})
        assert w.known(old) == {W2: 5}


async def test_a_restart_that_no_probe_saw():
    """The events begin anew: the fleet is told."""
    async with world(count=1, health_check_interval_secs=600.0) as w:
        await w.follows(1)
        old, new = prompt(1), prompt(2)
        for _ in range(2):
            await generate(w.workers[0], old, tokens=PAGE + 1)
        await w.becomes(old, {W1: 5})
        w.workers[0].kill()
        await w.workers[0].restart()
        await generate(w.workers[0], new)
        with trio.fail_after(30):
            while w.known(new) != {W1: 5}:  # until the subscription is back, batches are lost
                await generate(w.workers[0], prompt(random.randrange(3, 10**9)))
        assert w.known(old) == {}
        assert w.metric("restarted") == 1


async def test_each_rank_has_its_own_events():
    """A request that names no rank gets any of them: its prefix is there on the average."""
    async with world(count=2, kv=options(dp_size=2)) as w:
        await w.follows(4)
        on_both, on_one = prompt(1), prompt(2)
        for rank in range(2):
            await generate(w.workers[0], on_both, routed_dp_rank=rank)
        await generate(w.workers[1], on_one, routed_dp_rank=1)
        await w.becomes(on_both, {RankId("w1", 0): 5, RankId("w1", 1): 5})
        await w.becomes(on_one, {RankId("w2", 1): 5})
        assert w.chosen(on_both) == "w1"
        assert w.chosen(on_one) == "w2"
        for worker in w.relay.app.fleet.workers:
            worker.divide(2)
        assert w.chosen(on_one) == "w2@1"
        await generate(w.workers[0], on_one, routed_dp_rank=0)
        w.workers[1].kv_logs[1].cache.clear()
        await w.becomes(on_one, {RankId("w1", 0): 5})
        assert w.known(on_both) == {RankId("w1", 0): 5, RankId("w1", 1): 5}


async def test_a_flushed_cache_is_known_to_be_empty():
    async with world(count=1) as w:
        await w.follows(1)
        await generate(w.workers[0], prompt(1))
        await w.becomes(prompt(1), {W1: 5})
        await w.workers[0].ask({}, "/flush_cache")
        await w.becomes(prompt(1), {})


async def test_cached_tokens_are_what_is_told():
    """The mock's answers and its events are of one cache, also a small one that forgets."""
    async with world(count=1, kv=options(capacity=12)) as w:
        await w.follows(1)
        dice = random.Random(3)
        for number in range(30):
            asked = [*prompt(dice.randrange(3))[: PAGE * dice.randint(1, 4)], *prompt(number, pages=2)]
            before = sum(w.known(asked[:-1]).values()) * PAGE
            answer = await generate(w.workers[0], asked, tokens=dice.randint(1, 9))
            assert answer["meta_info"]["cached_tokens"] == before
            cache = w.workers[0].kv_logs[0].cache
            assert len(cache) <= 12
            everything = w.workers[0].kv_logs[0].next
            with trio.fail_after(30):
                await until(lambda sent=everything: w.metric("batch") == sent)
            whole = [*asked, *answer["output_ids"]]
            assert sum(w.known(whole).values()) * PAGE == cache.match(whole)


async def test_other_policies_follow_nobody():
    async with open_network() as network, open_fleet(network) as fleet:
        (worker,) = await fleet(1, options=options())
        async with open_relay(network, workers=[worker.url], log_level="error") as relay:
            await relay.ready()
            assert relay.app.fleet.workers[0].traits.kv_events is not None
            assert not relay.app.fleet.policies[Role.REGULAR].sizes()
