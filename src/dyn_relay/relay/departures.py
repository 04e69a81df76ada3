"""Workers that are to be empty by a certain time: what still runs there then goes on elsewhere."""

from __future__ import annotations

from functools import partial

import trio

from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.worker import Worker
from dyn_relay.relay.chores import Chores
from dyn_relay.relay.live import LiveRequests
from dyn_relay.relay.turnstile import Turnstile


class Departures:
    """Planned migrations. What cannot be moved stays until it can, or has ended.

    A continuation needs a permit (`recovery.py`); until there is one the request goes on where it is.
    """

    def __init__(self, fleet: Fleet, live: LiveRequests, permits: Turnstile, chores: Chores) -> None:
        self._fleet = fleet
        self._live = live
        self._permits = permits
        self._chores = chores
        self._scopes: dict[str, trio.CancelScope] = {}

    def begin(self, worker: Worker, after: float) -> None:
        """`worker` is leaving the fleet: move what is still there in `after` seconds. Replaces an earlier order."""
        self.forget(worker)
        scope = self._scopes[worker.id] = trio.CancelScope()
        self._chores.start(partial(self._run, worker, after, scope))

    def forget(self, worker: Worker) -> None:
        """Move nothing of it, after all."""
        scope = self._scopes.pop(worker.id, None)
        if scope is not None:
            scope.cancel()

    async def _run(self, worker: Worker, after: float, scope: trio.CancelScope) -> None:
        fleet = self._fleet
        with scope:
            with trio.move_on_after(after):
                while fleet.leaving(worker):
                    await fleet.changed()
            await fleet.look()  # nobody is to be moved to one that has died unnoticed
            while fleet.leaving(worker):
                for request in [one for one in self._live if one.movable(worker)]:
                    if request.permitted:  # it waits for its first token there: it needs no second one
                        request.move(worker)
                        continue
                    place = self._permits.join()
                    try:
                        await place.turn.wait()
                    except trio.Cancelled:
                        place.leave()
                        raise
                    if not fleet.leaving(worker):
                        place.leave()
                        break
                    request.move(worker, place)
                if fleet.leaving(worker):
                    await fleet.changed()  # what stays may find a worker then
        if self._scopes.get(worker.id) is scope:
            del self._scopes[worker.id]
