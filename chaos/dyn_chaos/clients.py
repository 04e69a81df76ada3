"""Clients that send one request after the other, each when it has the answer to the one before and has thought."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import httpx
import trio

from dyn_chaos.distribution import Distribution
from dyn_chaos.load import Plan, client, send
from dyn_testkit.history import Record
from dyn_testkit.watch import Watch


@dataclass(slots=True)
class Clients:
    """A load. `ended` gets each request with its record, or None if it was given up."""

    url: str
    plans: Iterator[Plan]
    count: int
    think: Distribution
    random: Random
    ended: Callable[[Plan, Record | None], None]
    begin: float
    #: No new request is sent after this time.
    until: float = math.inf
    #: Seconds after the last request, or the last `hold`, after which those that have no answer are given up.
    patience: float = math.inf
    #: Forget requests that have ended: for loads without end.
    forgetful: bool = False
    watch: Watch = field(default_factory=Watch)
    _scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    _held: bool = False

    def hold(self, held: bool) -> None:
        """While something befalls the fleet, clients wait for as long as that takes."""
        self._held = held
        self._renew()

    def _renew(self) -> None:
        self._scope.deadline = math.inf if self._held else trio.current_time() + self.patience

    async def run(self) -> None:
        """All of them, until the requests are over."""
        with self._scope:
            async with client() as http, trio.open_nursery() as nursery:
                for _ in range(self.count):
                    nursery.start_soon(self._client, http)

    async def _client(self, http: httpx.AsyncClient) -> None:
        for plan in self.plans:
            if trio.current_time() >= self.until:
                return
            self._renew()
            await self._ask(http, plan)
            await trio.sleep(self.think.draw(self.random))

    async def _ask(self, http: httpx.AsyncClient, plan: Plan) -> None:
        record = None
        try:
            record = await send(http, self.url, plan, self.watch, self.begin)
        finally:
            self.ended(plan, record)
            if self.forgetful:
                self.watch.forget(plan.key)
