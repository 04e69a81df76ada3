"""The prefill worker's part in an attempt at a pair: sent at the same time, read whole, and over long before the other.

What it means for the attempt is decided there: this only tells what came of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext

import trio

from dyn_relay.fleet.target import Lease, Target
from dyn_relay.formats.base import Answer, Event, Exchange, Outbound
from dyn_relay.formats.traits import Pairing
from dyn_relay.http11.client import BadResponse, fetch
from dyn_relay.http11.errors import EventTooLarge
from dyn_relay.http11.headers import Headers, get
from dyn_relay.http11.sse import Splitter
from dyn_relay.net import ConnectFailed, ConnectionBroken
from dyn_relay.relay.choice import Choice, Pair
from dyn_relay.relay.context import Context
from dyn_relay.relay.failure import Failure, Kind, Phase
from dyn_relay.relay.reader import MAX_WHOLE_ANSWER
from dyn_relay.relay.rooms import Rooms

#: Seconds in which decode, if it has the cache, gives its first token, or else says what has failed.
HANDOVER_GRACE = 0.5


class Leg:
    """One prefill target's. Its lease ends with it, its rooms with the attempt (`close`)."""

    def __init__(self, context: Context, target: Target, lease: Lease, rank: int | None, rooms: Rooms) -> None:
        """`lease` was entered already; `rank`: the one that the request is to name, if any."""
        self.worker = target.worker
        self.target = target
        #: The worker may be at work on it.
        self.running = False
        self.finished = trio.Event()
        #: The decode worker has given what it could only make of the cache.
        self.owes = trio.Event()
        self.answer: Answer | None = None
        #: Those of the answer.
        self.headers: Headers = []
        #: Of an answer that is a stream.
        self.events: list[Event] | None = None
        #: The answer is an error of which the decode worker may say more.
        self.defers = False
        self.failure: Failure | None = None
        self._context = context
        self._lease = lease
        self._rank = rank
        self._rooms = rooms
        self._drawn: list[int] = []
        self._finished_at = math.inf

    def pairing(self) -> Pairing:
        """What the format has to know of it."""
        worker = self.worker
        return Pairing(worker.traits, worker.origin.host, self._port, self._rank, self._draw, self._claim)

    @property
    def _port(self) -> int | None:
        return self.worker.bootstrap_port or self.worker.traits.bootstrap_port

    def _draw(self) -> int:
        room = self._rooms.draw(self._rank or 0, (self.worker.traits.dp_size or 1) if self._rank is not None else 1)
        self._drawn.append(room)
        return room

    def _claim(self, room: int) -> bool:
        free = self._rooms.claim(room)
        if free:
            self._drawn.append(room)
        return free

    @property
    def decided_at(self) -> float:
        """From when on the attempt goes by what came of it, in seconds of the loop's clock; inf: not yet.

        One that was lost may have handed its cache over already: then decode's first token is about to come. Or decode
        has failed, and is about to say why.
        """
        return self._finished_at + HANDOVER_GRACE * (self.lost or self.defers)

    @property
    def lost(self) -> bool:
        """Its connection has ended without an answer."""
        return self.failure is not None and self.failure.kind is Kind.CUT

    async def run(self, outbound: Outbound, headers: Headers, over: Callable[[], None]) -> None:
        """Send it and read the answer. `over` is called when there is an answer, or a failure."""
        self.running = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope)
            await self._converse(outbound, headers)
            nursery.cancel_scope.cancel()
        self.running = self.failure is not None and self.failure.kind is not Kind.CONNECT
        self._end_lease()
        self._finished_at = trio.current_time()
        self.finished.set()
        over()

    async def _converse(self, outbound: Outbound, headers: Headers) -> None:
        own: Headers = [(b"content-type", outbound.content_type)] if outbound.content_type else []
        try:
            response = await fetch(
                *(self._context.pool, self.worker.origin, outbound.method, outbound.path),
                headers=[*own, *headers],
                body=outbound.body,
                timeout=math.inf,
                max_body=MAX_WHOLE_ANSWER,
                fresh=True,
            )
            self.headers = response.headers
            kind = get(self.headers, b"content-type") or b"application/json"
            self.answer = Answer(response.status, response.body, kind)
            if response.status < 400 and kind.lower().startswith(b"text/event-stream"):
                self.events = Splitter(self._context.config.max_event_size).feed(response.body)
                self.answer = Answer(response.status, b"", kind)  # the events are all of it, and may be large
        except ConnectFailed as exc:
            self._failed(Kind.CONNECT, Phase.DIAL, str(exc))
        except ConnectionBroken as exc:
            self._failed(Kind.CUT, Phase.SENT, str(exc))
        except (BadResponse, EventTooLarge) as exc:
            self.answer = None
            self._failed(Kind.GARBAGE, Phase.SENT, str(exc))

    async def _watch(self, leg: trio.CancelScope) -> None:
        """End the leg, with a failure, if it is silent for too long.

        A healthy worker may take as long as it likes for the prompt, unless --first-token-timeout-secs says otherwise.
        Once it has handed the cache over only its answer is missing: good health is worth one more stall timeout then.
        """
        config, fleet = self._context.config, self._context.fleet
        stall, limit = config.stall_timeout_secs or math.inf, config.first_token_timeout_secs or math.inf
        began = heard = trio.current_time()
        granted = False
        while True:
            owed = self.owes.is_set()
            with trio.move_on_at(min(heard + stall, began + limit)):
                await (trio.Event() if owed else self.owes).wait()
                heard = trio.current_time()
                continue
            if fleet.paused:
                began = heard = trio.current_time()
                continue
            if trio.current_time() >= began + limit:
                self._failed(Kind.FIRST_TOKEN, Phase.SENT, f"no answer to the prompt within {limit:g} s")
                break
            probe = await fleet.ask(self.worker)
            if not probe.answered or (owed and (granted or not probe.ok)):
                self._failed(Kind.STALL, Phase.SENT, f"no answer for {stall:g} s")
                break
            granted, heard = owed, trio.current_time()
        leg.cancel()

    def _failed(self, kind: Kind, phase: Phase, words: str) -> None:
        self.failure = Failure(kind, phase, self.worker.id, f"prefill: {words}")

    def _end_lease(self) -> None:
        if self._lease.held:
            self._lease.release()

    def close(self) -> None:
        """The attempt is over."""
        self._end_lease()
        for room in self._drawn:
            self._rooms.give_back(room)
        self._drawn.clear()


def beside(context: Context, exchange: Exchange, choice: Choice, pair: Pair) -> AbstractContextManager[Leg | None]:
    """The prefill worker's part in an attempt at a pair; its lease is taken at once."""
    if pair.prefill is None or choice.prefills is None:
        return nullcontext()
    lease = context.fleet.lease(pair.prefill, exchange.generations, lambda: exchange.prompt_tokens)
    return closing(Leg(context, pair.prefill, lease.__enter__(), choice.prefills.rank(pair.prefill), context.rooms))
