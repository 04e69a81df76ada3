"""A fleet, a router and its clients in virtual time, and what must be so by what was done to them.

The router is asked over HTTP, as its operators ask it: `POST /workers`, `DELETE /workers/{url}`, `GET /workers` (SMG's
shapes), `POST /abort_request`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any
from urllib.parse import quote

import trio

from dyn_testkit import checkers, fold
from dyn_testkit.checkers.liveness import loud
from dyn_testkit.client import Response, fetch
from dyn_testkit.engine import Model
from dyn_testkit.history import Arrival, History, Record, Run
from dyn_testkit.oracle import Oracle
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.simulation.clients import Clients
from dyn_testkit.simulation.router import Router
from dyn_testkit.simulation.run import reference
from dyn_testkit.simulation.scenario import VOCABULARY, RequestPlan
from dyn_testkit.worker import Dialect, MockWorker, WorkerOptions

MODEL = Model(vocab_size=VOCABULARY, context_length=8192)
#: Seconds a token takes.
TICK = 1.0
#: Seconds after the last death until nobody is bothered by it any more.
CALM = 60.0
#: Seconds within which the router answers its operator.
_ANSWERED = 30.0
#: What is read of each worker in the list: its URL, its requests, whether it may get more.
_ENTRY = ("url", "load", "is_healthy")
#: Bytes of an answer that are shown.
_SHOWN = 300
#: Not made: what is not whole, and what is in flight, is judged here; what excuses an attempt would be a fault of the
#: history, and workers that come and go are none.
_NOT_MADE = frozenset({"liveness", "leases", "leak", "causes", "orders"})
#: The checks of whole answers and of rows.
CHECKS = tuple(name for name in checkers.CHECKERS if name not in _NOT_MADE)


class Broken(AssertionError):
    """What must hold does not."""


@dataclass(slots=True)
class Member:
    """A worker, and what the router was told of it."""

    worker: MockWorker
    #: The router was told last that it belongs to the fleet.
    listed: bool = True
    #: Removed: the attempts that it may still have; None while it is listed.
    leaving: int | None = None
    #: Removed and gone from the list: the requests that it had got by then.
    gone: int | None = None


@dataclass(slots=True)
class Promise:
    """What a request may count on."""

    #: The workers that have been healthy ever since it was sent.
    remaining: set[str]
    #: There was one when it was sent, and nobody was or has been dead: it got one at once, which may end it in peace.
    undisturbed: bool

    @property
    def holds(self) -> bool:
        """It must get its whole answer."""
        return bool(self.remaining) or self.undisturbed


class World:
    """What the steps act upon. The router is `router`, once it runs."""

    def __init__(self, network: SimNetwork, nursery: trio.Nursery) -> None:
        self.members: dict[str, Member] = {}
        self.clients = Clients()
        self.router: Router
        self._network = network
        self._nursery = nursery
        self._history = History(Run(name="membership", traced=True, tapped=True))
        self._oracle = Oracle(MODEL)
        self._promises: dict[str, Promise] = {}
        self._last_death = -inf

    # -- who is there

    @property
    def alive(self) -> list[str]:
        """The workers that listen."""
        return [name for name, member in self.members.items() if member.worker.alive]

    @property
    def dead(self) -> list[str]:
        """Those that do not."""
        return [name for name, member in self.members.items() if not member.worker.alive]

    @property
    def listed(self) -> list[str]:
        """Those that the router was told to use."""
        return [name for name, member in self.members.items() if member.listed]

    @property
    def removed(self) -> list[str]:
        """Those that it was told to use no longer."""
        return [name for name, member in self.members.items() if not member.listed]

    @property
    def live(self) -> list[str]:
        """The rids of the requests that have no whole answer yet."""
        return [client.rid for client in self.clients.live]

    # -- what is done

    async def add(self, name: str, dialect: Dialect) -> None:
        """Start another worker, and tell the router."""
        worker = MockWorker(
            self._network.host(name), name, 30000, WorkerOptions(model=MODEL, dialect=dialect, tick=TICK)
        )
        await self._nursery.start(worker.run)
        self.members[name] = Member(worker)
        await self.join(name)

    async def join(self, name: str) -> None:
        """Tell the router of a worker, again if it was removed."""
        member = self.members[name]
        _accepted(await self._control("/workers", {"url": member.worker.url}))
        member.listed, member.leaving, member.gone = True, None, None

    async def remove(self, name: str) -> None:
        """Tell the router that a worker leaves; its live requests may end."""
        member = self.members[name]
        load = (await self._listing())[member.worker.url]["load"]
        _accepted(await self._control(f"/workers/{quote(member.worker.url, safe='')}", method="DELETE"))
        member.listed, member.leaving = False, load
        for promise in self._promises.values():
            promise.remaining.discard(name)

    async def kill(self, name: str) -> None:
        """Kill a worker."""
        self.members[name].worker.kill()
        self._last_death = trio.current_time()
        for promise in self._promises.values():
            promise.remaining.discard(name)
            promise.undisturbed = False

    async def restart(self, name: str, dialect: Dialect | None = None) -> None:
        """Start a dead worker; as another one if told so."""
        worker = self.members[name].worker
        await worker.restart(replace(worker.options, dialect=dialect) if dialect else None)

    async def send(self, count: int, tokens: int, stream: bool) -> None:
        """Send requests; their answers are read meanwhile."""
        for _ in range(count):
            self._send(tokens, stream)

    def _send(self, tokens: int, stream: bool) -> None:
        number = len(self._promises)
        body = {
            "rid": f"r{number}",
            "input_ids": [number // VOCABULARY, number % VOCABULARY, 7],
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "stream": stream,
        }
        plan = RequestPlan(f"r{number}", trio.current_time(), body)
        healthy = set(self.listed) & set(self.alive)
        calm = trio.current_time() - self._last_death > CALM
        self._promises[plan.key] = Promise(healthy, calm and healthy == set(self.listed) != set())
        self._history.add(reference(self._oracle, plan))
        self._nursery.start_soon(self._converse, plan)

    async def _converse(self, plan: RequestPlan) -> None:
        self._history.add(await self.clients.run(plan, self._network.host("clients"), self.router.url))

    async def abort(self, rid: str) -> None:
        """Ask the router to abort a live request."""
        for client in self.clients.live:
            if client.rid == rid:
                client.aborted = True
        await self._control("/abort_request", {"rid": rid})

    # -- what must hold

    async def check(self) -> None:
        """What holds at any time."""
        self._check_members(await self._listing())
        for key, record in self._history.records.items():
            if not (record.left or _whole(record)):
                if not loud(record):
                    raise Broken(f"{key} got less than its answer, and nothing says so")
                if self._promises[key].holds:
                    said = record.error or record.text or record.events[-1:]
                    raise Broken(f"{key} was lost ({record.status}, {said})")

    def _check_members(self, listing: Mapping[str, Mapping[str, Any]]) -> None:
        """Who was told to be in the fleet is listed; who was removed is listed only while it ends what it had."""
        for name, member in self.members.items():
            entry, arrived = listing.get(member.worker.url), len(member.worker.generates)
            if member.leaving is None:
                if entry is None:
                    raise Broken(f"{name} was added, and is not in the list")
                continue
            load = entry["load"] if entry else 0
            if entry and not load:
                raise Broken(f"{name} was removed, has nothing to do, and is still in the list")
            if load > member.leaving:
                raise Broken(f"{name} was removed, and has got a request since: {member.leaving} then, {load} now")
            member.leaving = load
            if entry is None and member.gone is None:
                member.gone = arrived
            if member.gone is not None and arrived > member.gone:
                raise Broken(f"{name} is no longer in the list, and has got a request since")
        unknown = listing.keys() - {member.worker.url for member in self.members.values()}
        if unknown:
            raise Broken(f"nobody has added {unknown}")

    def check_history(self) -> None:
        """When all is over: answers are right to the token, and each request has its row."""
        self._history.rows = [dict(row) for row in self.router.rows]
        self._history.arrivals = [
            Arrival(member.worker.url, 0.0, recorded.json())
            for member in self.members.values()
            for recorded in member.worker.generates
        ]
        for finding in checkers.check(self._history, CHECKS):
            raise Broken(f"{finding.key}: {finding.check}: {finding.message}")

    async def check_quiet(self) -> None:
        """When all is over: states are as they are, and nothing is in flight."""
        if self.live:
            raise Broken(f"{', '.join(self.live)} never ended")
        for url, entry in (await self._listing()).items():
            name = url.removeprefix("http://").partition(":")[0]
            alive = self.members[name].worker.alive
            if entry["is_healthy"] is not alive:
                told = entry.get("state") or ("healthy" if entry["is_healthy"] else "not healthy")
                raise Broken(f"{name} is {'alive' if alive else 'dead'}, and listed as {told}")
            if entry["load"]:
                raise Broken(f"{name} has a load of {entry['load']}, and nothing is going on")
        held = {name: value for name, value in self.router.gauges.items() if value}
        if held:
            raise Broken(f"nothing is going on, and not 0: {held}")

    async def _listing(self) -> dict[str, dict[str, Any]]:
        answer = await self._control("/workers")
        try:
            workers = answer.json()["workers"]
            listing = {worker["url"]: worker for worker in workers}
            lacking = {name for name in _ENTRY for worker in workers if name not in worker}
        except (LookupError, TypeError, ValueError):
            raise Broken(f"GET /workers is no list of workers: {answer.status} {answer.body[:_SHOWN]!r}") from None
        if lacking:
            raise Broken(f"an entry of GET /workers lacks {', '.join(sorted(lacking))}: {answer.body[:_SHOWN]!r}")
        if len(listing) != len(workers):
            raise Broken(f"a worker is listed twice: {[worker['url'] for worker in workers]}")
        return listing

    async def _control(self, path: str, body: Mapping[str, Any] | None = None, method: str | None = None) -> Response:
        with trio.move_on_after(_ANSWERED):
            return await fetch(self._network.host("operator"), self.router.url, path, body, method=method)
        verb = method or ("GET" if body is None else "POST")
        raise Broken(f"the router has not answered {verb} {path} for {_ANSWERED:g} s")


def _accepted(answer: Response) -> None:
    if not 200 <= answer.status < 300:
        raise Broken(f"the router refused: {answer.status} {answer.body!r}")


def _whole(record: Record) -> bool:
    try:
        fold.answer(record)
    except fold.Incomplete:
        return False
    return True
