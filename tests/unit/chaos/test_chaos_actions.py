"""What actions do to real processes, and how that is seen."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import trio

from dyn_chaos import audit, processes
from dyn_chaos.actions import Drain, Drop, Kill, Scene, Stall, base, leader, members, port_owner, strike
from dyn_chaos.fleet import Attached, Started
from dyn_chaos.namespaces import Unable, namespaces
from dyn_chaos.processes import LISTENING, NotReady

SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print(f"listening on http://{sys.argv[1]}:{sys.argv[2]}", flush=True)
while True:
    connection, _ = server.accept()
    connection.recv(9999)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\nconnection: close\\r\\n\\r\\n")
    connection.close()
"""
#: The server is a child of the leader, as an engine is beside its sidecar's launcher.
FAMILY = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {SERVE!r}, *sys.argv[1:]])
import signal
signal.pause()
"""


def engine(nursery: trio.Nursery, logs: Path, code: str = SERVE, asked: bool = False) -> Started:
    def command(host: str, port: int) -> list[str]:
        return [sys.executable, "-c", code, host, str(port)]

    return Started("worker", command, nursery, logs, None if asked else LISTENING)


def everywhere(started: Started) -> httpx.AsyncClient:
    workers = {"workers": [{"url": started.url, "load": 1, "state": "ready"}]}
    return httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, json=workers)))


async def test_a_killed_worker_is_gone_and_comes_back_on_its_port(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        worker = engine(nursery, tmp_path)
        await worker.start()
        url, pid = worker.url, worker.pid
        async with everywhere(worker) as http:
            scene, action = Scene("http://relay", http), Kill("kill", members)
            deed = await strike(action, scene, worker)
            assert deed.choice == {"signal": "SIGKILL", "pids": [pid]}
            assert f"process {pid} gone" in deed.proof
            assert await base.undo(action, scene, worker)
        assert (worker.url, worker.pid != pid) == (url, True)
        assert sorted(os.listdir(tmp_path)) == ["worker.2.log", "worker.log"]
        nursery.cancel_scope.cancel()


async def test_the_owner_of_the_port_is_killed_and_nobody_else(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        worker = engine(nursery, tmp_path, FAMILY)
        await worker.start()
        [owner] = port_owner(worker)
        assert owner != worker.pid
        assert members(worker) == sorted([owner, worker.pid])
        async with everywhere(worker) as http:
            deed = await strike(Kill("kill-sidecar", port_owner), Scene("http://relay", http), worker)
        assert deed.choice["pids"] == [owner]
        assert deed.proof
        assert processes.state(worker.pid) in ("R", "S", "D")
        nursery.cancel_scope.cancel()


async def test_a_signal_that_ends_nothing_is_no_kill(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        worker = engine(nursery, tmp_path)
        await worker.start()
        async with everywhere(worker) as http:
            scene = Scene("http://relay", http)
            action = Kill("kill", leader, signal.SIGWINCH)
            action.within = 0.0
            assert (await strike(action, scene, worker)).proof == ""
            patient = Kill("kill", leader, signal.SIGWINCH, grace=0.0)
            deed = await strike(patient, scene, worker)
        assert deed.choice["killed after"] == 0.0
        assert deed.proof
        nursery.cancel_scope.cancel()


async def test_a_stalled_worker_is_silent_until_it_goes_on(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        worker = engine(nursery, tmp_path, asked=True)
        await worker.start()
        async with everywhere(worker) as http:
            scene, action = Scene("http://relay", http), Stall()
            assert "stopped" in (await strike(action, scene, worker)).proof
            assert processes.state(worker.pid) == "T"
            assert await base.undo(action, scene, worker)
        assert await audit.health(worker.url) == "200"
        nursery.cancel_scope.cancel()


async def test_a_drain_that_the_proxy_ignores_is_not_seen() -> None:
    attached = Attached("http://127.0.0.1:1", 1)
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.method} {request.url.raw_path.decode()}")
        return httpx.Response(200, json={"workers": [{"url": attached.url, "load": 3, "state": "ready"}]})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        action = Drain()
        action.within = 0.0
        deed = await strike(action, Scene("http://relay", http), attached)
    assert deed.proof == ""
    assert deed.choice == {"live requests": 3}
    assert "DELETE /workers/http%3A%2F%2F127.0.0.1%3A1" in asked


async def test_an_engine_that_ends_instead_of_serving_is_not_ready(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(NotReady, match=r"ended before it was ready; see .*worker\.log"):
            await engine(nursery, tmp_path, "raise SystemExit('no model')", asked=True).start()
    assert (tmp_path / "worker.log").read_text() == "no model\n"


async def test_an_attached_engine_cannot_be_started_again() -> None:
    with pytest.raises(NotReady, match="was not started here"):
        await Attached("http://127.0.0.1:1", 1).restart()


def test_nobody_listens_on_a_port_that_is_free() -> None:
    with pytest.raises(LookupError):
        processes.listener(1, processes.free_port())


@pytest.mark.parametrize(("share", "kind"), [(1.0, "partition"), (0.5, "loss")])
async def test_packets_are_lost_in_a_namespace_and_come_again(tmp_path: Path, share: float, kind: str) -> None:
    async with AsyncExitStack() as stack:
        try:
            [home] = await stack.enter_async_context(namespaces(1))
        except Unable as missing:
            pytest.skip(str(missing))
        nursery = await stack.enter_async_context(trio.open_nursery())
        worker = engine(nursery, tmp_path)
        worker.namespace = home
        await worker.start()
        assert await audit.health(worker.url) == "200"
        async with everywhere(worker) as http:
            scene, action = Scene("http://relay", http), Drop(share)
            assert action.kind == kind
            if share == 1:
                assert "cannot be reached" in (await strike(action, scene, worker)).proof
            else:
                await action.invoke(scene, worker)
                assert await audit.wait_for(lambda: lost_by_asking(action, scene, worker), 5)
            assert await base.undo(action, scene, worker)
        nursery.cancel_scope.cancel()


async def lost_by_asking(action: Drop, scene: Scene, worker: Started) -> str:
    await audit.health(worker.url, within=0.05)
    return await action.seen(scene, worker)
