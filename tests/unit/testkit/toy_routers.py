"""Routers in forty lines: one that is honest but continues nothing, and its relatives with one mistake each."""

from __future__ import annotations

import itertools
import json
from contextlib import asynccontextmanager
from http import HTTPStatus

import trio

from dyn_relay.net import ConnectFailed, ConnectionBroken
from dyn_testkit.client import begin
from dyn_testkit.worker.wire import LAST_CHUNK, chunk, read_request

HOST, PORT = "router", 30000
_BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Honest:
    """Round robin. A worker's answer is handed on as it comes; one that breaks off breaks off for the client too."""

    def __init__(self, network, workers):
        self.url = f"http://{HOST}:{PORT}"
        self._network = network
        self._workers = itertools.cycle(workers)

    @classmethod
    @asynccontextmanager
    async def serve(cls, network, workers):
        router = cls(network, workers)
        listener = await network.listen(HOST, PORT)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router._accept, listener, nursery)
            yield router
            nursery.cancel_scope.cancel()
        listener.close()

    async def _accept(self, listener, nursery):
        while True:
            nursery.start_soon(self._client, await listener.accept())

    async def _client(self, client):
        try:
            body = await self.body(client)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.watch, client, nursery.cancel_scope)
                await self.answer(client, body)
                nursery.cancel_scope.cancel()
        except* ConnectionBroken:
            pass
        finally:
            client.close()

    async def body(self, client):
        return (await read_request(client, b""))[0].body

    async def watch(self, client, scope):
        """Nobody generates for a client that has left."""
        await client.wait_closed()
        scope.cancel()

    async def answer(self, client, body):
        response = await self.attempt(client, body, begun=False)
        await self.end(client, response)

    async def attempt(self, client, body, *, begun):
        """One worker's answer, as far as it comes; its head only if the client has none yet."""
        host, _, port = next(self._workers).removeprefix("http://").partition(":")
        try:
            worker = await self._network.connect(host, int(port))
        except ConnectFailed:
            return None
        try:
            ongoing = await begin(worker, "/generate", body)
            while await ongoing.more():
                if not begun:
                    await client.send(self.head(ongoing.response))
                    begun = True
                await client.send(self.frame(self.shown(ongoing.response.parts[-1])))
        finally:
            worker.close()
        ongoing.response.body = b"".join(ongoing.response.parts)
        return ongoing.response

    def head(self, response):
        status, kind = HTTPStatus(response.status), response.header("content-type")
        return (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {kind}\r\n"
            "transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        ).encode()

    def frame(self, data):
        return chunk(data) if data else b""

    def shown(self, data):
        return data

    async def end(self, client, response):
        if response is None or not response.parts:
            await client.send(_BAD_GATEWAY)
        elif response.complete:
            await client.send(LAST_CHUNK)


class Splices(Honest):
    """Begins a cut answer again from its first token, behind what the client has."""

    async def answer(self, client, body):
        response, begun = await self.attempt(client, body, begun=False), False
        for _ in range(3):
            if response is not None and response.complete:
                break
            begun = begun or (response is not None and bool(response.parts))
            response = await self.attempt(client, body, begun=begun)
        await self.end(client, response)


class EndsCleanly(Honest):
    """Frames a cut answer as if that had been all."""

    async def end(self, client, response):
        await client.send(LAST_CHUNK if response is not None and response.parts else _BAD_GATEWAY)


class DropsTheLastToken(Honest):
    """Loses the tokens of the event with the finish."""

    def shown(self, data):
        first, separator, rest = data.partition(b"\n\n")
        if not _whole(first) or not separator or b'"finish_reason":null' in first:
            return data
        value = json.loads(first[6:])
        value["output_ids"] = []
        return b"data: " + json.dumps(value, separators=(",", ":")).encode() + separator + rest


class RetriesRefusals(Honest):
    """Takes a request that a worker refuses to the next one."""

    async def answer(self, client, body):
        for _ in range(3):
            response = await self.attempt(_Nobody(), body, begun=False)
            if response is None or response.status < 400:
                break
        await super().answer(client, body)


class _Nobody:
    """Takes whatever is sent."""

    async def send(self, data):
        await trio.lowlevel.checkpoint()


class AsksForAllAgain(Honest):
    """Continues a cut stream where it was cut, but with the whole budget."""

    async def answer(self, client, body):
        response, request, begun = await self.attempt(client, body, begun=False), json.loads(body), False
        for _ in range(3):
            if (response is not None and response.complete) or not request.get("stream"):
                break
            shown = [json.loads(line[6:]) for line in (response.body if response else b"").split(b"\n") if _whole(line)]
            begun = begun or (response is not None and bool(response.parts))
            tokens = [token for value in shown for token in value.get("output_ids", [])]
            request["input_ids"] = [*(request.get("input_ids") or []), *tokens]
            self.reduce(request, len(tokens))
            response = await self.attempt(client, json.dumps(request).encode(), begun=begun)
        await self.end(client, response)

    def reduce(self, request, delivered):
        pass


def _whole(line):
    return line.startswith(b"data: {") and line.endswith(b"}")


class ContinuesEverything(AsksForAllAgain):
    """Continues whatever was cut, rightly; but looks at nothing that forbids it."""

    def reduce(self, request, delivered):
        request["sampling_params"]["max_new_tokens"] -= delivered


class TakesReadsForEvents(Honest):
    """Drops what a read of a stream leaves unfinished."""

    def shown(self, data):
        return data if data.endswith(b"\n\n") or not data.startswith(b"data: ") else b""


class ReadsOnce(Honest):
    """Takes what the first read gives for the whole request."""

    async def body(self, client):
        return (await client.receive()).partition(b"\r\n\r\n")[2]


class Confuses(Honest):
    """Keeps the request in one place for all."""

    async def answer(self, client, body):
        self._body = body
        await trio.sleep(0.001)
        await super().answer(client, self._body)


class Buffers(Honest):
    """Shows a stream when it has all of it."""

    async def attempt(self, client, body, *, begun):
        late = _Later(client)
        response = await super().attempt(late, body, begun=begun)
        await client.send(late.sent)
        return response


class _Later:
    """Keeps whatever is sent."""

    def __init__(self, client):
        self.sent = b""

    async def send(self, data):
        self.sent += data


class Stays(Honest):
    """Does not look whether its client is still there."""

    async def watch(self, client, scope):
        await trio.sleep_forever()


class Undecided(Honest):
    """Answers, or does not, as two tasks happen to come in."""

    async def answer(self, client, body):
        if await first_of_two() == "one":
            await super().answer(client, body)


async def first_of_two():
    """Which of two tasks trio runs first."""
    came = []

    async def come(name):
        came.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come, "one")
        nursery.start_soon(come, "two")
    return came[0]


class Hangs(Honest):
    """Waits for a worker that has gone to come back."""

    async def end(self, client, response):
        if response is None or not response.complete:
            await trio.sleep_forever()
        await super().end(client, response)


class Undelimited(Honest):
    """Ends an answer with its connection: whoever cuts that ends it, too."""

    def head(self, response):
        return super().head(response).replace(b"transfer-encoding: chunked\r\n", b"")

    def frame(self, data):
        return data

    async def end(self, client, response):
        if response is None or not response.parts:
            await client.send(_BAD_GATEWAY)
        elif not response.complete:
            client.abort()
