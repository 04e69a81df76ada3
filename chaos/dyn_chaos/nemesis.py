"""Who disturbs a campaign: waits for the moment, chooses, strikes, looks, waits, undoes, looks, notes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import trio

from dyn_chaos import audit
from dyn_chaos.actions import Action, Deed, Scene, strike, undo
from dyn_chaos.campaigns.base import Order, When
from dyn_chaos.fleet import Engine
from dyn_chaos.selection import choose
from dyn_testkit.history import Fault, Harm
from dyn_testkit.watch import Watch, started

#: In `Fault.choice`: how its end is known; "" if it was undone and that is not to be seen. Absent: it was not undone.
UNDONE = "undone"
#: In `Fault.choice`: [from, to], the time in which it was certainly in effect: from when it was seen until it began to
#: be undone, or None. Absent: there is no such time.
CERTAIN = "certain"


@dataclass(slots=True)
class Struck:
    """A worker to which something was done and not yet undone."""

    engine: Engine
    at: float
    deed: Deed = field(default_factory=lambda: Deed(""))
    #: When `deed` was seen; None: not yet.
    seen: float | None = None


@dataclass(slots=True)
class Nemesis:
    """One campaign's."""

    action: Action
    scene: Scene
    engines: Sequence[Engine]
    order: Order
    random: Random
    begin: float
    note: Callable[[Fault], None]
    #: Told True when something begins, False when nothing is going on any more.
    busy: Callable[[bool], None]
    #: `Fault.harms` of what it does.
    harms: tuple[Harm, ...] = ("attempts",)
    _struck: list[Struck] = field(default_factory=list)

    async def run(self, when: When, streams: int, watch: Watch, load_ended: trio.Event) -> None:
        """Wait for the moment, then go through one round, or rounds until the load has ended.

        `streams`: how many are meant if `when` does not say. Nothing happens if the load ends before the moment.
        """
        if not await self._moment(when, streams, watch, load_ended):
            return
        while True:
            due = trio.current_time() + (self.order.every or 0)
            self.busy(True)
            try:
                await self.round(load_ended)
            finally:
                self.busy(False)
            if self.order.every is None:
                return
            with trio.move_on_at(due):
                await load_ended.wait()
            if load_ended.is_set():
                return

    async def _moment(self, when: When, streams: int, watch: Watch, load_ended: trio.Event) -> bool:
        come = False
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                nonlocal come
                if when.at is not None:
                    await trio.sleep_until(self.begin + when.at)
                else:
                    await watch.until(started(when.streams or streams, when.tokens))
                come = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait)
            await load_ended.wait()
            nursery.cancel_scope.cancel()
        return come

    async def round(self, load_ended: trio.Event) -> None:
        """Strike those that are chosen and, if the order says so, undo it. One of many rounds ends with the load."""
        chosen = await self._choose()
        try:
            for group in [[engine] for engine in chosen] if self.order.rolling else [chosen]:
                if load_ended.is_set() and self.order.every is not None:
                    return
                for place, engine in enumerate(group):
                    await trio.sleep(self.order.gap if place else 0)
                    await self._strike(engine)
                if self.order.duration is None:
                    continue
                await trio.sleep(self.order.duration)
                self.random.shuffle(self._struck)
                while self._struck:
                    await self._undo(self._struck[-1])
                    await trio.sleep(self.order.gap if self._struck else 0)
        finally:
            await self._leave()

    async def _choose(self) -> list[Engine]:
        loads = await audit.loads(self.scene.http, self.scene.relay)
        by_name = {engine.name: engine for engine in self.engines}
        known = {engine.name: loads[engine.url] for engine in self.engines if engine.url in loads}
        return [by_name[name] for name in choose([*by_name], known, self.order.target, self.order.mode, self.random)]

    async def _strike(self, engine: Engine) -> None:
        struck = Struck(engine, self._now())
        self._struck.append(struck)  # before it is seen: the round may be broken off meanwhile
        struck.deed = await strike(self.action, self.scene, engine)
        struck.seen = self._now()

    async def _undo(self, struck: Struck) -> None:
        began = self._now()
        seen = await undo(self.action, self.scene, struck.engine)
        self._struck.remove(struck)
        self._note(struck, {UNDONE: seen, CERTAIN: [struck.seen, began]}, self._now())

    async def _leave(self) -> None:
        """Note what stays; undo what must not stay, if the round was broken off."""
        while self._struck:
            struck = self._struck.pop()
            self._note(struck, {} if struck.seen is None else {CERTAIN: [struck.seen, None]}, None)
            if self.action.outlasts:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                    await self.action.undo(self.scene, struck.engine)

    def _note(self, struck: Struck, end: dict[str, Any], until: float | None) -> None:
        deed = struck.deed
        choice = {**deed.choice, **end}
        self.note(Fault(self.action.kind, struck.engine.url, struck.at, until, deed.proof, choice, self.harms))

    def _now(self) -> float:
        return trio.current_time() - self.begin
