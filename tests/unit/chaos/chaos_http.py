"""A loopback HTTP server that says exactly the given bytes, then closes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import trio

#: From the path of a request to the bytes of the answer; a callable is asked each time.
Script = Mapping[str, bytes | Callable[[], bytes]]


def chunked(*parts: bytes, complete: bool = True, content_type: str = "text/event-stream; charset=utf-8") -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return head + body + (b"0\r\n\r\n" if complete else b"")


def plain(body: bytes, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    length = len(body)
    return f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n".encode() + body


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    """Serve until left; gives the base URL."""

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data:
                more = await stream.receive_some()
                if not more:
                    return
                data += more
            path = data.split(b" ", 2)[1].decode()
            said = script[path]
            await stream.send_all(said() if callable(said) else said)
            await stream.send_eof()
            while await stream.receive_some():
                pass

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer, [listener])
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()
