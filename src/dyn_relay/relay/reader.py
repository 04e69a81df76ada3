"""The transform of an attempt: a worker's wire bytes in, the client's wire bytes out. Nothing here waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from dyn_relay.formats.base import Answer, End, Event, Exchange, Reading
from dyn_relay.http11.errors import BadResponse
from dyn_relay.http11.response import ResponseReader
from dyn_relay.http11.sse import Splitter, in_one_chunk
from dyn_relay.relay.downstream import Downstream

#: Most that is read of a worker's whole answer (an error, or the unary answer of a worker that does not stream), bytes.
MAX_WHOLE_ANSWER = 1 << 30

_LAST_WORD_RELAYED = (End.FINISHED, End.ABORTED)


class AnswerReader:
    """Reads one attempt's answer. Implements `net.Transform`."""

    __slots__ = (
        "_clock",
        "_downstream",
        "_exchange",
        "_max_event",
        "_on_token",
        "_rest",
        "_splitter",
        "_straight",
        "_whole",
        "_whole_size",
        "done",
        "first_token",
        "last_event",
        "last_token",
        "reading",
        "response",
        "rest",
    )

    def __init__(
        self,
        exchange: Exchange,
        downstream: Downstream,
        *,
        no_body: bool,
        max_event: int,
        on_token: Callable[[], None],
        rest: float = 0.0,
    ) -> None:
        """`no_body`: the request was a HEAD. `on_token`: called once, at the attempt's first token.

        `rest`: seconds for which the worker is not read after events that went on to a streaming client.
        """
        self.response = ResponseReader(no_body=no_body)
        self.reading: Reading | None = None
        self.done = False
        self.rest = 0.0
        #: When the attempt gave its first and its newest token, and its newest event, or bytes of another body; None
        #: before.
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.last_event: float | None = None
        self._exchange = exchange
        self._downstream = downstream
        self._on_token = on_token
        self._rest = rest
        self._splitter = Splitter(max_event)
        self._max_event = max_event
        #: Nothing is half read, and the client's framing is the worker's: a chunk of an event may pass as it is.
        self._straight = False
        self._whole: list[bytes] = []
        self._whole_size = 0
        # Without the two calls that `trio.current_time` makes of one, since each event asks.
        self._clock = trio.lowlevel.current_clock().current_time

    @property
    def begun(self) -> bool:
        """The worker has begun to speak, be it with half an event: silence from here on is not its queue."""
        if self.reading is None:
            return self.response.bytes_seen
        return self.first_token is not None or bool(self._whole or self._splitter.pending)

    def feed(self, data: bytes) -> bytes:
        """Raises `BadResponse`, `EventTooLarge`."""
        if self._straight:
            payload = in_one_chunk(data)
            if payload is not None and len(data) <= self._max_event and self._exchange.passes(payload):
                self.last_event = self.last_token = self._downstream.last_write = self._clock()
                return data
        response = self.response
        body = response.feed(data)
        if self.reading is None:
            if not response.head_complete:
                return b""
            self._head()
        if self.reading is Reading.EVENTS:
            out = self._events(body)
            straight = response.at_chunk(data) and not self._splitter.pending and not self.done
            self._straight = straight and self._downstream.takes_chunks
            return out
        if body:
            self.last_event = self._clock()
        return self._body(body, response.complete)

    def eof(self) -> bytes:
        """The worker closed. Sets `done` if that completes the answer; returns what is left to write."""
        if not self.response.eof() or self.reading is None:
            return b""
        return self._events(b"") if self.reading is Reading.EVENTS else self._body(b"", True)

    def _head(self) -> None:
        response = self.response
        self.reading = self._exchange.head(response.status, response.headers)
        if self.reading is Reading.EVENTS and self._exchange.streaming:
            self.rest = self._rest
        if self.reading is not Reading.WHOLE:
            events = self.reading is Reading.EVENTS
            delimited = response.close_delimited
            self._downstream.take_head(response.status, response.headers, events=events, delimited=delimited)

    def reply(self, status: int, body: bytes) -> bytes:
        """The worker has answered the format's question. Raises `CannotComplete`."""
        exchange = self._exchange
        self.done = False
        out = self._taken(partial(exchange.reply, status, body))
        if self.reading is Reading.EVENTS:
            return self._given(out)
        self.done = exchange.end is not None
        return out

    def beside(self, answer: Answer, events: list[Event] | None) -> bytes:
        """The prefill worker has answered. Raises `CannotComplete`."""
        exchange = self._exchange
        self.done = False
        out = self._taken(partial(exchange.prefilled, answer, events))
        if self.reading is Reading.EVENTS:
            return self._given(out)
        self.done = exchange.end is not None
        return out

    def _events(self, body: bytes) -> bytes:
        if not body:
            return self._given(b"")
        # No name for the events here: what is made of them may be large, and they are, too.
        return self._given(self._taken(self._fed(self._splitter.feed(body))))

    def _fed(self, events: list[Event]) -> Callable[[float], bytes]:
        if any(data for _, data in events):
            self.last_event = self._clock()  # comments, and parts of an event, are no sign of life
        return partial(self._exchange.feed, events)

    def _taken(self, take: Callable[[float], bytes]) -> bytes:
        """What the format makes of something, at a time; if that are tokens, it is noted."""
        exchange, now = self._exchange, self._clock()
        before, verdict = exchange.attempt_tokens, exchange.verdict
        out = take(now)
        if exchange.attempt_tokens != before or (self.first_token is None and exchange.answering):
            self.last_token = now
            if self.first_token is None:
                self.first_token = now
                self._on_token()
        if out:
            self._downstream.last_write = now
        if exchange.verdict is not verdict:
            self._downstream.judge(exchange.verdict)  # in time, if these are the first events
        return out

    def _given(self, out: bytes) -> bytes:
        """What the client gets, given what the format has made of its events; is the answer at its end?"""
        exchange = self._exchange
        if exchange.question is not None or exchange.waits_for_prefill:
            self.done = True  # for now
        elif exchange.end is not None:
            self.done = True
            if exchange.streaming and exchange.end in _LAST_WORD_RELAYED:
                return self._downstream.finish(out)
        elif self.response.complete:
            self.done = True  # the framing ended, the answer did not: a cut
        return self._downstream.wrap(out) if out else b""

    def _body(self, body: bytes, complete: bool) -> bytes:
        self.done = complete
        if self.reading is Reading.OPAQUE:
            if complete:
                return self._downstream.finish(body)
            return self._downstream.wrap(body)
        self._whole.append(body)
        self._whole_size += len(body)
        if self._whole_size > MAX_WHOLE_ANSWER:
            raise BadResponse(f"the worker's answer is larger than {MAX_WHOLE_ANSWER} bytes")
        if complete:
            self._exchange.body(b"".join(self._whole), self._clock())
            self._whole.clear()
        return b""
