"""Where the prompt's beginning was sent before."""

from __future__ import annotations

from collections.abc import Sequence

from dyn_relay.fleet.policies.balance import Guard
from dyn_relay.fleet.policies.base import Ask, Policy
from dyn_relay.fleet.policies.least_loaded import LeastLoaded, burden
from dyn_relay.fleet.policies.sent import BLOCK, SentPrefixes, chain
from dyn_relay.fleet.target import Target
from dyn_relay.fleet.worker import Worker

#: Tokens of a prompt that one more answer at a target is worth: further than that nobody is followed to a cache.
TOKENS_AN_ANSWER = 256


class CacheAware(Policy):
    """The target that was sent most of the prompt's beginning, if that is enough, and worth its load.

    Else by load. What engines really have cached is not known here, only what went where: one that has evicted blocks
    is thought to have them still; only of a worker that was restarted all is forgotten. A prompt that nobody knows does
    not go to whoever has cached least: that would be the one that has just come back, for everything (A10). And a
    beginning that very many prompts have does not keep them all in one place: with each answer that a target has more
    than the idlest, its cache must save so many tokens more.
    """

    def __init__(self, guard: Guard, threshold: float, limit: int) -> None:
        """`threshold`: the share of a prompt that is enough, 0..1; `limit`: bytes that are remembered."""
        self._guard = guard
        self._threshold = threshold
        self._index = SentPrefixes(limit)
        #: By worker and target; None stands for those that are forgotten.
        self._numbers: dict[str, dict[str, int]] = {}
        self._by_load = LeastLoaded()

    def choose(self, candidates: Sequence[Target], ask: Ask) -> Target:
        prefix = ask.prefix()
        names = chain(ask.cache_space, prefix) if prefix else []
        if not names:
            return self._by_load.choose(candidates, ask)
        held = self._index.match(names)
        enough = self._threshold * len(names)
        numbers = {self._number(target): target for target in candidates}
        open_ = {target.id for target in self._guard.open(candidates, ask)}
        least = min(target.load for target in candidates)
        good = []
        for number, blocks in held.items():
            if blocks <= enough:
                continue
            if number not in numbers:
                # Away, or it has just refused this: another one is to be preferred for this prompt from now on.
                self._index.drop(names[blocks - 1], number)
            elif numbers[number].id in open_:
                target = numbers[number]
                worth = blocks * BLOCK - (target.load - least) * TOKENS_AN_ANSWER
                if worth > 0:
                    good.append((-worth, burden(target), target.order, target))
        target = min(good)[-1] if good else self._by_load.choose(candidates, ask)
        self._index.add(names, self._number(target))
        return target

    def forget(self, worker: Worker) -> None:
        for number in self._numbers.pop(worker.id, {}).values():
            self._index.forget(number)

    def _number(self, target: Target) -> int:
        numbers = self._numbers.setdefault(target.worker.id, {})
        if target.id not in numbers:
            numbers[target.id] = self._index.number()
        return numbers[target.id]
