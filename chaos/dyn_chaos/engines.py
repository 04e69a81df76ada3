"""The processes of a campaign by kind: the proxy, mock workers, and stock SGLang engines on the CPU."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from dyn_chaos import processes
from dyn_chaos.processes import Child

#: The name that SGLang 0.5.23 gives its segment of shared memory; a killed engine leaves it behind.
_SHARED_MEMORY = re.compile(r"^/dev/shm/sglang_loads_")
_READY = re.compile(r"ready to roll")

#: SGLang 0.5.23, float32, two CPU cores: an engine's own runs, and their continuations in other batches, differ for
#: numerical reasons by up to 3e-5 in the logprob of the sampled token and 6e-5 in those of its alternatives.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Server:
    """A process of ours that serves HTTP."""

    url: str
    child: Child

    @property
    def name(self) -> str:
        """The process's name."""
        return self.child.name

    def kill(self) -> None:
        """SIGKILL its process group."""
        self.child.kill()


def script(name: str) -> str:
    """A console script of this installation. Raises `FileNotFoundError`."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"no {name} beside {sys.executable} or on the PATH")
    return found


async def listen(nursery: trio.Nursery, name: str, argv: Sequence[str], logs: Path) -> Server:
    """Start a process that prints `listening on URL`."""
    child = await Child.start(nursery, name, argv, log=logs / f"{name}.log", ready=processes.LISTENING)
    return Server(child.ready, child)


async def relay(
    nursery: trio.Nursery, workers: Sequence[str], logs: Path, flags: Sequence[str] = (), name: str = "relay"
) -> Server:
    """`dyn-relay serve` before `workers`, or those that `flags` name; its trace in `logs`/NAME.jsonl."""
    trace = logs / f"{name}.jsonl"
    trace.unlink(missing_ok=True)
    named = ("--worker-urls", *workers) if workers else ()
    argv = [script("dyn-relay"), "serve", *named, "--port", "0", "--trace-file", str(trace), *flags]
    return await listen(nursery, name, argv, logs)


async def mock(nursery: trio.Nursery, name: str, logs: Path, flags: Sequence[str] = ()) -> Server:
    """A `dyn-mock-worker`."""
    return await listen(nursery, name, [script("dyn-mock-worker"), "--port", "0", *flags], logs)


@dataclass(frozen=True, slots=True)
class Stock:
    """Where a stock SGLang for the CPU is installed, and how to start it."""

    python: Path
    shim: Path
    model: Path
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    #: Answers carry text.
    tokenizer: bool = False
    #: Serves its native gRPC service beside HTTP.
    grpc: bool = False

    async def start(self, nursery: trio.Nursery, port: int, logs: Path) -> StockServer:
        """Start one engine and wait until it serves (20 to 40 s on two cores).

        `--sleep-on-idle` is stock's own: without it an idle engine keeps one core busy. Raises `NotReady`.
        """
        grpc = processes.free_port() if self.grpc else 0
        argv = [
            *(str(self.python), "-m", "sglang.launch_server", "--model-path", str(self.model)),
            *("--device", "cpu", "--dtype", "float32"),
            *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
            *("--disable-overlap-schedule", "--sleep-on-idle"),
            *(() if self.tokenizer else ("--skip-tokenizer-init",)),
            *("--max-total-tokens", "16384", "--mem-fraction-static", "0.1"),
            *(("--grpc-port", str(grpc)) if grpc else ()),
            *("--host", "127.0.0.1", "--port", str(port), *self.flags),
        ]
        env = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": str(self.shim),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            **self.env,
        }
        name = f"engine-{port}"
        child = await Child.start(nursery, name, argv, log=logs / f"{name}.log", ready=_READY, env=env)
        members = processes.group(child.pid)
        return StockServer(
            f"http://127.0.0.1:{port}",
            child,
            processes.member(child.pid, "sglang::scheduler"),
            processes.member(child.pid, "sglang::detokenizer"),
            frozenset(processes.mapped(members, _SHARED_MEMORY)),
            f"grpc://127.0.0.1:{grpc}" if grpc else "",
        )


@dataclass(frozen=True, slots=True)
class StockServer(Server):
    """A stock SGLang engine: an HTTP process, a scheduler and a detokenizer, one process group."""

    scheduler: int
    detokenizer: int
    shared_memory: frozenset[Path]
    #: Where its gRPC service is; "" if it has none.
    grpc: str = ""

    def kill(self) -> None:
        """SIGKILL everything in the group but Python's resource tracker, which then removes its semaphores and ends."""
        for pid in processes.group(self.child.pid):
            if "resource_tracker" not in processes.title(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Kill it, reap it, and remove what it would leave in shared memory."""
        late = processes.mapped(processes.group(self.child.pid), _SHARED_MEMORY)  # it may be ready before it maps them
        self.kill()
        await self.child.wait()
        for path in self.shared_memory.union(late):
            path.unlink(missing_ok=True)
