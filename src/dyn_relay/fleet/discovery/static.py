"""The workers that the configuration names: `--worker-urls`, or `--prefill` and `--decode`."""

from __future__ import annotations

from collections.abc import Iterable

import trio

from dyn_relay.fleet.discovery.base import Report, Source
from dyn_relay.fleet.worker import Role
from dyn_relay.http11.origin import Origin


class Static(Source):
    """A set that never changes. Raises `ValueError` for a bad URL."""

    def __init__(self, items: Iterable[str], name: str = "static", role: Role | None = None) -> None:
        """`items`: URLs, each with its bootstrap port behind it or none."""
        self.name = name
        self.role = role
        self.ports: dict[Origin, int] = {}
        self._origins: list[Origin] = []
        for item in items:
            if item.isdigit():
                self.ports[self._origins[-1]] = int(item)
            else:
                self._origins.append(Origin.parse(item))

    async def run(self, report: Report) -> None:
        report(self._origins)
        await trio.sleep_forever()
