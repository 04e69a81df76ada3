"""Samples of the proxy over time: what it has in flight, its descriptors, its memory."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import trio

from dyn_chaos import processes
from dyn_chaos.load import metrics, total
from dyn_testkit.history import Sample

#: Gauges of the proxy that count work in hand; zero when all clients have their answers.
GAUGES = ("dyn_relay_requests_in_flight", "dyn_relay_attempts_in_flight")
#: Counted by it since it began.
MIGRATIONS = "dyn_relay_migrations_total"

#: Seconds in which the proxy has to have tidied up after the last answer.
SETTLE = 5.0
#: Seconds between two samples.
PAUSE = 1.0


async def sample(http: httpx.AsyncClient, relay: str, pid: int, begin: float) -> Sample:
    """One sample. A gauge that the proxy does not have is not in it."""
    seen = await metrics(http, relay)
    values = {name: seen[name] for name in GAUGES if name in seen}
    values[MIGRATIONS] = total(seen, MIGRATIONS)
    return Sample(trio.current_time() - begin, values | processes.usage(pid))


async def watch(http: httpx.AsyncClient, relay: str, pid: int, begin: float, note: Callable[[Sample], None]) -> None:
    """Note one sample after the other until cancelled."""
    while True:
        note(await sample(http, relay, pid, begin))
        await trio.sleep(PAUSE)


async def settled(http: httpx.AsyncClient, relay: str, pid: int, begin: float) -> Sample:
    """A sample with all gauges at zero, or as it is after `SETTLE` seconds."""
    deadline = trio.current_time() + SETTLE
    while True:
        last = await sample(http, relay, pid, begin)
        if not any(last.values.get(gauge) for gauge in GAUGES) or trio.current_time() > deadline:
            return last
        await trio.sleep(0.05)
