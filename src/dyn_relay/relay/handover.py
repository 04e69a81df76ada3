"""The prefill worker's word in an attempt at a pair: when it is taken, and what it makes of the attempt."""

from __future__ import annotations

import math
from dataclasses import replace

import trio

from dyn_relay.fleet.target import Target
from dyn_relay.formats.base import Exchange
from dyn_relay.net import Sink
from dyn_relay.relay.failure import Failure, Kind
from dyn_relay.relay.leg import Leg
from dyn_relay.relay.reader import AnswerReader
from dyn_relay.relay.waiting import unless_gone


class Handover:
    """What becomes of what one `Leg` says, beside the answer of the decode worker at `target`."""

    def __init__(self, exchange: Exchange, leg: Leg, target: Target) -> None:
        self.leg = leg
        #: What it has said was taken, or does not matter any more.
        self.over = False
        #: What it has said is the answer.
        self.spoken = False
        self._exchange = exchange
        self._target = target

    @property
    def due(self) -> float:
        """When it may have to be taken, in seconds of the loop's clock; inf: never."""
        return math.inf if self.over else self.leg.decided_at

    @property
    def ready(self) -> bool:
        """Is it time to take it, or to wait for it? Not if decode has said its last word.

        What did not matter may do so later: of a list of prompts one may fail at decode before another begins.
        """
        if self._exchange.end is not None:
            return False
        return self._exchange.waits_for_prefill or self.due <= trio.current_time()

    def ended(self) -> None:
        """The leg has just ended."""
        leg = self.leg
        leg.defers = leg.answer is not None and self._exchange.refers(leg.answer, leg.events)

    async def wait(self, client: Sink) -> None:
        """Until the leg has ended. Raises `ClientGone`."""
        self.leg.owes.set()
        await unless_gone(client, self.leg.finished.wait)

    def take(self, reader: AnswerReader) -> bytes | Failure | None:
        """Take what it has said: what the client gets of its answer, or how the attempt has failed without one.

        None: there is none, and it is not missed. Raises `CannotComplete`.
        """
        exchange, leg = self._exchange, self.leg
        self.over = True
        if exchange.attempt_tokens and not exchange.waits_for_prefill:
            return None  # the cache was handed over, and nothing else is owed: whatever it has said is no matter
        if leg.answer is None:
            # Of an answer that is only forwarded, whole, nothing can be seen: decode will tell if it has lost prefill.
            unseen = not exchange.streaming and not exchange.verdict.migratable and leg.lost
            if leg.failure is None or (unseen and not exchange.waits_for_prefill):
                return None
            silent = leg.failure.kind in (Kind.FIRST_TOKEN, Kind.STALL)
            return replace(leg.failure, beside=self._target.id) if silent else leg.failure
        return reader.beside(leg.answer, leg.events)
