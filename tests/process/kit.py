"""Real processes on loopback, and a client that reads a stream event by event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from dyn_testkit.client import Response
from dyn_testkit.laws.answers import read_answer

BIN = Path(sys.executable).parent
RELAY = [sys.executable, "-m", "dyn_relay"]
WORKER = [str(BIN / "dyn-mock-worker")]
#: Without the options that the person who runs the tests has set.
ENV = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}


class Child:
    """A process that says where it listens."""

    def __init__(self, process: trio.Process, url: str) -> None:
        self.process = process
        self.url = url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@asynccontextmanager
async def started(command: list[str], *args: object, stderr: int = subprocess.DEVNULL) -> AsyncIterator[Child]:
    """A process, once it has printed where it listens; killed at the end of the block."""
    argv = [*command, *map(str, args)]
    process = await trio.lowlevel.open_process(argv, stdout=subprocess.PIPE, stderr=stderr, env=ENV)
    try:
        assert process.stdout is not None
        said = b""
        while b"\n" not in said:
            data = await process.stdout.receive_some()
            assert data, f"{argv} ended before it listened"
            said += data
        assert said.startswith(b"listening on "), said
        yield Child(process, said.split(b"\n")[0].decode().removeprefix("listening on "))
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
        if process.stdout is not None:
            await process.stdout.aclose()


class Call:
    """One request on a connection of its own; `read` and `rest` take of its answer what they need."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._wire = b""

    @classmethod
    async def post(cls, child: Child, body: dict[str, Any], path: str = "/generate", method: str = "POST") -> Call:
        data = json.dumps(body).encode()
        call = cls(await trio.open_tcp_stream("127.0.0.1", child.port))
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n"
        await call._stream.send_all(head.encode() + b"content-type: application/json\r\n\r\n" + data)
        return call

    async def read(self, events: int) -> None:
        """Return once the answer has this many events."""
        while self._wire.count(b"data: ") < events:
            data = await self._stream.receive_some()
            assert data, f"the answer ended: {self._wire!r}"
            self._wire += data

    async def rest(self) -> Response:
        """The answer, once the connection has ended."""
        try:
            async for data in self._stream:
                self._wire += data
        except trio.BrokenResourceError:
            pass
        await self._stream.aclose()
        return read_answer(self._wire)


async def get(child: Child, path: str) -> Any:
    """The JSON of a GET."""
    stream = await trio.open_tcp_stream("127.0.0.1", child.port)
    await stream.send_all(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    wire = b"".join([data async for data in stream])
    await stream.aclose()
    return read_answer(wire).json()


async def post(child: Child, path: str, body: dict[str, Any]) -> None:
    """A POST that is answered with 200."""
    assert (await (await Call.post(child, body, path)).rest()).status == 200


async def refused(child: Child) -> None:
    """Return once nobody listens there any more."""
    while True:
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", child.port)
        except OSError:
            return
        await stream.aclose()
