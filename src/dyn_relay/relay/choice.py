"""Who gets a request's next attempt, and all that it waits for in between."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import trio

from dyn_relay.fleet.poison import NotYet
from dyn_relay.fleet.target import Target
from dyn_relay.fleet.worker import Role, Worker
from dyn_relay.formats.base import Exchange
from dyn_relay.net import Sink
from dyn_relay.relay.affinity import asking
from dyn_relay.relay.budget import AttemptBudget
from dyn_relay.relay.candidates import Candidates
from dyn_relay.relay.context import Context
from dyn_relay.relay.record import RequestRecord
from dyn_relay.relay.recovery import Recovery
from dyn_relay.relay.waiting import Unwanted, unless_gone

T = TypeVar("T")

#: Seconds between two looks at a fleet in which nobody can be asked.
LOOK_INTERVAL = 0.5
#: Seconds before all are asked again, about; doubled each time, so often.
LAP_PAUSE, LONGER_PAUSES = 0.25, 3


class Pair(NamedTuple):
    """Where an attempt goes."""

    target: Target
    #: Who computes the prompt for it, if another worker does.
    prefill: Target | None

    @property
    def workers(self) -> Sequence[Worker]:
        """Those that may die of the request."""
        return [self.target.worker] if self.prefill is None else [self.target.worker, self.prefill.worker]


class Choice:
    """One request's. `key`: what it has in common with others that should meet the same cache."""

    def __init__(
        self, context: Context, exchange: Exchange, record: RequestRecord, client: Sink, key: str, *, native: bool
    ) -> None:
        paired = context.config.pd_disaggregation

        def of(role: Role, prefills: Candidates | None = None) -> Candidates:
            return Candidates(context.fleet, exchange, record, role, prefills)

        #: Who may compute the prompt, where that is another worker's part.
        self.prefills = of(Role.PREFILL) if paired and native else None
        self.candidates = self._answerers = of(Role.DECODE if paired else Role.REGULAR, self.prefills)
        #: Who may do both, where no pair can be made.
        self._alone = of(Role.REGULAR) if paired and context.config.decode_fallback else None
        self.recovery = Recovery(context)
        #: What is left of its tries; a new value after each failure.
        self.budget = AttemptBudget(context.config.migration_limit)
        #: The worker that the request was judged by, and the one from which it was moved last.
        self.first: Worker | None = None
        self.left: Worker | None = None
        self._context = context
        self._exchange = exchange
        self._client = client
        self._key = key
        self._native = native
        #: What the request waits in; an abort ends it.
        self._between: trio.CancelScope | None = None
        #: Since when every worker that can be asked is busy.
        self._busy_since: float | None = None
        #: How often all were asked since the last token.
        self._laps = 0

    @property
    def proven(self) -> bool:
        """It cannot be what kills workers: it has given tokens, or is none of our format's requests."""
        return bool(self._exchange.delivered) or not self._native

    def progressed(self, resumed_from: int) -> None:
        """A token has come, of an attempt that had so many before it."""
        self._busy_since, self._laps = None, 0
        self.recovery.over(resumed_from)

    def interrupt(self) -> None:
        """End whatever the request waits for."""
        if self._between is not None:
            self._between.cancel()

    async def pair(self) -> Pair | None:
        """Targets for the next attempt, and the permit for it; None if nobody is left to ask. Raises as `_choose`."""
        while True:
            pair = await self._pair()
            if pair is None or self.recovery.permitted:
                return pair
            await self.wait(self.recovery.turn)

    async def _pair(self) -> Pair | None:
        """Those of a pair, or if none can be made one that does all; who is known to be dead is dialled last of all."""
        alone = self._alone
        if alone is None:
            return await self._both()
        hopeless = self._answerers.dead or (self.prefills is not None and self.prefills.dead)
        if not hopeless:
            pair = await self._both()
            if pair is not None:
                return pair
        self.candidates = alone
        target = await self._choose(alone)
        if target is not None or not hopeless:
            return Pair(target, None) if target is not None else None
        return await self._both()

    async def _both(self) -> Pair | None:
        self.candidates, prefills = self._answerers, self.prefills
        while (target := await self._choose(self.candidates)) is not None:
            if prefills is None:
                return Pair(target, None)
            prefills.decode = target.worker
            prefill = await self._choose(prefills)
            if prefill is None:
                break
            if self._still(target):
                return Pair(target, prefill)
        return None

    def _still(self, target: Target) -> bool:
        """It has not left, or begun to try another suspect, while the other one was chosen."""
        fleet = self._context.fleet
        suspected = fleet.wary and not self.proven
        return target.worker in fleet.workers and (
            not suspected or fleet.may_try(self._exchange.fingerprint(), target.worker)
        )

    def has_room(self) -> bool:
        """Workers that are well could take the request now."""
        barred, paired = self.budget.barred, self.candidates is self._answerers and self.prefills is not None
        stages = [self.candidates, self.prefills] if paired else [self.candidates]
        return all(stage is not None and stage.has_room(barred) for stage in stages)

    async def _choose(self, candidates: Candidates) -> Target | None:
        """A target for the next attempt; None if nobody is left to ask. Raises `SuspectedPoison`, `Unwanted`."""
        known, met = False, set[str]()
        if self.first is not None:
            # Of a worker whose infos could not be read at first they may have come since.
            self._exchange.know(self.first.traits)
        while True:
            target = await self._pick(candidates)
            if target is not None and self._native and target.worker.unmet and target.worker.id not in met:
                # It has just joined. What depends on its infos would be refused, or go where it cannot be answered.
                met.add(target.worker.id)
                await self.wait(partial(self._context.fleet.relearn, [target.worker]))
                continue
            if target is not None:
                return target
            excluded = self.budget.excluded
            if not known and candidates.unfit(excluded):
                # What is known of them may be old: weights are updated in place.
                known = True
                await self.wait(partial(self._context.fleet.relearn, candidates.left(excluded)))
                continue
            back = self._back(candidates)
            if back is not None:
                return back
            if not excluded:
                if not self._patient():
                    return None
                await self.wait(partial(trio.sleep, LOOK_INTERVAL))
                continue
            lap = self.budget.lap() or (self.budget.again() if self._patient() else None)
            if lap is None:
                return None
            self.budget = lap
            pause = LAP_PAUSE * 2 ** min(self._laps, LONGER_PAUSES) * self._context.rng.uniform(0.5, 1.5)
            self._laps += 1
            await self.wait(partial(trio.sleep, pause))

    def _back(self, candidates: Candidates) -> Target | None:
        """Who was to be relieved of the request, if it is still there: nobody else can go on with it at once."""
        left = self.left
        if left is None or not candidates.may_take(left):
            return None
        self.left = None
        return left.targets[0] if self._context.fleet.leaving(left) else None

    async def _pick(self, candidates: Candidates) -> Target | None:
        """One that has all that is asked for; if the fleet has none, any that may: its own answer will say so."""
        target = await self._pick_from(candidates.has_all)
        if target is None and not candidates.some_has_all:
            target = await self._pick_from(candidates.may_take)
        return target

    async def _pick_from(self, accept: Callable[[Worker], bool]) -> Target | None:
        fleet, exchange, excluded = self._context.fleet, self._exchange, self.budget.excluded
        asked = asking(exchange, self._key, first=not self.budget.history)
        while True:
            if fleet.paused and self._native:
                await self.wait(fleet.changed)
                continue
            if self.proven or not fleet.wary:
                return fleet.pick(excluded, accept, asked)
            try:
                return fleet.choose_now(exchange.fingerprint(), excluded, accept, asked)
            except NotYet:
                await self.wait(fleet.changed)

    def _patient(self) -> bool:
        """Is there still time to ask again?

        Tokens are at stake and some worker is only busy, or we took it from a worker that would have gone on.
        """
        now = trio.current_time()
        if not (self._exchange.delivered and self.budget.busy) and not self.budget.moved:
            return False
        if self._busy_since is None:
            self._busy_since = now
        return now < self._busy_since + self._context.config.busy_patience_secs

    async def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Wait between two attempts. Raises `ClientGone`, `Unwanted`."""
        self.recovery.pause()
        with trio.CancelScope() as self._between:
            return await unless_gone(self._client, work)
        raise Unwanted
