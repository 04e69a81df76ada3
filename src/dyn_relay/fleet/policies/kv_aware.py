"""Where most of the prompt is cached, weighed against the load.

Costs are in tokens to prefill. A target costs what it has to prefill of this prompt, and something for each answer that
it has, and for each token that it holds, since all that it holds is read again for each token that it makes. What it
has cached is what its events say (`fleet/kv/`), tier by tier, and what was sent there a moment ago. An answer costs
little, so that the samples of one prompt meet; it is not nothing, so that a prefix that everybody shares spreads as
soon as its holder has more to do than the prefix saves. A holder with more answers than its part loses credit in
proportion.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from dyn_relay.config import Config
from dyn_relay.fleet.kv.assumed import Assumed
from dyn_relay.fleet.kv.events import Tier
from dyn_relay.fleet.kv.index import PrefixIndex, RankId
from dyn_relay.fleet.kv.subscriptions import Subscriptions
from dyn_relay.fleet.policies.base import Ask, Members, Policy
from dyn_relay.fleet.policies.least_loaded import LeastLoaded
from dyn_relay.fleet.target import Target
from dyn_relay.fleet.worker import Worker

#: What an answer costs that a target has, and a token that it holds. Found by replaying traces (docs/routing.md): with
#: less, whoever has a cache gets so much to do that it loses what it has cached.
ANSWER, HELD = 192, 1 / 512
#: Answers that a target may have beyond the mean before its cache counts less.
SLACK = 8
#: What a cached token is worth, by where it is: it has to be fetched.
WORTH = {Tier.GPU: 1.0, Tier.CPU_PINNED: 0.75, Tier.DISK: 0.25, Tier.EXTERNAL: 0.25}
#: Seconds for which a target is taken to have what it was sent.
ASSUMED = 10.0


class KvAware(Policy):
    """Least cost; without token ids, or where nobody publishes events, least load."""

    def __init__(self, config: Config, rng: random.Random, clock: Callable[[], float]) -> None:
        self._weight = config.kv_overlap_score_weight
        self._temperature = config.router_temperature
        self._rng = rng
        self._clock = clock
        self._counts: Counter[str] = Counter()
        #: May be fed by others than the subscriptions: `index.join(RankId("w1"))`, then `index.apply`.
        self.index = PrefixIndex(config.kv_index_max_blocks, rng, self._count)
        self._subscriptions = Subscriptions(self.index, self._count)
        self._assumed = Assumed(ASSUMED)
        self._by_load = LeastLoaded()

    def choose(self, candidates: Sequence[Target], ask: Ask) -> Target:
        prefix = None if ask.cache_space or not any(map(_block_size, candidates)) else ask.prefix()
        if prefix is None or isinstance(prefix, str):
            self._count("by load")
            return self._by_load.choose(candidates, ask)
        if ask.resumed:
            # A dead worker's answers come all at once, and stay long: they spread, whatever they share.
            least = min((target.load, target.worker.load) for target in candidates)
            candidates = [target for target in candidates if (target.load, target.worker.load) == least]
        now = self._clock()
        chains = {size: self.index.chain(prefix, size) for size in set(map(_block_size, candidates)) if size}
        cached = self._cached(candidates, chains, now)
        mean = sum(target.load for target in candidates) / len(candidates)
        costs = [
            self._weight * (len(prefix) - has * _credit(target, ask, mean))
            + ANSWER * target.load
            + HELD * target.tokens
            for target, has in zip(candidates, cached, strict=True)
        ]
        target = self._pick(candidates, costs, ask)
        size = _block_size(target)
        if size:
            self._assumed.note(target.id, chains[size], now)
        self._count("by cache")
        return target

    def forget(self, worker: Worker) -> None:
        self._subscriptions.forget(worker)
        self._assumed.forget(worker.id)

    async def run(self, fleet: Members) -> None:
        await self._subscriptions.run(fleet)

    def counts(self) -> Mapping[str, int]:
        return self._counts

    def sizes(self) -> Mapping[str, int]:
        return {"blocks": len(self.index), "subscriptions": len(self._subscriptions)}

    def _count(self, what: str) -> None:
        self._counts[what] += 1

    def _cached(self, candidates: Sequence[Target], chains: Mapping[int, list[int]], now: float) -> list[float]:
        """Tokens of the prompt that each has, those on slower tiers in part."""
        told = {size: self.index.match(chain) for size, chain in chains.items()}
        sent = {size: self._assumed.overlap(chain, now) for size, chain in chains.items()}
        found = []
        for target in candidates:
            size = _block_size(target)
            if not size:
                found.append(0.0)
                continue
            ranks = _ranks(target)
            # Who names no rank gets any: what the ranks have on the average.
            blocks = sum(_worth(told[size].get(rank, ())) for rank in ranks) / len(ranks)
            found.append(size * max(blocks, sent[size].get(target.id, 0)))
        return found

    def _pick(self, candidates: Sequence[Target], costs: list[float], ask: Ask) -> Target:
        best, worst = min(costs), max(costs)
        if not self._temperature or best == worst:
            equals = [target for target, cost in zip(candidates, costs, strict=True) if cost == best]
            return self._by_load.choose(equals, ask)
        scale = self._temperature * (worst - best)
        return self._rng.choices(candidates, [math.exp((best - cost) / scale) for cost in costs])[0]


def _block_size(target: Target) -> int:
    events = target.worker.traits.kv_events
    return events.block_size if events is not None else 0


def _ranks(target: Target) -> list[RankId]:
    events = target.worker.traits.kv_events
    ranks = range(events.ranks) if target.rank is None and events is not None else [target.rank or 0]
    return [RankId(target.worker.id, rank) for rank in ranks]


def _worth(blocks: Sequence[int]) -> float:
    return sum(WORTH[tier] * count for tier, count in zip(Tier, blocks, strict=False))


def _credit(target: Target, ask: Ask, mean: float) -> float:
    """What its cache counts, from 0 to 1: less if it has more to do than its part."""
    return min(1.0, (mean + SLACK) / (target.load + ask.generations))
