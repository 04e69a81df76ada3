"""The workers that the configuration names: `--worker-urls`, or `--prefill` and `--decode`."""

from __future__ import annotations

from collections.abc import Iterable

import trio

from dyn_relay.fleet.discovery.base import Report, Source
from dyn_relay.fleet.stage import Named


class Static(Source):
    """A set that never changes."""

    name = "static"

    def __init__(self, named: Iterable[Named]) -> None:
        self.named = {one.origin: one for one in named}

    async def run(self, report: Report) -> None:
        report(self.named)
        await trio.sleep_forever()
