"""G7: 80 MB of base64 in the last event: what the proxy's memory grows by is less than three times that."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.process.kit import RELAY, get, started

#: Bytes of base64: four rows, of the last of three prompt tokens and two of the answer.
SIZE = 80 * 1024 * 1024
VALUE = b"QUJD" * (SIZE // 4)
COPIES = 3
INFOS = {
    "/health": {},
    "/model_info": {"tokenizer_path": "m", "weight_version": "1", "preferred_sampling_params": None},
    "/server_info": {"version": "0.5.23", "skip_tokenizer_init": True, "enable_return_routed_experts": True},
}
BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}, "return_routed_experts": True}


def event(sent: dict, tokens: int, finish: object) -> bytes:
    meta = {"id": sent["rid"], "finish_reason": finish, "prompt_tokens": len(sent["input_ids"]), "weight_version": "1"}
    meta["completion_tokens"] = tokens
    value = {"output_ids": [7, 8][:tokens], "meta_info": meta}
    if finish is None:
        return b"data: " + json.dumps(value).encode() + b"\n\n"
    meta["routed_experts"] = "@"
    head, tail = json.dumps(value).encode().split(b"@")
    return b"data: " + head + VALUE + tail + b"\n\ndata: [DONE]\n\n"


class Engine:
    """A server that says what it is told to: its first request is cut after a token if `dies`."""

    def __init__(self, *, dies: bool) -> None:
        self.dies = dies

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data:
                data += await stream.receive_some() or b"\r\n\r\n"
            head, _, body = data.partition(b"\r\n\r\n")
            path = head.split(b" ")[1].decode() if head else ""
            if path in INFOS:
                info = json.dumps(INFOS[path]).encode()
                await stream.send_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(info))
                await stream.send_all(info)
            elif path == "/generate":
                await self._generate(stream, head, body)

    async def _generate(self, stream: trio.SocketStream, head: bytes, body: bytes) -> None:
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(body) < length:
            body += await stream.receive_some()
        sent = json.loads(body)
        dies, self.dies = self.dies, False
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        left = sent["sampling_params"]["max_new_tokens"]
        if left > 1:
            await stream.send_all(event(sent, 1, None))
        if not dies:
            await stream.send_all(event(sent, left, {"type": "length", "length": left}))


def memory(pid: int, what: str) -> int:
    """Bytes: `VmRSS` now, `VmHWM` at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(what))


async def drained(port: int, body: dict) -> tuple[int, bytes]:
    """How long the answer was, and its end; the client keeps none of it."""
    data = json.dumps(body).encode()
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n"
    await stream.send_all(head.encode() + b"content-type: application/json\r\n\r\n" + data)
    size, end = 0, b""
    async with stream:
        async for part in stream:
            size += len(part)
            end = (end + part)[-400:]
    return size, end


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("dies", [False, True], ids=["whole", "after a cut"])
@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
async def test_rows_of_80_mb(stream, dies):
    engine = Engine(dies=False)
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, engine.serve, 0, host="127.0.0.1"))
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        async with started(RELAY, "serve", "--port", 0, "--worker-urls", url) as relay:
            await get(relay, "/workers")
            before = memory(relay.process.pid, "VmRSS")
            engine.dies = dies
            size, end = await drained(relay.port, {**BODY, "stream": stream})
            assert size > SIZE
            assert end.rstrip().endswith((b"[DONE]\n\n\r\n0", b"}"))
            grown = memory(relay.process.pid, "VmHWM") - before
            print(f"grown by {grown / SIZE:.2f} times the value")
            assert grown < COPIES * SIZE
        nursery.cancel_scope.cancel()
