"""Signals to the processes of an engine: those that end them, and those that stop them for a while."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import trio

from dyn_chaos import audit, processes
from dyn_chaos.actions.base import SEEN, Scene
from dyn_chaos.fleet import Engine

#: Which processes of an engine get the signal.
Whom = Callable[[Engine], list[int]]


def port_owner(engine: Engine) -> list[int]:
    """The one that listens on the engine's port. Raises `LookupError` if none does."""
    return [processes.listener(engine.pid, engine.port)]


def leader(engine: Engine) -> list[int]:
    """The first one."""
    return [engine.pid]


def members(engine: Engine) -> list[int]:
    """All of the process group; of an attached process that leads none, itself."""
    return processes.group(engine.pid) or [engine.pid]


class Kill:
    """A signal that ends processes; undone by a new start on the same port."""

    outlasts = False

    def __init__(self, kind: str, whom: Whom, sig: signal.Signals = signal.SIGKILL, grace: float | None = None) -> None:
        """`grace`: seconds after which what is left gets a SIGKILL."""
        self.kind = kind
        self.within = SEEN
        self._whom = whom
        self._signal = sig
        self._grace = grace
        self._struck: dict[str, list[int]] = {}

    async def invoke(self, scene: Scene, engine: Engine) -> dict[str, Any]:
        """Send it."""
        pids = self._struck[engine.name] = self._whom(engine)
        for pid in pids:
            with suppress(ProcessLookupError):  # of a group, one may go with another
                os.kill(pid, self._signal)
        choice: dict[str, Any] = {"signal": self._signal.name, "pids": pids}
        if self._grace is not None and not await audit.wait_for(lambda: self.seen(scene, engine), self._grace):
            choice["killed after"] = self._grace
            for pid in members(engine):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return choice

    async def undo(self, scene: Scene, engine: Engine) -> None:
        """Start it again."""
        await engine.restart()

    async def seen(self, scene: Scene, engine: Engine) -> str:
        """All of them are gone, and nobody listens."""
        pids = self._struck[engine.name]
        if not pids or any(processes.state(pid) not in ("", "Z") for pid in pids):
            return ""
        return f"{_named(pids)} gone, port {engine.port} refuses" if audit.refuses(engine.url) else ""


class Stall:
    """SIGSTOP to the whole group, undone by SIGCONT."""

    kind = "stall"
    within = SEEN
    outlasts = True

    async def invoke(self, scene: Scene, engine: Engine) -> dict[str, Any]:
        """Stop all."""
        return self._send(engine, signal.SIGSTOP)

    async def undo(self, scene: Scene, engine: Engine) -> None:
        """Let them go on."""
        self._send(engine, signal.SIGCONT)
        await trio.lowlevel.checkpoint()

    def _send(self, engine: Engine, sig: signal.Signals) -> dict[str, Any]:
        pids = members(engine)
        for pid in pids:
            os.kill(pid, sig)
        return {"signal": sig.name, "pids": pids}

    async def seen(self, scene: Scene, engine: Engine) -> str:
        """All of them are stopped, and its health says nothing."""
        pids = members(engine)
        if any(processes.state(pid) != "T" for pid in pids):
            return ""
        silent = await audit.health(engine.url) == audit.SILENCE
        return f"{_named(pids)} stopped, /health is silent" if silent else ""


def _named(pids: list[int]) -> str:
    return f"{'process' if len(pids) == 1 else 'processes'} {', '.join(map(str, pids))}"


#: Signals that end a process which does not mind them.
DEADLY: Mapping[str, signal.Signals] = {
    name: getattr(signal, f"SIG{name}") for name in ("KILL", "TERM", "INT", "HUP", "QUIT", "ABRT", "SEGV")
}
