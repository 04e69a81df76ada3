"""Workers that say what they are told to."""

from __future__ import annotations

import trio


class Scripted:
    """A worker that answers `/health` and, to everything else, sends the given bytes and closes."""

    def __init__(self, answer: bytes, delay: float) -> None:
        self.answer = answer
        self.delay = delay
        self.heads: list[bytes] = []

    async def run(self, network, host, task_status=trio.TASK_STATUS_IGNORED):
        listener = await network.listen(host, 30000)
        task_status.started()
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(self._serve, await listener.accept())

    async def _serve(self, connection):
        head = b""
        while b"\r\n\r\n" not in head:
            data = await connection.receive()
            if not data:
                return
            head += data
        if head.startswith(b"GET /health"):
            await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        elif b"_info " in head:
            await connection.send(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            self.heads.append(head)
            await trio.sleep(self.delay)
            await connection.send(self.answer)
        connection.close()


async def scripted(w, answer: bytes, host: str = "odd", delay: float = 0.0) -> Scripted:
    """Let such a worker join, `delay` seconds slow."""
    worker = Scripted(answer, delay)
    await w.nursery.start(worker.run, w.network, host)
    w.app.fleet.add(f"http://{host}:30000")
    await w.ready()
    return worker
