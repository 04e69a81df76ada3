"""The engines of a campaign: mock workers or any command, started here and started again; or running ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import trio

from dyn_chaos import audit, processes
from dyn_chaos.engines import script
from dyn_chaos.namespaces import Namespace
from dyn_chaos.processes import LISTENING, Child, NotReady

#: Seconds in which an engine must say that it is well; large models load for long.
BOOT = 1800.0
#: The port of an engine that has a network namespace to itself.
ALONE = 30000
LOOPBACK = "127.0.0.1"

#: (host, port) -> the command line of an engine that shall listen there.
Command = Callable[[str, int], Sequence[str]]


class Engine(Protocol):
    """A server on this machine to which something can be done."""

    @property
    def name(self) -> str:
        """For people; unique in a campaign."""

    @property
    def url(self) -> str:
        """Its base URL, without a trailing slash; the same after a restart."""

    @property
    def port(self) -> int:
        """Of the URL."""

    @property
    def pid(self) -> int:
        """Its first process, now."""

    @property
    def namespace(self) -> Namespace | None:
        """Where it runs, if that is not this machine's own network."""

    async def restart(self) -> None:
        """End what is left of it and start it on the same port; it serves again on return. Raises `NotReady`."""


@dataclass(frozen=True, slots=True)
class Attached:
    """A server that somebody else started; it cannot be started again."""

    url: str
    pid: int
    namespace: None = None

    @property
    def name(self) -> str:
        """Its URL."""
        return self.url

    @property
    def port(self) -> int:
        """Of the URL."""
        return port_of(self.url)

    async def restart(self) -> None:
        """Raises `NotReady`."""
        raise NotReady(f"{self.url} was not started here, so it cannot be started again")


@dataclass(slots=True)
class Started:
    """A process of ours."""

    name: str
    command: Command
    nursery: trio.Nursery
    logs: Path
    #: What its output says once it serves; None: its /health is asked.
    ready: re.Pattern[str] | None = None
    namespace: Namespace | None = None
    port: int = 0
    _child: Child | None = None
    _starts: int = field(default=0)

    @property
    def host(self) -> str:
        """Where it listens."""
        return self.namespace.address if self.namespace else LOOPBACK

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The leader of its process group."""
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Start it; it serves on return. Raises `NotReady`."""
        self.port = self.port or (ALONE if self.namespace else processes.free_port())
        self._starts += 1
        log = self.logs / f"{self.name}{f'.{self._starts}' if self._starts > 1 else ''}.log"
        argv = [*(self.namespace.enter if self.namespace else ()), *self.command(self.host, self.port)]
        self._child = await Child.start(self.nursery, self.name, argv, log=log, ready=self.ready)
        if self.ready is None:
            await self._healthy(self._child)

    async def _healthy(self, child: Child) -> None:
        async def look() -> str:
            if not child.alive:
                raise NotReady(f"{self.name} ended before it was ready; see {child.log}")
            status = await audit.health(self.url, within=30.0)
            return status if status == "200" else ""

        if not await audit.wait_for(look, BOOT):
            raise NotReady(f"{self.url}/health was not 200 within {BOOT:.0f} s")

    async def restart(self) -> None:
        """Kill the group, wait, start again."""
        assert self._child is not None
        self._child.kill()
        await self._child.wait()
        await self.start()


def mock(nursery: trio.Nursery, name: str, logs: Path, flags: Sequence[str], namespace: Namespace | None) -> Started:
    """A `dyn-mock-worker`, not yet started."""
    program = script("dyn-mock-worker")

    def command(host: str, port: int) -> list[str]:
        return [program, "--host", host, "--port", str(port), *flags]

    return Started(name, command, nursery, logs, LISTENING, namespace)


def by_command(
    nursery: trio.Nursery, name: str, logs: Path, words: Sequence[str], namespace: Namespace | None
) -> Started:
    """Any engine, not yet started: `{port}` and `{host}` in its command line are filled in."""

    def command(host: str, port: int) -> list[str]:
        return [word.replace("{port}", str(port)).replace("{host}", host) for word in words]

    return Started(name, command, nursery, logs, None, namespace)


@dataclass(frozen=True, slots=True)
class Behind:
    """An engine behind a sidecar: its own processes are struck, and what becomes of it is seen at the sidecar."""

    engine: Engine
    sidecar: Started
    namespace: None = None

    @property
    def name(self) -> str:
        """The engine's."""
        return self.engine.name

    @property
    def url(self) -> str:
        """The sidecar's."""
        return self.sidecar.url

    @property
    def port(self) -> int:
        """The sidecar's."""
        return self.sidecar.port

    @property
    def pid(self) -> int:
        """The engine's."""
        return self.engine.pid

    async def restart(self) -> None:
        """The engine alone. Raises `NotReady`."""
        await self.engine.restart()


def sidecar(nursery: trio.Nursery, name: str, logs: Path, engine: Engine, relay: str) -> Started:
    """A `dyn-sidecar` beside an engine, not yet started; what it asks of that is in LOGS/NAME.jsonl."""
    program, requests = script("dyn-sidecar"), logs / f"{name}.jsonl"
    requests.unlink(missing_ok=True)

    def command(host: str, port: int) -> list[str]:
        at = ["--engine", engine.url, "--relay", relay, "--listen", f"{host}:{port}"]
        return [program, *at, "--health-check-interval-secs", "0.5", "--requests-file", str(requests)]

    return Started(name, command, nursery, logs, LISTENING)


def port_of(url: str) -> int:
    """The port of a base URL. Raises `ValueError` if it has none."""
    return int(url.rpartition(":")[2])
