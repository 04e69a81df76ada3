"""The other processes of a proxy that is several (`--processes`): each listens on a private socket, too.

What is said there is the proxy's own HTTP, without keys: a request that needs all of them is sent on as it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
import trio

from dyn_relay.control.told import Told
from dyn_relay.formats.base import Answer
from dyn_relay.http11.client import BadResponse, Origin, Pool, fetch
from dyn_relay.http11.errors import error_body
from dyn_relay.http11.headers import get
from dyn_relay.net import ConnectFailed, ConnectionBroken, Listener, Network

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("siblings")

#: Seconds that one may take to answer, from memory.
PATIENCE = 1.0
#: So often a replacement asks those that do not answer.
ROUNDS = 10
#: Private paths. No attempt is to begin: PUT, and DELETE for the end of that; infos are to be read anew: POST; GET.
PAUSED, RELEARN, TOLD = "/paused", "/relearn", "/told"
#: Sockets have names; the port is there because origins have one.
_PORT = 1


@dataclass(frozen=True, slots=True)
class Heard:
    """What the others said."""

    answers: Sequence[Answer]
    #: Those that are there and did not answer in time. One that is not there, since it has died, is not missed.
    silent: Sequence[int]


class Siblings:
    """All but the process `number` of `count`. `directory`: what all can read and write, and nobody else."""

    def __init__(self, network: Network, number: int, count: int, directory: Path, *, replacement: bool = False):
        """`replacement`: of one that has died; what it was told since the start has to be asked for."""
        self.number = number
        self.count = count
        self.directory = directory
        self.replacement = replacement
        self._network = network
        self._pool = Pool(network, connect_timeout=PATIENCE)
        self._others = [other for other in range(count) if other != number]

    async def listen(self) -> Listener:
        """Where the others find this one. Raises `OSError`."""
        return await self._network.listen(_name(self.number), _PORT)

    def close(self) -> None:
        """Close all idle connections to them."""
        self._pool.close()

    async def ask(self, method: str, target: str, body: bytes) -> Heard:
        """Ask all of them the same, at once."""
        answers: dict[int, Answer] = {}
        silent: list[int] = []

        async def ask(other: int) -> None:
            try:
                answers[other] = await self._ask(other, method, target, body)
            except ConnectFailed:
                pass
            except (ConnectionBroken, BadResponse, trio.TooSlowError) as exc:
                log.warning("a process does not answer", asked=other, path=target, error=repr(exc))
                silent.append(other)

        async with trio.open_nursery() as nursery:
            for other in self._others:
                nursery.start_soon(ask, other)
        return Heard([answers[other] for other in sorted(answers)], sorted(silent))

    async def told(self) -> Told | None:
        """What the others know; None if none of them does, since all have been replaced."""
        for _ in range(ROUNDS):
            heard = await self.ask("GET", TOLD, b"")
            for answer in heard.answers:
                if answer.status == 200:
                    return msgspec.json.decode(answer.body, type=Told)
            if not heard.silent:
                return None
        log.error("no process tells what it was told; what is configured is used")
        return None

    async def _ask(self, other: int, method: str, target: str, body: bytes) -> Answer:
        origin = Origin.parse(f"http://{_name(other)}:{_PORT}")
        response = await fetch(self._pool, origin, method, target, body=body, timeout=PATIENCE)
        kind = get(response.headers, b"content-type") or b""
        return Answer(response.status, response.body, kind, response.headers)


def missing(silent: Sequence[int]) -> Answer:
    """What was to be done by all was not done by these."""
    names = ", ".join(map(str, silent))
    message = f"done, but not by the process {names} of this proxy, which does not answer; do it again"
    return Answer(504, error_body(504, message))


def _name(number: int) -> str:
    return f"process-{number}"
