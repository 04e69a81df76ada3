"""What policies hear of the engines' caches: `kv_aware` the events that SGLang would publish."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from dyn_relay.fleet.kv.events import KvEvent, Removed, Stored
from dyn_relay.fleet.kv.index import Rank, RankId
from dyn_relay.fleet.policies.base import Policy
from dyn_relay.fleet.policies.kv_aware import KvAware
from dyn_relay.fleet.target import Target
from dyn_testkit.routing.engine import Listener
from dyn_testkit.routing.trace import BLOCK

#: What of a policy hears of caches.
Listening = Callable[[Policy], Listener]


class Events:
    """Tells a policy's index at once, as its subscriptions would a moment later."""

    def __init__(self, policy: Policy) -> None:
        """Raises `TypeError` for a policy without such an index."""
        if not isinstance(policy, KvAware):
            raise TypeError(f"{type(policy).__name__} follows no events")
        self._index = policy.index
        self._ranks: dict[str, Rank] = {}

    def stored(self, target: Target, blocks: Sequence[int], parent: int | None, tokens: array[int]) -> None:
        """See `Listener`."""
        self._tell(target, Stored(list(blocks), parent, list(tokens), BLOCK))

    def removed(self, target: Target, blocks: Sequence[int]) -> None:
        """See `Listener`."""
        self._tell(target, Removed(list(blocks)))

    def _tell(self, target: Target, event: KvEvent) -> None:
        rank = self._ranks.get(target.id)
        if rank is None:
            rank = self._ranks[target.id] = self._index.join(RankId(target.worker.id, target.rank or 0))
        self._index.apply(rank, [event])


#: By the policy's name; the others hear nothing.
LISTENING: dict[str, Listening] = {"kv_aware": Events}
