"""The live logical requests, by rid: for duplicates, for aborts, and for names that collide with none of them.

SGLang matches an abort by prefix (0.5.23, scheduler: `req.rid.startswith(rid)`), so a rid that begins with another live
rid would be aborted with it. Every rid made here is unrelated to all that are live.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from dyn_relay.relay.request import LogicalRequest

#: 128 random bits at its end, as `uuid4()` writes them.
_CHANCE = re.compile(r"([0-9a-fA-F]{32}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})\Z")


class LiveRequests:
    """All logical requests in flight, under their clients' rids."""

    def __init__(self, rng: random.Random, *, alone: bool = True) -> None:
        """`alone`: no other process gives names to the same workers."""
        self._rng = rng
        self._alone = alone
        self._requests: dict[str, LogicalRequest] = {}
        #: Every rid that some worker may know, the clients' own and the attempts'; in order, for those that extend one.
        self._names: set[str] = set()
        self._ordered: list[str] = []
        #: How many of them have which length: of all the prefixes of a name, only these can be one of them.
        self._lengths: Counter[int] = Counter()
        #: Names that workers are being told to drop; each with what is set when they were.
        self._dropped: dict[str, list[trio.Event]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def names(self) -> int:
        """How many names are remembered."""
        return len(self._names)

    def __contains__(self, rid: str) -> bool:
        return rid in self._requests

    def __iter__(self) -> Iterator[LogicalRequest]:
        return iter(list(self._requests.values()))

    def add(self, request: LogicalRequest) -> None:
        """A logical request begins. Its rid must not be live."""
        assert request.rid not in self._requests
        self._requests[request.rid] = request
        self.remember(request.rid)

    def remove(self, request: LogicalRequest) -> None:
        """It has ended; the names of its attempts are free again."""
        del self._requests[request.rid]
        for name in (request.rid, *request.names):
            self.forget(name)

    def fresh(self) -> str:
        """A rid of 32 hexadecimal digits that is no prefix of a live one and extends none; not remembered."""
        while True:
            name = f"{self._rng.getrandbits(128):032x}"
            if name not in self._names and not self.related(name):
                return name

    def remember(self, name: str) -> None:
        """An attempt is sent under this name."""
        if name not in self._names:
            self._names.add(name)
            self._lengths[len(name)] += 1
            insort(self._ordered, name)

    def forget(self, name: str) -> None:
        """No attempt has this name any more."""
        if name in self._names:
            self._names.remove(name)
            self._lengths[len(name)] -= 1
            if not self._lengths[len(name)]:
                del self._lengths[len(name)]
            del self._ordered[bisect_left(self._ordered, name)]

    def drop(self, name: str, told: list[trio.Event]) -> None:
        """Workers are told to drop an attempt; what has come to them under its name by then would go with it."""
        while self._dropped and all(event.is_set() for event in next(iter(self._dropped.values()))):
            del self._dropped[next(iter(self._dropped))]
        self._dropped.setdefault(name, []).extend(told)

    def dropped(self, name: str) -> bool:
        """Would an order that is on its way mean this name as well?"""
        return any(
            name.startswith(other) and not all(event.is_set() for event in told)
            for other, told in self._dropped.items()
        )

    def matching(self, prefix: str) -> list[LogicalRequest]:
        """The live requests that an abort of `prefix` means, as stock matches them; none for an empty one."""
        if not prefix:
            return []
        return [
            request
            for rid, request in self._requests.items()
            if rid.startswith(prefix) or request.alias.startswith(prefix)
        ]

    def related(self, name: str) -> bool:
        """Is it a prefix of another live name, or an extension of one? An abort of the one would be both's.

        The names of other processes are not known here: only one that ends in chance is safe from being related to any.
        """
        if not self._alone and not _CHANCE.search(name):
            return True
        at = bisect_right(self._ordered, name)
        if at < len(self._ordered) and self._ordered[at].startswith(name):
            return True
        return any(name[:length] in self._names for length in self._lengths if length < len(name))
