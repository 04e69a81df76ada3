"""What the tests of the simulated network share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio
import trio.testing
from trio._core import _run

from dyn_relay.net import Connection, ConnectionBroken
from dyn_testkit.simnet import Link, SimConnection, SimNetwork

#: Where host b listens.
B = ("b", 80)


async def pair(network: SimNetwork, port: int = 0) -> tuple[SimConnection, SimConnection]:
    """A connection from host a to host b: its ends there."""
    listener = await network.listen("b", port)
    near = await network.host("a").connect("b", listener.port)
    return near, await listener.accept()


def network_of(link: Link | None = None, **kwargs) -> SimNetwork:
    """One whose hosts a and b are known."""
    network = SimNetwork(0, link, **kwargs)
    network.host("a")
    network.host("b")
    return network


async def send_until_blocked(connection: Connection, data: bytes) -> None:
    """Hand over what fits, then be cancelled."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.send, data)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def drain(connection: Connection) -> bytes:
    """All up to the end."""
    return b"".join([data for _, data in await history(connection)])


async def history(connection: Connection) -> list[tuple[float, bytes]]:
    """All that is read up to the end, which is b"", or "reset"; each with its time, to the microsecond."""
    seen: list[tuple[float, bytes]] = []
    while not seen or seen[-1][1]:
        try:
            data = await connection.receive()
        except ConnectionBroken:
            return [*seen, (now(), "reset")]
        seen.append((now(), data))
    return seen


def now() -> float:
    """s in virtual time, to the microsecond."""
    return round(trio.current_time(), 6)


async def nothing_comes(connection: Connection, seconds: float = 1000) -> bool:
    """Neither bytes nor the end, for so long."""
    with trio.move_on_after(seconds) as scope:
        await connection.receive()
    return scope.cancelled_caught and connection.quiet()


@contextmanager
def scheduled(seed: int) -> Iterator[None]:
    """Let trio run ready tasks in an order that the seed decides; only Hypothesis can ask for that officially."""
    state, allowed = _run._r.getstate(), _run._ALLOW_DETERMINISTIC_SCHEDULING
    _run._r.seed(seed)
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True
    try:
        yield
    finally:
        _run._ALLOW_DETERMINISTIC_SCHEDULING = allowed
        _run._r.setstate(state)
