"""One attempt: one dispatch of a logical request to one worker, from the dial to the last byte of its answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from dyn_relay.fleet.health import Probe
from dyn_relay.fleet.target import Target
from dyn_relay.fleet.worker import Worker
from dyn_relay.formats.base import CannotComplete, End, Exchange, Outbound, Reading
from dyn_relay.http11.client import Upstream
from dyn_relay.http11.errors import BadResponse, EventTooLarge
from dyn_relay.http11.headers import Headers, end_to_end, get
from dyn_relay.net import ConnectFailed, ConnectionBroken, Ended
from dyn_relay.relay.context import Context
from dyn_relay.relay.downstream import MIGRATABLE_HEADER, Downstream
from dyn_relay.relay.failure import Failure, Kind, Phase
from dyn_relay.relay.handover import Handover
from dyn_relay.relay.leg import HANDOVER_GRACE, Leg
from dyn_relay.relay.orders import ask
from dyn_relay.relay.reader import AnswerReader
from dyn_relay.relay.sending import dial, read_tail, send
from dyn_relay.relay.silence import Silence
from dyn_relay.relay.waiting import ClientGone, Unwanted, unless_gone

#: What a worker says to a key that it does not know.
_KEY_REFUSED = (401, 403)
#: Seconds after the sending in which the end of a reused connection is put down to its age.
STALE_WINDOW = 2.0

_KINDS = {
    End.REFUSED: Kind.REFUSED,
    End.BUSY: Kind.BUSY,
    End.INTERRUPTED: Kind.INTERRUPTED,
    End.FAILED: Kind.FAILED,
    End.GARBAGE: Kind.GARBAGE,
}
#: Made anew with the answer that is handed on.
_REWRITTEN = (b"content-type", b"content-length", MIGRATABLE_HEADER)
#: Failures that are a whole, well-formed answer: the connection can serve another request.
_ANSWERS = (Kind.REFUSED, Kind.UNFIT, Kind.KEY, Kind.BUSY, Kind.INTERRUPTED, Kind.FAILED)


class Attempt:
    """One dispatch. `run` returns None when the engine has said its last word, else the failure."""

    def __init__(
        self,
        context: Context,
        exchange: Exchange,
        downstream: Downstream,
        target: Target,
        rank: int | None,
        rid: str,
        on_token: Callable[[], None],
        *,
        reuse: bool,
        again: bool = False,
        leg: Leg | None = None,
    ) -> None:
        """`rank`: the one that the request is to name, if any. `leg`: the prefill worker's part, at a pair.

        `reuse`: an idle connection may be used, which can be stale. `again`: the one before this one was.
        """
        self.worker = target.worker
        self._target = target
        self._rank = rank
        self.rid = rid
        self._reuse = reuse and not again
        self._again = again
        self._leg = leg
        self._handover = Handover(exchange, leg, target) if leg is not None else None
        #: The request may have reached the worker: only then can it have a use for an abort.
        self.sent = False
        self.reader: AnswerReader | None = None
        self._context = context
        self._exchange = exchange
        self._downstream = downstream
        self._on_token = on_token
        self._client = downstream.client
        self._scope = trio.CancelScope()
        #: What the pump is at work in; None before.
        self._reading: trio.CancelScope | None = None
        #: Somebody wishes the request to leave the worker, if this says that it still may.
        self._parting: Callable[[], bool] | None = None
        self._sent_at = 0.0

    @property
    def in_stream(self) -> bool:
        """The answer is, or was to be, a stream of events."""
        if self._handover is not None and self._handover.spoken:
            return self._handover.leg.events is not None
        return self.reader is not None and self.reader.reading is Reading.EVENTS

    @property
    def paired(self) -> bool:
        """Another worker computes, or has computed, the prompt."""
        return self._leg is not None

    @property
    def at_work(self) -> list[Worker]:
        """Workers that may be at work on it."""
        beside = [self._leg.worker] if self._leg is not None and self._leg.running else []
        return [self.worker, *beside] if self.sent else beside

    def uses(self, worker: Worker) -> bool:
        """It goes on there, as far as is known."""
        return worker is self.worker or (
            self._leg is not None and worker is self._leg.worker and not self._leg.finished.is_set()
        )

    def blamed(self, failure: Failure) -> Target:
        """The one that has failed."""
        leg = self._leg
        return leg.target if leg is not None and failure.worker in (leg.worker.id, leg.target.id) else self._target

    @property
    def worker_headers(self) -> Headers:
        """End-to-end headers of the worker whose answer it is, for one that is handed on whole."""
        return [pair for pair in end_to_end(self._headers) if pair[0] not in _REWRITTEN]

    @property
    def retry_after(self) -> float | None:
        """Seconds that a busy worker asks for (`Retry-After`); None if it does not, or names a date."""
        text = get(self._headers, b"retry-after")
        return float(text) if text is not None and len(text) < 10 and text.isdigit() else None

    @property
    def _headers(self) -> Headers:
        if self._handover is not None and self._handover.spoken:
            return self._handover.leg.headers
        return self.reader.response.headers if self.reader is not None else []

    def unwanted(self) -> None:
        """The request was aborted: if the attempt is not sent yet, it never is."""
        if not self.sent:
            self._scope.cancel()

    def give_up(self) -> None:
        """The request was aborted, and the worker did not end it: `run` raises `Unwanted`."""
        self._scope.cancel()

    def part(self, may: Callable[[], bool]) -> None:
        """Take the request from its worker: `run` gives `Kind.MOVED`, unless it has another end first.

        `may` is asked when the moment has come: until then more tokens may come, or the last one.
        """
        self._parting = may
        if not self.sent:
            self._scope.cancel()
        elif self._reading is not None:
            self._reading.cancel()

    async def run(self, headers: Headers) -> Failure | None:
        """Dial, send, read. `headers` go to the worker with the body.

        Raises `ClientGone`, `Unwanted`, `CannotComplete`.
        """
        with self._scope:
            return await self._run(headers)
        if self._parting is None or self.sent:
            raise Unwanted
        return self._failure(Kind.MOVED, Phase.DIAL, "")

    async def _run(self, headers: Headers) -> Failure | None:
        try:
            upstream = await dial(self._context, self.worker.origin, self._client, reuse=self._reuse)
        except ConnectFailed as exc:
            if not self._again:
                return self._failure(Kind.CONNECT, Phase.DIAL, str(exc))
            # A reused connection ended with our request on it, and nobody listens there any more: that was no idle
            # connection's age, the worker died with the request in its hands.
            return self._failure(Kind.CUT, Phase.SENT, str(exc))
        try:
            pairing = self._leg.pairing() if self._leg is not None else None
            now = trio.current_time()
            outbound = self._exchange.dispatch(self.worker.traits, self.rid, now, self._rank, pairing)
            if self._handover is None or self._exchange.beside is None:
                return await self._converse(upstream, outbound, headers)
            return await self._converse_beside(self._handover, self._exchange.beside, upstream, outbound, headers)
        except BaseException:
            upstream.discard()
            raise

    async def _converse_beside(
        self, handover: Handover, beside: Outbound, upstream: Upstream, outbound: Outbound, headers: Headers
    ) -> Failure | None:
        """`_converse`, while the prefill worker is at work; what it is still at when that ends, it is to drop."""

        def over() -> None:
            handover.ended()
            if self._reading is not None:
                self._reading.cancel()

        failure: Failure | None = None
        errors: list[Exception] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(handover.leg.run, beside, headers, over)
            try:
                failure = await self._converse(upstream, outbound, headers)
            except Exception as exc:  # carried out of the nursery as it is
                errors.append(exc)
            nursery.cancel_scope.cancel()
        if errors:
            raise errors[0]
        return failure

    async def _converse(self, upstream: Upstream, outbound: Outbound, headers: Headers) -> Failure | None:
        reader = self.reader = AnswerReader(
            self._exchange,
            self._downstream,
            no_body=outbound.method == "HEAD",
            max_event=self._context.config.max_event_size,
            on_token=self._on_token,
            rest=self._context.config.coalesce_ms / 1000,
        )
        self.sent = True
        self._sent_at = trio.current_time()
        try:
            origin = self.worker.origin
            early = await send(self._context, upstream, origin, outbound, headers, reader, self._client)
            if early is None or self._exchange.question is not None:
                failure = await self._read(upstream, reader, headers)
            else:
                failure = await self._ended(early, upstream, reader)
        except trio.TooSlowError:
            early, failure = None, self._failure(Kind.STALL, Phase.SENT, "the worker does not take the request")
        except (BadResponse, EventTooLarge) as exc:
            early, failure = None, self._failure(Kind.GARBAGE, self._phase(reader), str(exc))
        if failure is None and not reader.response.complete:
            await read_tail(upstream, reader)
        if early is None and (failure is None or failure.kind in _ANSWERS):
            upstream.release(reader.response)
        else:
            upstream.discard()
        return failure

    async def _read(self, upstream: Upstream, reader: AnswerReader, headers: Headers) -> Failure | None:
        """Read the answer, handing the steady state to the pump; wake only at deadlines.

        Raises `BadResponse`, `EventTooLarge`, `CannotComplete`.
        """
        relay = self._context.network.relay
        silence = Silence(self._context.config, self._exchange, self._sent_at, alone=self._leg is None)
        exchange = self._exchange
        while True:
            if reader.done and exchange.question is None and not exchange.waits_for_prefill:
                return await self._ended(Ended.DONE, upstream, reader)
            may_part, self._parting = self._parting, None
            if may_part is not None and may_part():
                return self._failure(Kind.MOVED, self._phase(reader), "")
            if self._handover is not None and self._handover.ready:
                failure = await self._join(self._handover, reader, silence)
                if failure is not None:
                    return failure
                continue
            if exchange.question is not None:
                unanswered = await self._ask(exchange.question, reader, headers)
                if unanswered is not None:
                    return unanswered
                continue
            due = silence.deadline(reader)
            if self._handover is not None:
                due = min(due, self._handover.due)
            ended: Ended | None = None
            with trio.CancelScope(deadline=due) as self._reading:
                ended = await relay(upstream.connection, self._client, reader)
            kind: Kind | None = None
            if ended is None and reader.done:
                await self._downstream.send(b"")  # interrupted between the reading and the writing
            elif ended is None:
                ended, kind = await self._look(silence, upstream, reader)
            if reader.done and ended in (None, Ended.DONE):
                continue  # a question, the prefill worker's word, or the end
            if ended is not None:
                return await self._ended(ended, upstream, reader)
            if kind is not None:
                return self._failure(kind, self._phase(reader), silence.words(kind))

    async def _join(self, handover: Handover, reader: AnswerReader, silence: Silence) -> Failure | None:
        """Take what the prefill worker has said. Raises `ClientGone`, `CannotComplete`."""
        with trio.CancelScope() as self._reading:
            await handover.wait(self._client)
        if not handover.leg.finished.is_set():
            return None  # somebody wishes the request to leave
        silence.begin(trio.current_time())
        taken = handover.take(reader)
        if not isinstance(taken, bytes):
            return taken
        if taken:
            await self._downstream.send(taken)
        return self._failed_beside(handover) if reader.done and self._exchange.end in _KINDS else None

    async def _accused(self, handover: Handover, reader: AnswerReader) -> Failure:
        """Decode says that it cannot find the prefill worker, or has lost it. Raises `ClientGone`, `CannotComplete`.

        It says so also if somebody aborts everything; then the prefill worker says that it was aborted.
        """
        exchange, leg, phase = self._exchange, handover.leg, self._phase(reader)
        words = f"decode: {exchange.detail}"
        with trio.move_on_after(HANDOVER_GRACE):
            await unless_gone(self._client, leg.finished.wait)
        if leg.answer is not None and not handover.over:
            exchange.prefilled(leg.answer, leg.events, trio.current_time())
            if exchange.end is not End.FAILED:
                return self._failed_beside(handover)
        return Failure(Kind.FAILED, phase, leg.target.id, words)

    def _failed_beside(self, handover: Handover) -> Failure:
        """The prefill worker has answered with an error."""
        exchange, leg = self._exchange, handover.leg
        assert exchange.end is not None
        assert leg.answer is not None
        handover.spoken = True
        kind = self._kind(exchange.end, leg.answer.status)
        who = self._target if exchange.accuses else leg.target
        return Failure(kind, Phase.ANSWERED, who.id, f"prefill: {exchange.detail}")

    async def _ask(self, question: Outbound, reader: AnswerReader, headers: Headers) -> Failure | None:
        """Ask the worker what the format must know before it takes more. Raises `ClientGone`, `CannotComplete`."""
        try:
            answer = await unless_gone(self._client, partial(ask, self._context, self.worker, question, headers))
        except (ConnectFailed, ConnectionBroken, BadResponse) as exc:
            return self._failure(Kind.CUT, self._phase(reader), f"{question.path}: {exc}")
        except trio.TooSlowError:
            return self._failure(Kind.STALL, self._phase(reader), f"{question.path} took too long")
        rest = reader.reply(answer.status, answer.body)
        if rest:
            await self._downstream.send(rest)
        return None

    async def _look(
        self, silence: Silence, upstream: Upstream, reader: AnswerReader
    ) -> tuple[Ended | None, Kind | None]:
        """A deadline has come: is it the worker's fault? While it is asked, its stream is read on."""
        now = trio.current_time()
        if self._client.pending:
            silence.renew(now)  # it is the client that does not take what is there
            return None, None
        if self._context.fleet.paused:
            silence.excuse(now)
            return None, None
        if silence.too_late(reader, now):
            return None, Kind.FIRST_TOKEN
        if not silence.over(reader, now):
            return None, None
        probe = Probe(False)
        ended: Ended | None = None
        errors: list[Exception] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                nonlocal probe
                probe = await self._context.fleet.ask(self.worker)
                nursery.cancel_scope.cancel()

            nursery.start_soon(ask)
            try:
                ended = await self._context.network.relay(upstream.connection, self._client, reader)
            except (BadResponse, EventTooLarge, CannotComplete) as exc:  # carried out of the nursery as it is
                errors.append(exc)
            nursery.cancel_scope.cancel()
        if errors:
            raise errors[0]
        if ended is not None:
            return ended, None
        return None, silence.judge(reader, now, probe, trio.current_time())

    async def _ended(self, ended: Ended, upstream: Upstream, reader: AnswerReader) -> Failure | None:
        if ended is Ended.SINK_GONE:
            raise ClientGone
        if ended is Ended.EOF:
            rest = reader.eof()
            if rest:
                await self._downstream.send(rest)
        if reader.done:
            end = self._exchange.end
            if end is End.FAILED and self._exchange.accuses and self._handover is not None:
                return await self._accused(self._handover, reader)
            if end in _KINDS:
                kind = self._kind(end, reader.response.status)
                return self._failure(kind, self._phase(reader), self._exchange.detail)
            if end is not None or reader.reading is Reading.OPAQUE:
                return None
        young = trio.current_time() - self._sent_at < STALE_WINDOW
        if upstream.reused and young and not reader.response.bytes_seen:
            return self._failure(Kind.STALE, Phase.SENT, "")
        words = "reset" if ended is Ended.SOURCE_BROKEN else "end of stream"
        return self._failure(Kind.CUT, self._phase(reader), words)

    def _kind(self, end: End, status: int) -> Kind:
        exchange = self._exchange
        if end is End.REFUSED and status in _KEY_REFUSED and not self._context.config.forward_authorization:
            return Kind.KEY
        if end is End.INTERRUPTED and self._context.fleet.paused:
            return Kind.MOVED  # the pause has done it
        continued = exchange.delivered > 0 and not exchange.attempt_tokens
        return Kind.UNFIT if end is End.REFUSED and continued else _KINDS[end]

    def _phase(self, reader: AnswerReader) -> Phase:
        if self._exchange.attempt_tokens:
            return Phase.TOKENS
        return Phase.ANSWERED if reader.response.bytes_seen else Phase.SENT

    def _failure(self, kind: Kind, phase: Phase, detail: str) -> Failure:
        # One rank's queue is full; a lost connection is the whole worker's.
        who = self._target if kind is Kind.BUSY else self.worker
        return Failure(kind, phase, who.id, detail)
