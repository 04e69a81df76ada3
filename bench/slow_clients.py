"""Clients that stop reading: the memory of proxy and sidecar while engines would send them megabytes.

    .venv/bin/python bench/slow_clients.py [--clients 200] [--seconds 20] [--direct]

Prints the resident memory of both before, and every few seconds while nobody reads; then the clients leave. `--direct`:
without a sidecar, the proxy reaches the engine over gRPC itself.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
#: Tokens, each with logprobs, in a cumulative stream: what an engine sends grows with their square.
TOKENS = 4000


def start(name: str, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """A process that says where it listens."""
    child = subprocess.Popen([str(BIN / name), *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    return child, child.stdout.readline().split()[-1]


def shown(children: dict[str, subprocess.Popen[str]]) -> str:
    """The resident memory of each."""
    return ", ".join(f"{name} {resident(child):6.1f} MiB" for name, child in children.items())


def resident(child: subprocess.Popen[str]) -> float:
    """MiB."""
    pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def stalled(url: str, number: int) -> socket.socket:
    """A client that asks, takes little, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    body = json.dumps(
        {
            "input_ids": [5, 6, 7 + number],
            "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "stream": True,
        }
    )
    head = "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    return client


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--direct", action="store_true")
    asked = parser.parse_args()
    engine, url = start("dyn-mock-worker", "--grpc-port", "0")
    assert engine.stdout is not None
    workers = ["--worker-urls", engine.stdout.readline().split()[-1]] if asked.direct else []
    relay, front = start("dyn-relay", "serve", "--port", "0", "--log-level", "error", *workers)
    watched = {"relay": relay}
    if not asked.direct:
        watched["sidecar"], _ = start("dyn-sidecar", "--engine", url, "--relay", front, "--log-level", "error")
    try:
        time.sleep(2)
        print(f"before:   {shown(watched)}")
        clients = [stalled(front, number) for number in range(asked.clients)]
        for second in range(0, asked.seconds + 1, 5):
            print(f"{second:4} s:   {shown(watched)}", flush=True)
            time.sleep(5)
        for client in clients:
            client.close()
        time.sleep(5)
        print(f"after:    {shown(watched)}")
    finally:
        for child in (*watched.values(), engine):
            child.kill()
            child.wait()


if __name__ == "__main__":
    main()
