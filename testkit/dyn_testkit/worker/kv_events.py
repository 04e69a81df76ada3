"""Publishing what is in the prefix caches: numbered batches over ZeroMQ, a replay of the newest, and what can go wrong.

Frames and the protocol of the replay are those of SGLang 0.5.23, `disaggregation/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import trio
import zmq

from dyn_testkit.worker.kv_cache import KvOptions
from dyn_testkit.worker.kv_log import KvLog

_END = 2**64 - 1
#: Pairs of base ports that are tried until each rank has its two.
_TRIES = 50
#: Seconds after which a publisher looks for questions at the latest, as the engine does.
_LOOK = 0.1


class KvPublisher:
    """The publishers of all ranks of a worker. Their ports stay the same over its lives."""

    def __init__(self, host: str, ranks: int, options: KvOptions) -> None:
        self.options = options
        #: (of the batches, of the replays) of rank 0; (0, 0) until it has run.
        self.ports = (options.port, options.port + ranks if options.port else 0)
        self._host = host
        self._ranks = ranks

    def descriptor(self) -> dict[str, Any]:
        """What `/server_info` says."""
        told: dict[str, Any] = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self.ports[0],
            "topic": self.options.topic,
            "block_size": self.options.page_size,
            "dp_size": self._ranks,
        }
        return told | ({"replay_endpoint_port_base": self.ports[1]} if self.options.replay else {})

    @contextmanager
    def open(self) -> Iterator[list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]]:
        """Listen: for each rank the socket of its batches and that of its replays. Raises `OSError`."""
        with zmq.Context() as context:
            for tries_left in reversed(range(_TRIES)):
                with ExitStack() as stack:
                    try:
                        pairs = self._bind(context, stack)
                    except zmq.ZMQError as exc:
                        if tries_left and not self.ports[0]:
                            continue
                        raise OSError(exc.errno, f"KV events cannot listen: {exc}") from exc
                    self.ports = _port(pairs[0][0]), _port(pairs[0][1])
                    yield pairs
                    return

    def _bind(
        self, context: zmq.Context[zmq.Socket[bytes]], stack: ExitStack
    ) -> list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
        made: list[list[zmq.Socket[bytes]]] = []
        for kind, base in zip((zmq.PUB, zmq.ROUTER), self.ports, strict=True):
            made.append([])
            for rank in range(self._ranks):
                socket = stack.enter_context(context.socket(kind))
                socket.linger = 0
                socket.sndhwm = 0
                first = base or (_port(made[-1][0]) if rank else 0)
                socket.bind(f"tcp://{self._host}:{first + rank if first else '*'}")
                made[-1].append(socket)
        return list(zip(*made, strict=True))

    async def run(
        self,
        logs: list[KvLog],
        pairs: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]],
    ) -> None:
        """Publish what these logs get, and answer replays, until cancelled."""
        async with trio.open_nursery() as nursery:
            for log, (batches, replays) in zip(logs, pairs, strict=True):
                log.listeners.append(_sender(batches, log.options.topic.encode()))
                if self.options.replay:
                    nursery.start_soon(_answer, log, replays)


def _sender(socket: zmq.Socket[bytes], topic: bytes) -> Callable[[int, bytes], None]:
    def send(number: int, payload: bytes) -> None:
        if not socket.closed:
            socket.send_multipart([topic, number.to_bytes(8), payload], zmq.NOBLOCK)

    return send


def _port(socket: zmq.Socket[bytes]) -> int:
    return int(socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


async def _answer(log: KvLog, socket: zmq.Socket[bytes]) -> None:
    async with trio.open_nursery() as nursery:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                with trio.move_on_after(_LOOK):  # answers that are sent meanwhile may take the descriptor's signal
                    await trio.lowlevel.wait_readable(socket.FD)
                continue
            if len(frames) == 3 and len(frames[2]) == 8:  # anything else is ignored without a word
                since = int.from_bytes(frames[2])
                batches = [batch for batch in log.kept if batch[0] >= since]
                nursery.start_soon(_replay, log, socket, frames[0], batches)


async def _replay(log: KvLog, socket: zmq.Socket[bytes], asker: bytes, batches: list[tuple[int, bytes]]) -> None:
    if log.faults.late is not None:
        await log.faults.late.wait()
    topic = log.options.topic.encode()
    for number, payload in batches:
        socket.send_multipart([asker, b"", topic, number.to_bytes(8), payload])
    socket.send_multipart([asker, b"", b"", _END.to_bytes(8), b""])
