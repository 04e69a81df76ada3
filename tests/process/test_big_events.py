"""G7: 80 MB of base64 in the last event: what the proxy's memory grows by is less than three times that."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.process.kit import RELAY, get, started

#: Bytes of base64: the rows of a model of 60 layers that choose 8 experts each, one a position of prompt and answer.
SIZE = 80 * 1024 * 1024
ROW = 60 * 8 * 4 // 3 * 4
ROWS = SIZE // ROW
COPIES = 3
INFOS = {
    "/health": {},
    "/model_info": {"tokenizer_path": "m", "weight_version": "1", "preferred_sampling_params": None},
    "/server_info": {"version": "0.5.23", "skip_tokenizer_init": True, "enable_return_routed_experts": True},
}


def body(answer: int) -> dict:
    """A request for so many tokens, whose rows have that size: the last position has none."""
    prompt = [7] * (ROWS + 1 - answer)
    sampling = {"max_new_tokens": answer, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "return_routed_experts": True}


def event(sent: dict, tokens: int, finish: object) -> bytes:
    meta = {"id": sent["rid"], "finish_reason": finish, "prompt_tokens": len(sent["input_ids"]), "weight_version": "1"}
    meta["completion_tokens"] = tokens
    value = {"output_ids": [7] * tokens, "meta_info": meta}
    if finish is None:
        return b"data: " + json.dumps(value).encode() + b"\n\n"
    meta["routed_experts"] = "@"
    head, tail = json.dumps(value).encode().split(b"@")
    rows = b"QUJD" * ((len(sent["input_ids"]) + tokens - 1) * ROW // 4)
    return b"data: " + head + rows + tail + b"\n\ndata: [DONE]\n\n"


class Engine:
    """A server that says what it is told to: its first request is cut after a token if `dies`.

    In the role `prefill` it makes one token of each answer.
    """

    def __init__(self, role: str = "null", *, dies: bool = False) -> None:
        self.role = role
        self.dies = dies

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data:
                data += await stream.receive_some() or b"\r\n\r\n"
            head, _, body = data.partition(b"\r\n\r\n")
            path = head.split(b" ")[1].decode() if head else ""
            if path in INFOS:
                info = json.dumps({**INFOS[path], "disaggregation_mode": self.role}).encode()
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
        if self.role == "prefill":
            await stream.send_all(event(sent, 1, {"type": "length", "length": 0}))
            return
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


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
both = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


@asynccontextmanager
async def served(*engines):
    """Their URLs."""
    async with trio.open_nursery() as nursery:
        urls = []
        for engine in engines:
            [listener] = await nursery.start(partial(trio.serve_tcp, engine.serve, 0, host="127.0.0.1"))
            urls.append(f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
        yield urls
        nursery.cancel_scope.cancel()


async def grown(relay, sent: dict) -> float:
    """What a request whose answer has all rows makes the proxy grow by at most, in values."""
    before = memory(relay.process.pid, "VmRSS")
    size, end = await drained(relay.port, sent)
    assert size > SIZE
    assert end.rstrip().endswith((b"[DONE]\n\n\r\n0", b"}"))
    found = (memory(relay.process.pid, "VmHWM") - before) / SIZE
    print(f"grown by {found:.2f} times the value")
    return found


@needs_proc
@pytest.mark.parametrize("dies", [False, True], ids=["whole", "after a cut"])
@both
async def test_rows_of_80_mb(stream, dies):
    engine = Engine()
    async with served(engine) as [url], started(RELAY, "serve", "--port", 0, "--worker-urls", url) as relay:
        await get(relay, "/workers")
        engine.dies = dies
        assert await grown(relay, {**body(2), "stream": stream}) < COPIES


@needs_proc
@pytest.mark.parametrize("answer", [2, ROWS // 2], ids=["long prompt", "long answer"])
@both
async def test_rows_of_80_mb_that_two_workers_made(stream, answer):
    """Beyond the two answers that are joined."""
    async with served(Engine("prefill"), Engine("decode")) as [prefill, decode]:
        pair = ("--pd-disaggregation", "--prefill", prefill, "--decode", decode)
        async with started(RELAY, "serve", "--port", 0, *pair) as relay:
            await get(relay, "/workers")
            inputs = 1 + (ROWS + 1 - answer) / ROWS
            assert await grown(relay, {**body(answer), "stream": stream}) < COPIES + inputs
