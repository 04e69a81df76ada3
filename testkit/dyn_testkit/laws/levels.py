"""Levels on which laws run: a format's exchange alone, and a whole router that is reached over HTTP."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import trio
from trio.testing import MockClock

from dyn_relay.formats.base import Answer, CannotComplete, End, Exchange, Format, NativeRequest, Outbound, Reading
from dyn_relay.formats.traits import UNKNOWN, Pairing, Traits
from dyn_relay.http11.sse import Splitter
from dyn_relay.net import Network
from dyn_testkit.client import Response, fetch
from dyn_testkit.laws.laws import MIGRATABLE_HEADER
from dyn_testkit.laws.observed import Case, Observed
from dyn_testkit.laws.pairs import LAST_ROOM
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

    def __init__(
        self, format: Format, options: WorkerOptions, limit: int = 3, *, prefills: WorkerOptions | None = None
    ) -> None:
        """`prefills`: each worker has a prefill worker with these options beside it."""
        self._format = format
        self._options = options
        self._limit = limit
        self._prefills = [prefills] * (limit + 1) if prefills is not None else []

    def observe(self, case: Case) -> Observed:
        """Run one case, in no real time."""
        return trio.run(partial(self._observe, case), clock=MockClock(autojump_threshold=0))

    async def _observe(self, case: Case) -> Observed:
        network = SimNetwork()
        dialects = [case.dialect(number) for number in range(self._limit + 1)]
        stage = Stage(network, dialects, self._options, "w{}", 30000, prefills=self._prefills)
        async with trio.open_nursery() as nursery:
            await nursery.start(stage.run)
            stage.begin(case)
            drive = _Drive(self._format, network, stage, case)
            response = await drive.run()
            nursery.cancel_scope.cancel()
        return Observed(case, response, stage.attempts, prefills=stage.beside)


class _Drive:
    """One logical request, from the client's body to the client's answer."""

    def __init__(self, format: Format, network: Network, stage: Stage, case: Case) -> None:
        self._format = format
        self._network = network
        self._stage = stage
        self._case = case
        self._client = Response(status=200)
        self._rooms = count(LAST_ROOM, -1)

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
        pairing = await self._pairing(number)
        out = exchange.dispatch(traits, f"~{number:031x}" if number else exchange.rid, now(), pairing=pairing)
        response, beside = await self._ask(url, out, number, exchange.beside)
        if response.status:
            self._read(exchange, response, beside)
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

    async def _pairing(self, number: int) -> Pairing | None:
        if not self._stage.prefills:
            return None
        prefill = self._stage.prefills[number]
        traits = await self._traits(prefill.url)
        room, claim = (lambda: next(self._rooms)), (lambda room: True)
        return Pairing(traits, prefill.host, prefill.bootstrap_port, None, room, claim)

    async def _ask(
        self, url: str, out: Outbound, number: int, beside: Outbound | None
    ) -> tuple[Response, Response | None]:
        """The worker's answer, and its prefill worker's; that one is left alone once the other has broken off."""
        if beside is None:
            return await fetch(self._network, url, out.path, out.body, method=out.method), None
        answers = [Response(), Response()]

        async def ask(index: int, url: str, out: Outbound) -> None:
            answers[index] = await fetch(self._network, url, out.path, out.body, method=out.method)
            if not index and not answers[0].complete:
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0, url, out)
            nursery.start_soon(ask, 1, self._stage.prefills[number].url, beside)
        return answers[0], answers[1]

    def _read(self, exchange: Exchange, response: Response, beside: Response | None) -> None:
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
            if exchange.waits_for_prefill:
                self._join(exchange, beside)
            return
        splitter = Splitter(_MAX_EVENT)
        joined = beside is None
        for number, piece in enumerate(pieces(response.body, self._case.fragmentation)):
            if not joined and (number >= self._case.late or exchange.waits_for_prefill):
                joined = True
                if not self._join(exchange, beside):
                    return
            self._client.body += exchange.feed(splitter.feed(piece), now())
            if exchange.end is not None:
                return
        if not joined and exchange.waits_for_prefill:
            self._join(exchange, beside)

    def _join(self, exchange: Exchange, beside: Response | None) -> bool:
        """Give the exchange what the prefill worker said; False if there is nothing to go on with."""
        assert beside is not None
        if not beside.complete:
            return not exchange.waits_for_prefill
        kind = beside.header("content-type") or "application/json"
        stream = beside.status < 400 and kind.startswith("text/event-stream")
        events = Splitter(_MAX_EVENT).feed(beside.body) if stream else None
        answer = Answer(beside.status, beside.body, kind.encode())
        self._client.body += exchange.prefilled(answer, events, trio.current_time())
        return exchange.end is None

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
        rows, gauges = await self._evidence() if self._evidence is not None else (None, None)
        return Observed(case, response, self._stage.attempts, rows, gauges, self._stage.beside)


def other(case: Case, *, stream: bool) -> Case:
    """The same case for a client that does (or does not) stream."""
    return replace(case, body=json.dumps({**case.request, "stream": stream}).encode())
