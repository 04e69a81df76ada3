"""The workers of `--worker-urls`."""

from __future__ import annotations

from collections.abc import Iterable

import trio

from dyn_relay.fleet.discovery.base import Report
from dyn_relay.http11.origin import Origin


class Static:
    """A set that never changes. Raises `ValueError` for a bad URL."""

    name = "static"

    def __init__(self, urls: Iterable[str]) -> None:
        self._origins = [Origin.parse(url) for url in urls]

    async def run(self, report: Report) -> None:
        report(self._origins)
        await trio.sleep_forever()
