"""What somebody who only looks can see of a worker: its processes, its port, its health, the proxy's opinion."""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import httpx
import trio

from dyn_chaos import load

#: Seconds without an answer after which a server is silent.
SILENT = 0.5
#: Seconds that the system may take to say that nobody listens on one of its own ports; nothing else runs meanwhile.
AT_ONCE = 0.2
#: Seconds between two looks.
PAUSE = 0.02

REFUSED, SILENCE = "refused", "silent"


async def health(url: str, within: float = SILENT) -> str:
    """The status of `url`/health; `REFUSED` if nobody listens or the connection breaks, `SILENCE` if nothing comes."""
    async with load.client() as http:
        with trio.move_on_after(within):
            try:
                return str((await http.get(f"{url}/health")).status_code)
            except httpx.HTTPError:
                return REFUSED
    return SILENCE


def refuses(url: str) -> bool:
    """Nobody listens there. The system knows at once of its own ports, however busy this process is."""
    at = httpx.URL(url)
    with socket.socket() as dial:
        dial.settimeout(AT_ONCE)
        return dial.connect_ex((at.host, at.port)) == errno.ECONNREFUSED


async def wait_for(look: Callable[[], Awaitable[str]], within: float) -> str:
    """What `look` sees, as soon as it sees something; "" if it does not in `within` seconds. It looks at least once."""
    deadline = trio.current_time() + within
    while True:
        seen = await look()
        if seen or trio.current_time() >= deadline:
            return seen
        await trio.sleep(PAUSE)


async def states(http: httpx.AsyncClient, relay: str) -> dict[str, str]:
    """The state of each worker that the proxy lists, by URL."""
    return {entry["url"].rstrip("/"): entry["state"] for entry in await listed(http, relay)}


async def loads(http: httpx.AsyncClient, relay: str) -> dict[str, float]:
    """The requests at each worker that the proxy lists, by URL."""
    return {entry["url"].rstrip("/"): entry["load"] for entry in await listed(http, relay)}


async def listed(http: httpx.AsyncClient, relay: str) -> list[dict[str, Any]]:
    """The proxy's workers."""
    workers: list[dict[str, Any]] = (await http.get(f"{relay}/workers")).raise_for_status().json()["workers"]
    return workers


class Located(Protocol):
    """Something with a base URL, without a trailing slash."""

    @property
    def url(self) -> str:
        """It."""


L = TypeVar("L", bound=Located)


async def busiest(relay: str, servers: Sequence[L]) -> L:
    """The server with the most requests, as the proxy counts them. Raises `LookupError` if it lists none of them."""
    async with load.client() as http:
        seen = await loads(http, relay)
    known = [server for server in servers if server.url in seen]
    if not known:
        raise LookupError(f"the proxy lists {sorted(seen)}")
    return max(known, key=lambda server: seen[server.url])
