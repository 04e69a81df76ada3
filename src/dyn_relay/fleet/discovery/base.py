"""What a source of workers is to the fleet.

A source says who is there now, always the whole set; what changed is found out in `discovery.py`. So a source keeps no
books, and one that starts afresh after a failure does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from dyn_relay.fleet.stage import Named
from dyn_relay.http11.origin import Origin

#: Takes the whole set of workers, as a source sees it now. Awaits nothing.
Report = Callable[[Iterable[Origin]], None]


class SourceError(Exception):
    """The source cannot say who is there. The message says why, for people."""


class Source(Protocol):
    """One place where workers are named."""

    #: One short word of a fixed few: it labels metrics and log lines, and stands in a worker's `named_by`.
    name: str
    #: Those of its workers of which it knows more than where they are.
    named: Mapping[Origin, Named] = MappingProxyType({})

    async def run(self, report: Report) -> None:
        """Report the set once it is known, and again whenever it may have changed, until cancelled.

        Raises `SourceError` within a bounded time if nothing can be learnt; what was reported last stays true, and the
        source is run again later.
        """
