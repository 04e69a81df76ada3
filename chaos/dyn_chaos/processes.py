"""Real processes: started in a session of their own, watched through what they print, killed as a group."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import trio

#: What `dyn-relay serve` and `dyn-mock-worker` print once they listen.
LISTENING = re.compile(r"listening on (https?://\S+)")


class NotReady(Exception):
    """A process cannot be started, or ended before it said that it was ready: then with the end of its output."""


class Child:
    """A running process, leader of its own session and group. Its output goes to `log`."""

    def __init__(self, name: str, process: trio.Process, log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.log = log
        #: What `ready` matched: its first group, or the whole match.
        self.ready = ""
        self._process = process

    @classmethod
    async def start(
        cls,
        nursery: trio.Nursery,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        ready: re.Pattern[str] | None,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start it and wait until a line of its output matches `ready`, if any. Leaving the nursery kills the group.

        `env` is added to this process's environment. Raises `NotReady`.
        """
        child: Child = await nursery.start(cls._run, name, argv, log, ready, {**os.environ, **(env or {})})
        return child

    @classmethod
    async def _run(
        cls,
        name: str,
        argv: Sequence[str],
        log: Path,
        ready: re.Pattern[str] | None,
        env: Mapping[str, str],
        task_status: trio.TaskStatus[Child],
    ) -> None:
        try:
            process = await trio.lowlevel.open_process(
                list(argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, env=env
            )
        except OSError as error:
            raise NotReady(f"{name} cannot be started: {error}") from None
        child = cls(name, process, log)
        try:
            await child._read(ready, task_status)
            await process.wait()
        finally:
            child.kill()
            with trio.CancelScope(shield=True):
                await process.wait()

    async def _read(self, ready: re.Pattern[str] | None, task_status: trio.TaskStatus[Child]) -> None:
        assert self._process.stdout is not None
        if ready is None:
            task_status.started(self)
        waiting, rest = ready is not None, ""
        tail: deque[str] = deque(maxlen=15)
        with self.log.open("wb", buffering=0) as file:
            async for data in self._process.stdout:
                file.write(data)
                if waiting:
                    *lines, rest = (rest + data.decode("utf-8", "replace")).split("\n")
                    tail.extend(lines)
                    assert ready is not None
                    if found := next(filter(None, map(ready.search, lines)), None):
                        self.ready = found[found.re.groups and 1]
                        waiting = False
                        task_status.started(self)
        if waiting:
            raise NotReady(f"{self.name} ended before it was ready:\n" + "\n".join([*tail, rest]))

    def send(self, sig: signal.Signals) -> None:
        """Signal the process alone, not its group."""
        self._process.send_signal(sig)

    def kill(self) -> None:
        """SIGKILL the whole group; nothing happens if it is gone."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    async def wait(self) -> int:
        """Return its exit status, negative for a signal."""
        return await self._process.wait()

    @property
    def alive(self) -> bool:
        """It has not ended."""
        return self._process.poll() is None


def title(pid: int) -> str:
    """What a process calls itself; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def state(pid: int) -> str:
    """The letter of a process's state (`T`: stopped, `Z`: ended but not waited for); "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def listener(near: int, port: int) -> int:
    """The process that listens on a TCP port, in the network that the process `near` sees; of several, the first.

    Raises `LookupError`.
    """
    for pid in listeners(near, port):
        return pid
    raise LookupError(f"no process of ours listens on port {port}")


def listeners(near: int, port: int) -> list[int]:
    """All processes that hold a socket which listens there: children inherit it."""
    inodes = _listening(near, port)
    return [pid for pid in everybody() if inodes & _links(pid)]


def everybody() -> list[int]:
    """The ids of all processes, in order."""
    return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _listening(near: int, port: int) -> set[str]:
    """How descriptors of the sockets that listen on a port are named."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{near}/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # 0A: listening
                found.add(f"socket:[{fields[9]}]")
    return found


def _links(pid: int) -> set[str]:
    """What the descriptors of a process are."""
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                found.add(os.readlink(entry))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return found


def usage(pid: int) -> dict[str, float]:
    """`fds`, a count, and `rss`, bytes; empty if it is gone."""
    try:
        fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {"fds": fds, "rss": pages * os.sysconf("SC_PAGE_SIZE")}


def free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def group(leader: int) -> list[int]:
    """The ids of all processes in the process group of `leader`."""
    members = []
    for pid in everybody():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name, in parentheses, may hold anything; state, parent and group follow it.
        if int(stat.rpartition(")")[2].split()[2]) == leader:
            members.append(pid)
    return members


def member(leader: int, name: str) -> int:
    """The process of a group whose title begins with `name`. Raises `LookupError`."""
    for pid in group(leader):
        if title(pid).startswith(name):
            return pid
    raise LookupError(f"no {name!r} in the process group {leader}")


def mapped(pids: Sequence[int], pattern: re.Pattern[str]) -> set[Path]:
    """Files that any of the processes has mapped and whose path matches."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found |= {Path(path) for path in re.findall(r"(/\S+)$", maps, re.MULTILINE) if pattern.search(path)}
    return found
