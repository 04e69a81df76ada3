"""The launch scripts, each with mock engines: it serves, exactly, and all of it ends with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import trio

from dyn_relay.net import ConnectFailed
from dyn_relay.sockets import open_network
from dyn_testkit.client import fetch
from tests.process.kit import BIN, ENV
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged

SCRIPTS = sorted(path for path in Path("examples/launch").glob("*_*.sh"))
KV = '--kv-events {"page_size":16,"port":{port}}'


def free_block() -> int:
    """The first of fifty ports that nobody uses."""
    for first in range(20000 + os.getpid() % 1000 * 10, 60000, 50):
        taken = []
        try:
            taken += (socket.create_server(("127.0.0.1", port)) for port in range(first, first + 50))
        except OSError:
            continue
        finally:
            for one in taken:
                one.close()
        return first
    raise AssertionError("no ports")


def test_all_topologies_have_a_script():
    names = {path.stem for path in SCRIPTS}
    assert names == {f"{topology}_{way}" for topology in ("aggregated", "kv", "pd") for way in ("direct", "sidecar")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
async def test_a_script_serves_and_ends(script):
    first = free_block()
    paired = script.stem.startswith("pd")
    env = ENV | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "ENGINE": "dyn-mock-worker",
        "KV_FLAGS": KV,
        "PORT": str(first + 49),
        "FIRST_PORT": str(first),
        "ENGINES": "1" if paired else "2",
        "RELAY_FLAGS": "--health-check-interval-secs 0.2 --health-success-threshold 1",
        "SIDECAR_FLAGS": "--health-check-interval-secs 0.2",
    }
    process = await trio.lowlevel.open_process(
        [str(script)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{first + 49}"
    try:
        async with open_network() as network:
            with trio.fail_after(60):
                await ready(network, url, 2)
                for number in range(3):
                    body = generate(8, rid=f"{number}" * 32)
                    assert judged(await fetch(network, url, "/generate", body), body, ORACLE) == []
                if not paired:
                    os.kill(_engine(process.pid, first), signal.SIGKILL)
                    body = generate(8, rid="d" * 32)
                    assert judged(await fetch(network, url, "/generate", body), body, ORACLE) == []
                    assert process.poll() is None, "an engine's death is the proxy's to bear"
        process.send_signal(signal.SIGTERM)
        with trio.fail_after(30):
            await process.wait()
        assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _group(pid) == process.pid]
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        with trio.CancelScope(shield=True):
            await process.wait()


async def ready(network, url: str, count: int) -> None:
    """Return once the proxy has so many workers, all of them ready."""
    while True:
        await trio.sleep(0.05)
        try:
            listed = (await fetch(network, url, "/workers")).json()["workers"]
        except ConnectFailed:  # it does not listen yet
            continue
        if len(listed) == count and all(one["state"] == "ready" for one in listed):
            return


def _engine(group: int, port: int) -> int:
    """The process of the engine with that HTTP port."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if _group(pid) == group:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if any(word.endswith("dyn-mock-worker") for word in words) and str(port) in words:
                return int(pid)
    raise AssertionError(f"no engine on {port}")


def _group(pid: str) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[2]) if fields[0] != "Z" else 0
