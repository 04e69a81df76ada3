"""A router that goes on elsewhere when a worker dies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import trio

from dyn_relay.net import ConnectFailed, Connection, Listener, Network
from dyn_testkit.client import begin
from dyn_testkit.worker.wire import LAST_CHUNK, chunk, read_request
from examples.toy_backend.worker import HEAD, MODEL, spell


class Router:
    """Takes the workers in turn; a cut request asks the next one for what is left."""

    def __init__(self, network: Network, workers: Sequence[tuple[str, int]]) -> None:
        self._network = network
        self._workers = workers

    async def serve(self, listener: Listener) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                nursery.start_soon(self._client, await listener.accept())

    async def _client(self, client: Connection) -> None:
        got = await read_request(client, b"")
        assert got is not None
        request = json.loads(got[0].body)
        mine = len(request["prompt"])
        await client.send(HEAD)
        end = None
        for address in self._workers:
            end = await self._attempt(client, address, request)
            end = end or self.known_end(request, request["prompt"][mine:])
            if end is not None:
                await client.send(chunk(spell({"end": end})) + LAST_CHUNK)
                break
        else:
            await client.send(chunk(spell({"error": "no worker is left"})))  # and no last chunk: it is not whole
        client.close()

    async def _attempt(self, client: Connection, address: tuple[str, int], request: dict[str, Any]) -> str | None:
        """Hand on the tokens of one worker; the end, if it came to one."""
        try:
            worker = await self._network.connect(*address)
        except ConnectFailed:
            return None
        ongoing, rest = await begin(worker, "/", request), b""
        while await ongoing.more():
            *lines, rest = (rest + ongoing.response.parts[-1]).split(b"\n")
            for value in map(json.loads, lines):
                if "end" in value:
                    worker.close()
                    return str(value["end"])
                await client.send(chunk(spell(value)))
                self.take(request, value["t"])
        worker.close()
        return None

    def take(self, request: dict[str, Any], tokens: list[int]) -> None:
        """These were delivered: what is still to ask for."""
        request["prompt"] += tokens
        request["n"] -= len(tokens)

    def known_end(self, request: dict[str, Any], delivered: list[int]) -> str | None:
        """The end that a worker need not be asked for: all tokens are there, only its last words were lost."""
        if delivered and delivered[-1] in MODEL.eos_token_ids:
            return "stop"
        return None if request["n"] else "length"
