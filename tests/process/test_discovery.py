"""`dyn-relay serve --service-discovery` as a process, before a server that plays the Kubernetes API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from tests.process.kit import ENV, RELAY, WORKER, Call, Child, get, started
from tests.wire.api_server import api_server, kubeconfig, pod, pods

HERE = "127.0.0.1"


async def listed(relay: Child, as_wanted: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Return once the workers of the proxy are as wanted."""
    while not as_wanted((await get(relay, "/workers"))["workers"]):
        continue  # each turn waits for an answer


async def test_a_pod_becomes_a_worker_and_leaves_again(monkeypatch, tmp_path):
    async with api_server() as server, started(WORKER, "--port", 0) as worker:
        monkeypatch.setitem(ENV, "KUBECONFIG", str(kubeconfig(tmp_path / "config", server.url)))
        flags = ["--service-discovery", "--selector", "app=sglang", "--service-discovery-port", worker.port]
        async with trio.open_nursery() as asked:
            asked.start_soon(server.answer, pods(pod("a", HERE), version=10))  # who is there: then it listens
            async with started(RELAY, "serve", "--port", 0, *flags) as relay:
                _, watch = await server.watch()
                await listed(relay, lambda workers: [each["state"] for each in workers] == ["ready"])
                body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 3}}
                assert (await (await Call.post(relay, body)).rest()).status == 200
                await watch.send(("MODIFIED", pod("a", HERE, 11, ending=True)))
                await listed(relay, lambda workers: workers == [])
