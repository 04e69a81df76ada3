"""Real ZeroMQ sockets on trio."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio
import trio.testing
import zmq

from dyn_relay.fleet.kv.sockets import Socket, dealing, open_context, subscribed


@contextmanager
def publishing(address: str = "tcp://127.0.0.1:*") -> Iterator[zmq.Socket[bytes]]:
    """One that tells when somebody has subscribed; nobody listens at its address any more when it has ended."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.linger = 0
        socket.sndhwm = 0
        socket.bind(address)
        yield socket


@asynccontextmanager
async def reading(address: str, topic: bytes) -> AsyncIterator[trio.MemoryReceiveChannel[list[bytes]]]:
    """What a subscription brings; it is always being read, since it needs that to subscribe again."""
    into, out = trio.open_memory_channel[list[bytes]](math.inf)

    async def read() -> None:
        with open_context() as context, subscribed(context, address, topic) as live:
            while True:
                into.send_nowait(await live.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        yield out
        nursery.cancel_scope.cancel()


async def test_messages_come_in_order_and_a_new_connection_is_told():
    """An empty message comes before the first one of each connection."""
    with trio.fail_after(30), publishing() as first:
        address = first.get_string(zmq.LAST_ENDPOINT)
        async with reading(address, b"topic") as live:
            assert await Socket(first).receive() == [b"\1topic"]
            for number in range(1000):
                first.send_multipart([b"topic", b"%d" % number])
            first.send_multipart([b"other", b""])
            want = [[], *([b"topic", b"%d" % number] for number in range(1000))]
            assert [await live.receive() for _ in range(1001)] == want
            first.close()
            first.context.destroy()
            with publishing(address) as second:
                assert await Socket(second).receive() == [b"\1topic"]
                second.send_multipart([b"topic", b"new"])
                assert [await live.receive(), await live.receive()] == [[], [b"topic", b"new"]]


async def test_a_message_that_comes_while_one_waits():
    with trio.fail_after(30), publishing() as publisher:
        async with reading(publisher.get_string(zmq.LAST_ENDPOINT), b"") as live:
            await Socket(publisher).receive()
            publisher.send(b"0")
            assert [await live.receive(), await live.receive()] == [[], [b"0"]]
            for number in range(1, 20):
                await trio.testing.wait_all_tasks_blocked(0.001)
                publisher.send(b"%d" % number)
                assert await live.receive() == [b"%d" % number]


async def test_a_question_is_answered():
    with open_context() as context, context.socket(zmq.ROUTER) as answering, trio.fail_after(30):
        answering.bind("tcp://127.0.0.1:*")
        with dealing(context, answering.get_string(zmq.LAST_ENDPOINT)) as wire:
            wire.send([b"", b"what"])
            asker, _, question = await Socket(answering).receive()
            answering.send_multipart([asker, b"", question + b"?"])
            assert await wire.receive() == [b"", b"what?"]
