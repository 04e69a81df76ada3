"""Whom we measure: a command line each. Peers from a package index get a virtual environment in a cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from procs import BIN

#: All that is compared with: the router most people run today.
BASELINE = "sglang-router"
ROUTER_REQUIREMENT = "sglang-router==0.3.2"


@dataclass(frozen=True, slots=True)
class Peer:
    """A proxy under measurement."""

    name: str
    what: str
    command: Callable[[int, list[int]], list[str]]
    """(port to listen on, ports of the workers) -> command line"""


def cache() -> Path:
    """Where other people's proxies are installed: outside the checkout."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dyn-relay-bench"


def python_with(requirement: str) -> str:
    """An interpreter that has the package, made at the first call."""
    folder = cache() / requirement
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
        (folder / "complete").touch()
    return str(python)


def _urls(workers: list[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in workers]


def _dyn_relay(*flags: str) -> Callable[[int, list[int]], list[str]]:
    def command(port: int, workers: list[int]) -> list[str]:
        program = shutil.which("dyn-relay", path=str(Path(sys.executable).parent))
        if program is None:
            raise SystemExit("dyn-relay is not installed beside this Python: run this with the project's own")
        urls = [part for url in _urls(workers) for part in ("--worker-urls", url)]
        return [program, "serve", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning", *urls, *flags]

    return command


def _sglang_router(port: int, workers: list[int]) -> list[str]:
    python = python_with(ROUTER_REQUIREMENT)
    command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--log-level", "warn", "--worker-startup-check-interval", "1"]
    # Its metrics port cannot be turned off; `free_ports` keeps the odd one free.
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 1)]
    return [*command, "--worker-urls", *_urls(workers)]


def _bare_relay(port: int, workers: list[int]) -> list[str]:
    return [str(BIN / "relay"), "--port", str(port), "--up", str(workers[0])]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("dyn-relay", "this project, as it is by default", _dyn_relay()),
        Peer("dyn-relay-off", "this project with `--migration-limit 0`", _dyn_relay("--migration-limit", "0")),
        Peer(BASELINE, f"{ROUTER_REQUIREMENT} from PyPI, round robin", _sglang_router),
        Peer("relay", "a TCP relay in Rust that reads nothing: the floor", _bare_relay),
    )
}
