"""Processes under measurement: start them on one core, read what they cost from /proc, stop them. Linux only."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BIN = HERE / "bin"
BODIES = HERE / "bodies"
LOGS = HERE / "results" / "logs"

#: The proxy has one core to itself; worker and load generator share the other. In place of a core, None is all of them.
PROXY_CORE = 0
LOAD_CORE = 1

_TICKS = os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG = 1


#: What `build.sh` makes.
_BUILT = (BIN / "mockworker", BIN / "loadgen", BIN / "relay", BODIES)


def require_build() -> None:
    """Raise `SystemExit` with a message if `build.sh` has not run."""
    missing = [str(path.relative_to(HERE.parent)) for path in _BUILT if not path.exists()]
    if missing:
        raise SystemExit(f"run bench/build.sh first (needs cargo): no {', '.join(missing)}")


def machine() -> str:
    """Where a run was made, in words."""
    return f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process and its children have used so far, and hold now."""

    run_ms: float
    """CPU time of all threads, from the scheduler's own count."""
    user_ms: float
    system_ms: float
    rss: int
    """Resident bytes."""
    fds: int


def _child_of_mine(core: int | None) -> Callable[[], None]:
    def prepare() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.sched_setaffinity(0, range(os.cpu_count() or 1) if core is None else {core})

    return prepare


@contextmanager
def running(command: list[str], core: int | None, name: str) -> Iterator[int]:
    """Run a command on a core for as long as the block lasts; gives its pid. Its output goes to `results/logs`."""
    LOGS.mkdir(parents=True, exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    with (LOGS / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=_child_of_mine(core),
        )
        try:
            yield process.pid
        finally:
            for pid in family(process.pid):
                _kill(pid)
            process.wait()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue  # it has just ended
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def cost(pid: int) -> Cost:
    """What the process and its children have used."""
    run = user = system = rss = fds = 0
    for member in family(pid):
        proc = Path(f"/proc/{member}")
        fields = (proc / "stat").read_text().rsplit(")", 1)[1].split()
        user += int(fields[11])
        system += int(fields[12])
        rss += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        fds += len(os.listdir(proc / "fd"))
        for task in (proc / "task").iterdir():
            run += int((task / "schedstat").read_text().split()[0])
    return Cost(run / 1e6, user * 1000 / _TICKS, system * 1000 / _TICKS, rss, fds)


def core_busy_ms(core: int) -> float:
    """Milliseconds that a core has been busy since boot, whoever used it."""
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith(f"cpu{core} "):
            user, nice, system, _idle, _wait, irq, softirq = (int(field) for field in line.split()[1:8])
            return (user + nice + system + irq + softirq) * 1000 / _TICKS
    raise ValueError(f"no core {core}")


def free_ports(count: int) -> list[int]:
    """Even ports that nobody listens on now; the odd one above each is free too.

    Below the range that the kernel takes for outgoing connections: one of those might sit there by the time of use.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20000, 32000, 2)
        if port not in found and _is_free(port) and _is_free(port + 1):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def post_generate(port: int) -> bytes:
    """One short unary request; raises `OSError` (also for an answer other than 200)."""
    body = json.dumps({"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", data=body, headers={"content-type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=5) as answer:
        content: bytes = answer.read()
        return content


def get(port: int, path: str) -> str:
    """The text at a path of a local server; raises `OSError`."""
    return order(port, "GET", path)


def order(port: int, method: str, path: str, content: dict[str, str] | None = None) -> str:
    """The answer to an order to a local server; raises `OSError` (also for one that is refused)."""
    body = None if content is None else json.dumps(content).encode()
    headers = {} if content is None else {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=5) as answer:
        text: str = answer.read().decode()
        return text


def metric(port: int, name: str) -> float:
    """The sum of all samples of a metric of dyn-relay; raises `KeyError` if there is none."""
    values = []
    for line in get(port, "/metrics").splitlines():
        series, _, value = line.rpartition(" ")
        if series.split("{")[0] == name:
            values.append(float(value))
    if not values:
        raise KeyError(name)
    return sum(values)


def mock_stats(port: int) -> dict[str, int]:
    """What a mock worker has counted."""
    counts: dict[str, int] = json.loads(get(port, "/mock_stats"))
    return counts


def wait_until_serving(port: int, seconds: float = 60) -> None:
    """Return once the server at the port answers `/generate`. Raises `TimeoutError`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            post_generate(port)
            return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise TimeoutError(f"port {port} does not serve: {exc}") from exc
            time.sleep(0.1)


def worker_command(port: int, options: list[str]) -> list[str]:
    """The mock worker."""
    return [str(BIN / "mockworker"), "--port", str(port), *options]


@dataclass(slots=True)
class LoadResult:
    """The load generator's own report, and the CPU time that it used."""

    report: dict[str, Any]
    cpu_ms: float


def load(
    port: int,
    body: str,
    options: list[str],
    sample: Callable[[], None] | None = None,
    core: int | None = LOAD_CORE,
) -> LoadResult:
    """Run the load generator to its end, calling `sample` twice a second. Raises `RuntimeError` if it breaks down."""
    command = [str(BIN / "loadgen"), "--port", str(port), "--body", str(BODIES / f"{body}.json"), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=_child_of_mine(core))
    assert process.stdout is not None
    while True:
        pid, _status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        if sample is not None:
            sample()
        time.sleep(0.5 if sample else 0.05)
    process.returncode = 0  # reaped above
    output = process.stdout.read()
    process.stdout.close()
    if not output:
        raise RuntimeError("the load generator broke down")
    return LoadResult(json.loads(output), (usage.ru_utime + usage.ru_stime) * 1000)
