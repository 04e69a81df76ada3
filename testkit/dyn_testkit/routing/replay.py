"""A trace, replayed in virtual time: the proxy's own policy and leases before models of engines."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from dyn_relay.config import Config
from dyn_relay.fleet.policies.base import Ask
from dyn_relay.fleet.policies.catalog import POLICIES
from dyn_relay.fleet.target import Lease, Target
from dyn_relay.fleet.worker import Worker
from dyn_relay.formats.traits import KvEvents, Traits
from dyn_relay.http11.client import Origin
from dyn_testkit.routing.engine import Engine, Hardware, tokens_of
from dyn_testkit.routing.hearing import LISTENING, Listening
from dyn_testkit.routing.trace import BLOCK, Call

#: Answers a target, on the mean; of an idle fleet it says nothing that one has three times as many.
BUSY = 4
#: Every engine publishes what it caches; who follows that is in `hearing.py`.
EVENTS = KvEvents("*", 5557, "", BLOCK)


@dataclass(slots=True)
class Result:
    """What came of a trace under one policy."""

    policy: str
    requests: int = 0
    #: Tokens of prompts, and of these the ones that were not computed again.
    prompt_tokens: int = 0
    reused_tokens: int = 0
    #: At each choice: the most answers that a target had, less the least; and the most over a mean of `BUSY` or more.
    spreads: list[int] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    #: Seconds from a request to its first token; and of the whole.
    waits: list[float] = field(default_factory=list)
    seconds: float = 0.0
    #: Requests that each target got.
    shares: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that was reused."""
        return self.reused_tokens / max(self.prompt_tokens, 1)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which such a share of them is; 0 of none."""
    ranked = sorted(values)
    return ranked[min(int(len(ranked) * share), len(ranked) - 1)] if ranked else 0.0


def replay(
    calls: Sequence[Call],
    policy: str,
    *,
    engines: int = 8,
    hardware: Hardware = Hardware(),  # noqa: B008 -- frozen
    config: Config | None = None,
    seed: int = 1,
    listening: Listening | None = None,
) -> Result:
    """Run it to its end. `policy`: a name of the catalog; `config`: whose options count for it.

    `listening` gives what hears the engines' cache events, if it is not as in `LISTENING`.
    """
    return _Run(calls, policy, engines, hardware, config or Config(), seed, listening or LISTENING.get(policy)).run()


class _Run:
    def __init__(
        self,
        calls: Sequence[Call],
        policy: str,
        engines: int,
        hardware: Hardware,
        config: Config,
        seed: int,
        listening: Listening | None,
    ) -> None:
        self._calls = calls
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._policy = POLICIES[policy](config, random.Random(seed), lambda: self._now)
        listener = listening(self._policy) if listening else None
        workers = [
            Worker(f"w{n}", n, Origin.parse(f"http://engine-{n}:30000"), 0.0, traits=Traits(kv_events=EVENTS))
            for n in range(1, engines + 1)
        ]
        self._targets = [target for worker in workers for target in worker.targets]
        self._engines = {one.id: Engine(one, hardware, self._after, listener) for one in self._targets}
        self._next: dict[int, list[int]] = {}
        self._result = Result(policy, shares=dict.fromkeys(self._engines, 0))

    def run(self) -> Result:
        for number, call in enumerate(self._calls):
            if call.after is None:
                self._after(call.at, lambda number=number: self._begin(number))  # type: ignore[misc]
            else:
                self._next.setdefault(call.after, []).append(number)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        self._result.seconds = self._now
        if self._result.requests != len(self._calls):
            raise ValueError("a request waits for one that never ends")
        return self._result

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), event))

    def _begin(self, number: int) -> None:
        call, began = self._calls[number], self._now
        blocks = call.prompt_blocks
        target = self._policy.choose(self._targets, Ask(key=call.key, prefix=lambda: tokens_of(blocks)))
        lease = Lease(target, lambda target: None, tokens=lambda: len(blocks) * BLOCK)
        lease.__enter__()
        self._count(target)

        def prefilled(reused: int) -> None:
            self._result.waits.append(self._now - began)
            self._result.prompt_tokens += len(blocks) * BLOCK
            self._result.reused_tokens += reused * BLOCK

        def ended() -> None:
            lease.release()
            self._result.requests += 1
            for later in self._next.pop(number, ()):
                self._after(self._calls[later].at, lambda later=later: self._begin(later))  # type: ignore[misc]

        self._engines[target.id].submit(call, prefilled, ended)

    def _count(self, chosen: Target) -> None:
        loads = [target.load for target in self._targets]
        most = max(loads)
        self._result.shares[chosen.id] += 1
        self._result.spreads.append(most - min(loads))
        if sum(loads) >= BUSY * len(loads):
            self._result.peaks.append(most * len(loads) / sum(loads))
