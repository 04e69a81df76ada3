"""Whom we measure: a command line each. Peers from a package index get a virtual environment in a cache folder."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from procs import BIN

#: All that is compared with: the router most people run today.
BASELINE = "sglang-router"
ROUTER_REQUIREMENT = "sglang-router==0.3.2"
SMG_REQUIREMENT = "smg==1.13.0"


@dataclass(frozen=True, slots=True)
class Peer:
    """A proxy under measurement."""

    name: str
    what: str
    command: Callable[[int, list[int]], list[str]]
    """(port to listen on, ports of the workers) -> command line. Raises `OSError` if it is not there."""
    required: bool = True
    """False: if it is not here and cannot be installed, the others are measured without it."""


def cache() -> Path:
    """Where other people's proxies are installed: outside the checkout."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dyn-relay-bench"


def python_with(requirement: str) -> str:
    """An interpreter that has the package, made at the first call. Raises `OSError` if it cannot be installed."""
    folder = cache() / requirement
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise OSError(f"{requirement} cannot be installed: {' '.join(done.stderr.splitlines()[-1:])}")
        (folder / "complete").touch()
    return str(python)


def _urls(workers: list[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in workers]


def dyn_relay(*flags: str) -> Callable[[int, list[int]], list[str]]:
    """This project with some flags."""

    def command(port: int, workers: list[int]) -> list[str]:
        program = shutil.which("dyn-relay", path=str(Path(sys.executable).parent))
        if program is None:
            raise SystemExit("dyn-relay is not installed beside this Python: run this with the project's own")
        urls = [part for url in _urls(workers) for part in ("--worker-urls", url)]
        return [program, "serve", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning", *urls, *flags]

    return command


def _router(requirement: str, module: str, *flags: str) -> Callable[[int, list[int]], list[str]]:
    """The two routers of one descent, which have the same flags."""

    def command(port: int, workers: list[int]) -> list[str]:
        command = [python_with(requirement), "-m", module, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "round_robin", "--log-level", "warn", "--worker-startup-check-interval", "1"]
        # Their metrics port cannot be turned off; `free_ports` keeps the odd one free.
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 1)]
        return [*command, *flags, "--worker-urls", *_urls(workers)]

    return command


_NGINX_CONF = """\
worker_processes 1;
daemon off;
master_process off;
pid nginx.pid;
error_log stderr warn;
events {{ worker_connections 9000; }}
http {{
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  client_body_buffer_size 1m; client_max_body_size 64m;
  keepalive_requests 1000000; keepalive_timeout 600s;
  upstream workers {{ {servers} keepalive 4096; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 1800s; proxy_send_timeout 1800s;
    }}
  }}
}}
"""


def _nginx(port: int, workers: list[int]) -> list[str]:
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    if program is None:
        raise FileNotFoundError("there is no nginx on this machine")
    folder = Path(tempfile.mkdtemp(prefix="dyn-relay-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)  # its worker process may have another user
    servers = " ".join(f"server 127.0.0.1:{worker};" for worker in workers)
    (folder / "nginx.conf").write_text(_NGINX_CONF.format(port=port, servers=servers))
    return [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]


def _bare_relay(port: int, workers: list[int]) -> list[str]:
    return [str(BIN / "relay"), "--port", str(port), "--up", str(workers[0])]


def _bare_pump(port: int, workers: list[int]) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("bare_pump.py")), str(port), str(workers[0])]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("dyn-relay", "this project, as it is by default", dyn_relay()),
        Peer("dyn-relay-off", "this project with `--migration-limit 0`", dyn_relay("--migration-limit", "0")),
        Peer("dyn-relay-coalesce", "this project with `--coalesce-ms 5`", dyn_relay("--coalesce-ms", "5")),
        Peer("dyn-relay-2", "this project with `--processes 2`", dyn_relay("--processes", "2")),
        Peer(
            BASELINE,
            f"{ROUTER_REQUIREMENT} from PyPI, round robin",
            _router(ROUTER_REQUIREMENT, "sglang_router.launch_router"),
        ),
        Peer(
            "smg",
            f"{SMG_REQUIREMENT} from PyPI, round robin",
            _router(SMG_REQUIREMENT, "smg.launch_router", "--disable-tokenizer-autoload"),
            required=False,
        ),
        Peer("nginx", "one worker process, no buffering, connections kept", _nginx, required=False),
        Peer("bare-pump", "a TCP relay on trio that reads nothing: the floor for this project's pump", _bare_pump),
        Peer("relay", "a TCP relay in Rust that reads nothing: the floor", _bare_relay),
    )
}
