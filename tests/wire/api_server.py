"""A Kubernetes API server that plays answers in the shape of the real one, over real sockets.

Shapes: `GET /api/v1/[namespaces/NS/]pods` gives a PodList; with `watch=true` one JSON object a line, of the types
ADDED, MODIFIED, DELETED, BOOKMARK and ERROR. Errors are objects of the kind Status (Kubernetes API concepts).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import trio

#: What a configuration has of its user.
TOKEN = "{token: secret}"
JSON = "content-type: application/json\r\n"


@dataclass
class Asked:
    """A request."""

    path: str
    query: dict[str, str]
    headers: dict[str, str]


class Watch:
    """The stream of a watch, while it is open."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.over = trio.Event()

    async def send(self, *events: tuple[str, Any]) -> None:
        await self.send_bytes(b"".join(line(*event) for event in events))

    async def send_bytes(self, data: bytes) -> None:
        await self._stream.send_all(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        """As when `timeoutSeconds` are over."""
        await self._stream.send_all(b"0\r\n\r\n")
        self.over.set()

    def cut(self) -> None:
        """As when the server, or what is before it, dies."""
        self.over.set()


class ApiServer:
    """The test waits for each request and answers it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._send, self._requests = trio.open_memory_channel[tuple[Asked, trio.SocketStream, trio.Event]](100)

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection, one request."""
        head = b""
        while b"\r\n\r\n" not in head:
            data = await stream.receive_some()
            if not data:
                return
            head += data
        first, *rest = head.decode().split("\r\n")
        target = urlsplit(first.split(" ")[1])
        headers = {name.lower(): value for name, _, value in (row.partition(": ") for row in rest) if name}
        answered = trio.Event()
        self._send.send_nowait((Asked(target.path, dict(parse_qsl(target.query)), headers), stream, answered))
        await answered.wait()
        await stream.aclose()

    async def answer(self, body: Any, status: int = 200) -> Asked:
        """Wait for a request and answer it."""
        asked, stream, answered = await self._requests.receive()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\n{JSON}connection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        await stream.send_all(head.encode() + data)
        answered.set()
        return asked

    async def watch(self) -> tuple[Asked, Watch]:
        """Wait for a watch and open it."""
        asked, stream, answered = await self._requests.receive()
        assert asked.query.get("watch") == "true", asked
        await stream.send_all(f"HTTP/1.1 200 OK\r\n{JSON}transfer-encoding: chunked\r\n\r\n".encode())
        watch = Watch(stream)
        watch.over = answered
        return asked, watch


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        server = ApiServer(f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
        nursery.start_soon(trio.serve_listeners, server.serve, [listener])
        yield server
        nursery.cancel_scope.cancel()


def kubeconfig(path: Path, server: str, user: str = TOKEN) -> Path:
    """A configuration of kubectl's for this server."""
    path.write_text(
        f"""apiVersion: v1
kind: Config
current-context: test
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]
clusters: [{{name: test, cluster: {{server: "{server}"}}}}]
users: [{{name: test, user: {user}}}]
"""
    )
    return path


def pod(
    name: str, address: str = "", version: int = 1, *, ready: bool = True, phase: str = "Running", ending: bool = False
) -> dict[str, Any]:
    """A pod, with the fields about it that a real one has most of."""
    condition = {"lastProbeTime": None, "lastTransitionTime": "2026-11-30T08:00:00Z"}
    metadata = {
        "name": name,
        "generateName": "engine-",
        "namespace": "prod",
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "creationTimestamp": "2026-11-30T07:00:00Z",
        "labels": {"app": "sglang"},
        # Text of any kind: some libraries take the second character for the end of a line.
        "annotations": {"note": "rack\u0085 3\u2028", "state": '{"conditions": "none"}'},
        "managedFields": [{"manager": "kubelet", "operation": "Update", "fieldsV1": {"f:status": {}}}],
    }
    if ending:
        metadata |= {"deletionTimestamp": "2026-11-30T09:00:00Z", "deletionGracePeriodSeconds": 30}
    status: dict[str, Any] = {
        "phase": phase,
        "conditions": [
            {"type": "PodScheduled", "status": "True", **condition},
            {"type": "Ready", "status": "True" if ready else "False", **condition},
        ],
        "qosClass": "Burstable",
    }
    if address:
        status |= {"podIP": address, "podIPs": [{"ip": address}], "hostIP": "192.0.2.1"}
    return {"metadata": metadata, "spec": {"containers": [{"name": "engine", "image": "sglang"}]}, "status": status}


def pods(*items: dict[str, Any], version: int = 1, more: str = "") -> dict[str, Any]:
    """A page of a list."""
    metadata = {"resourceVersion": str(version)} | ({"continue": more} if more else {})
    return {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": list(items)}


def bookmark(version: int) -> tuple[str, dict[str, Any]]:
    """Nothing has happened up to this version."""
    metadata = {"resourceVersion": str(version), "creationTimestamp": None}
    return "BOOKMARK", {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": metadata,
        "spec": {"containers": None},
        "status": {},
    }


def status(code: int, message: str) -> dict[str, Any]:
    """The API's own error."""
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "code": code}


def line(type: str, object: dict[str, Any]) -> bytes:
    """An event of a watch; characters outside ASCII as Go writes them."""
    return json.dumps({"type": type, "object": object}, ensure_ascii=False).encode() + b"\n"
