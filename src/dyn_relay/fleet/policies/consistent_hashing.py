"""A session goes where its name says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from dyn_relay.fleet.policies.balance import Guard
from dyn_relay.fleet.policies.base import Ask, Policy
from dyn_relay.fleet.policies.least_loaded import LeastLoaded
from dyn_relay.fleet.policies.pins import Pins
from dyn_relay.fleet.target import Target
from dyn_relay.fleet.worker import Worker

#: Seconds after its last request in which a session stays where it had to move to.
MOVED = 600.0


class ConsistentHashing(Policy):
    """Rendezvous hashing: each target draws a number for the key, by its URL, and the highest one has it.

    So proxies before the same workers agree without a word, a worker that leaves moves its own keys only, and one that
    joins takes its share. A key whose target is away, excluded or overloaded moves to the next in its row, and stays
    there until it has not been used for a while: its cache is there now. What has no key goes by load, and so does a
    resumed answer, unless its key's target has no more to do than the mean.
    """

    def __init__(self, guard: Guard, clock: Callable[[], float]) -> None:
        self._guard = guard
        self._moved = Pins(clock, MOVED)
        self._by_load = LeastLoaded()
        #: Everybody that was ever a candidate, to know a key's home while that is none.
        self._known: dict[str, Worker] = {}

    def choose(self, candidates: Sequence[Target], ask: Ask) -> Target:
        for target in candidates:
            self._known[target.worker.id] = target.worker
        if not ask.key:
            return self._by_load.choose(candidates, ask)
        open_ = self._guard.open(candidates, ask)
        moved = self._moved.get(ask.key)
        for target in open_:
            if target.id == moved:
                return target
        home = self._first((target for worker in self._known.values() for target in worker.targets), ask.key)
        if home in open_:
            return home
        target = self._by_load.choose(candidates, ask) if ask.resumed else self._first(open_, ask.key)
        self._moved.set(ask.key, target.id)
        return target

    def forget(self, worker: Worker) -> None:
        self._known.pop(worker.id, None)

    @staticmethod
    def _first(targets: Iterable[Target], key: str) -> Target:
        secret = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return max(targets, key=lambda target: blake2b(target.url.encode(), digest_size=8, key=secret).digest())
