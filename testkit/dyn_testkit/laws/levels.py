"""Levels on which laws run: a format's exchange alone, and a whole router that is reached over HTTP."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import trio
from trio.testing import MockClock

from dyn_relay.formats.base import UNKNOWN, CannotComplete, End, Exchange, Format, NativeRequest, Reading, Traits
from dyn_relay.http11.sse import Splitter
from dyn_relay.net import Network
from dyn_testkit.client import Response, fetch
from dyn_testkit.laws.laws import MIGRATABLE_HEADER
from dyn_testkit.laws.observed import Case, Observed
from dyn_testkit.laws.pieces import pieces
from dyn_testkit.laws.stage import Stage
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import WorkerOptions

_MAX_EVENT = 1 << 24
#: Ends after which the client has its answer.
_LAST_WORDS = (End.FINISHED, End.ABORTED, End.REFUSED)


class ExchangeLevel:
    """A format's exchange without any I/O: what the mock workers sent is cut into pieces and fed to it.

    Every cut is continued, up to `limit` times; nothing else of a router is here. Implements `Backend`.
    """

    def __init__(self, format: Format, options: WorkerOptions, limit: int = 3) -> None:
        self._format = format
        self._options = options
        self._limit = limit

    def observe(self, case: Case) -> Observed:
        """Run one case, in no real time."""
        return trio.run(partial(self._observe, case), clock=MockClock(autojump_threshold=0))

    async def _observe(self, case: Case) -> Observed:
        network = SimNetwork()
        dialects = [case.dialect(number) for number in range(self._limit + 1)]
        stage = Stage(network, dialects, self._options, "w{}", 30000)
        async with trio.open_nursery() as nursery:
            await nursery.start(stage.run)
            stage.begin(case)
            drive = _Drive(self._format, network, stage, case)
            response = await drive.run()
            nursery.cancel_scope.cancel()
        return Observed(case, response, stage.attempts)


class _Drive:
    """One logical request, from the client's body to the client's answer."""

    def __init__(self, format: Format, network: Network, stage: Stage, case: Case) -> None:
        self._format = format
        self._network = network
        self._stage = stage
        self._case = case
        self._client = Response(status=200)

    async def run(self) -> Response:
        headers = [(b"content-type", b"application/json")]
        request = NativeRequest("POST", "/generate", headers, self._case.body)
        exchange = self._format.open(request, "given-by-the-driver")
        answer = self._client
        for number, url in enumerate(self._stage.urls):
            traits = await self._traits(url)
            if not number:
                reason = exchange.admit(traits).reason
                told = f"no; reason={reason}" if reason else "yes"
                answer.headers = [(MIGRATABLE_HEADER.encode(), told.encode())]
            if await self._attempt(exchange, url, traits, number) or not exchange.verdict.migratable:
                break
        else:
            self._fail(exchange, "attempts")
        return answer

    async def _traits(self, url: str) -> Traits:
        if not self._case.introduced:
            return UNKNOWN
        found = {path: (await fetch(self._network, url, path)).body for path in self._format.info_paths}
        return self._format.traits(found)

    async def _attempt(self, exchange: Exchange, url: str, traits: Traits, number: int) -> bool:
        """One dispatch; True if the client has its answer."""
        now = trio.current_time
        out = exchange.dispatch(traits, f"~{number:031x}" if number else exchange.rid, now())
        response = await fetch(self._network, url, out.path, out.body, method=out.method)
        if response.status:
            self._read(exchange, response)
        if exchange.end in _LAST_WORDS:
            self._finish(exchange, b"")
            return True
        if exchange.end is not End.BUSY:
            try:
                rest = exchange.complete(now())
            except CannotComplete as exc:
                self._fail(exchange, exc.reason)
                return True
            if rest is not None:
                self._finish(exchange, rest)
                return True
        return False

    def _read(self, exchange: Exchange, response: Response) -> None:
        now = trio.current_time
        reading = exchange.head(response.status, response.headers)
        kind = response.header("content-type") or ""
        self._client.headers = [*self._client.headers[:1], (b"content-type", kind.encode())]
        if reading is Reading.OPAQUE:
            self._client.status, self._client.body, self._client.complete = (
                response.status,
                response.body,
                response.complete,
            )
            return
        if reading is Reading.WHOLE:
            if response.complete:
                exchange.body(response.body, now())
            return
        splitter = Splitter(_MAX_EVENT)
        for piece in pieces(response.body, self._case.fragmentation):
            self._client.body += exchange.feed(splitter.feed(piece), now())
            if exchange.end is not None:
                return

    def _finish(self, exchange: Exchange, rest: bytes) -> None:
        client = self._client
        if exchange.streaming:
            client.body += rest + exchange.last_words()
        else:
            answer = exchange.answer(trio.current_time())
            self._whole(answer.status, answer.body)
        client.complete = True

    def _fail(self, exchange: Exchange, reason: str) -> None:
        client = self._client
        if exchange.streaming and client.body:
            client.body += exchange.failure_event(502, reason, reason)
            client.broken = "eof"
        else:
            answer = exchange.failure(502, reason, reason, True)
            self._whole(answer.status, answer.body)
            client.complete = True

    def _whole(self, status: int, body: bytes) -> None:
        """An answer of ours, whatever the workers' were."""
        client = self._client
        client.headers = [*client.headers[:1], (b"content-type", b"application/json")]
        client.status, client.body = status, body


#: Rows that the router wrote since it was last asked, and what must be 0 by now. Comes back when all is over.
Evidence = Callable[[], Awaitable[tuple[Sequence[Mapping[str, Any]], Mapping[str, float]]]]


class RouterLevel:
    """A whole router, reached over HTTP, in front of a stage's workers; router and workers are run by somebody else.

    A `Backend` from within a loop: `observe` is awaited.
    """

    def __init__(self, network: Network, url: str, stage: Stage, evidence: Evidence | None = None) -> None:
        """`url`: the router's. `evidence`: how to ask it what it did; None if it cannot be asked."""
        self._network = network
        self._url = url
        self._stage = stage
        self._evidence = evidence

    async def observe(self, case: Case) -> Observed:
        """Run one case; the workers are quiet before it and after."""
        self._stage.begin(case)
        response = await fetch(self._network, self._url, "/generate", case.body)
        if self._evidence is None:
            return Observed(case, response, self._stage.attempts)
        rows, gauges = await self._evidence()
        return Observed(case, response, self._stage.attempts, rows, gauges)


def other(case: Case, *, stream: bool) -> Case:
    """The same case for a client that does (or does not) stream."""
    return replace(case, body=json.dumps({**case.request, "stream": stream}).encode())
