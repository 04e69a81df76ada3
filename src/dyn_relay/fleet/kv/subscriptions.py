"""Following the caches of a whole fleet: a subscription for each rank of each worker that publishes its events.

They follow the fleet: one begins when a worker has said where it publishes, and ends when the worker leaves, dies, or
says something else; after a restart it begins anew. What a rank had is dropped with its subscription.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import structlog
import trio

from dyn_relay.fleet.kv.events import read_batch
from dyn_relay.fleet.kv.index import PrefixIndex, Rank, RankId
from dyn_relay.fleet.kv.subscriber import Follower, Source, Subscriber
from dyn_relay.fleet.policies.base import Members
from dyn_relay.fleet.worker import State, Worker
from dyn_relay.formats.traits import KvEvents

if TYPE_CHECKING:
    from dyn_relay.fleet.kv.sockets import Context

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("fleet")

#: Seconds after which the fleet is looked at again: what a worker says of itself may change without notice.
LOOK = 1.0
#: Nodes of the index that are looked at then, if anybody has them: about a millisecond.
TIDY = 5000
#: What an engine says that listens everywhere; it means "where you reached me".
_ANYWHERE = frozenset({"*", "0.0.0.0", "::", ""})


class _Key(NamedTuple):
    """A subscription; with any of these another, it is another one."""

    id: RankId
    host: str
    events: KvEvents
    life: int


class Subscriptions:
    """All of them, and the index that they feed."""

    def __init__(self, index: PrefixIndex, count: Callable[[str], object]) -> None:
        """`count` is told what publishers do, see `Follower.count` and `read_batch`; and of each "batch"."""
        self.index = index
        self._count = count
        self._lives: Counter[str] = Counter()
        self._following: dict[_Key, tuple[Rank, trio.CancelScope]] = {}
        self._news = trio.lowlevel.ParkingLot()
        self._context: Context | None = None

    def forget(self, worker: Worker) -> None:
        """The worker has left, or is a new process."""
        self._lives[worker.id] += 1
        for key, (rank, _) in self._following.items():
            if key.id.worker == worker.id:
                self.index.leave(rank)
        self._news.unpark_all()

    def __len__(self) -> int:
        return len(self._following)

    async def run(self, fleet: Members) -> None:
        """Follow the fleet until cancelled."""
        with ExitStack() as stack:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pass_on, fleet)
                    while True:
                        self._adjust(fleet, nursery, stack)
                        self.index.tidy(TIDY)
                        with trio.move_on_after(LOOK):
                            await self._news.park()
            finally:
                for rank, _ in self._following.values():
                    self.index.leave(rank)
                self._following.clear()
                self._context = None

    async def _pass_on(self, fleet: Members) -> None:
        while True:
            await fleet.changed()
            self._news.unpark_all()

    def _adjust(self, fleet: Members, nursery: trio.Nursery, stack: ExitStack) -> None:
        wanted = {key: worker for worker in fleet.workers for key in self._keys(worker)}
        for key in self._following.keys() - wanted.keys():
            rank, scope = self._following.pop(key)
            scope.cancel()
            self.index.leave(rank)
        for key in wanted:
            if key not in self._following:
                rank, scope = self.index.join(key.id), trio.CancelScope()
                self._following[key] = rank, scope
                source = self._source(key, stack)
                nursery.start_soon(
                    self._follow, scope, source, rank, partial(fleet.restarted, wanted[key], "its events begin anew")
                )

    def _keys(self, worker: Worker) -> Iterable[_Key]:
        events = worker.traits.kv_events
        if events is None or worker.state is State.DEAD:
            return ()
        host = worker.origin.host if events.host in _ANYWHERE else events.host
        life = self._lives[worker.id]
        return [_Key(RankId(worker.id, rank), host, events, life) for rank in range(events.ranks)]

    def _source(self, key: _Key, stack: ExitStack) -> Source:
        from dyn_relay.fleet.kv import sockets  # late: a library that only this policy needs

        if self._context is None:
            self._context = stack.enter_context(sockets.open_context())
        host = f"[{key.host}]" if ":" in key.host else key.host
        events, rank, topic = key.events, key.id.rank, key.events.topic.encode()
        live = f"tcp://{host}:{events.port + rank}"
        kept = None if events.replay_port is None else f"tcp://{host}:{events.replay_port + rank}"
        return Source(
            partial(sockets.subscribed, self._context, live, topic),
            None if kept is None else partial(sockets.dealing, self._context, kept),
            topic,
        )

    async def _follow(self, scope: trio.CancelScope, source: Source, rank: Rank, restarted: Callable[[], None]) -> None:
        def apply(payload: bytes) -> None:
            self.index.apply(rank, read_batch(payload, self._count))
            self._count("batch")

        follower = Follower(apply, partial(self._clear, rank), restarted, self._count)
        try:
            with scope:
                await Subscriber(source, follower).run()
        except Exception as exc:
            # Routing is less well informed then; requests must not suffer.
            log.error("cannot follow a worker's cache", rank=rank.id, exc_info=exc)
            self.index.leave(rank)

    def _clear(self, rank: Rank) -> None:
        if rank.slot >= 0:
            self.index.clear(rank)
