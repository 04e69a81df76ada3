"""The ends of a logical request: what the client is told, and what is written down. Each request has exactly one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import trio

from dyn_relay.fleet.absence import absent
from dyn_relay.fleet.stage import roles_of
from dyn_relay.formats.base import Answer, CannotComplete, End, Exchange
from dyn_relay.http11.headers import Headers
from dyn_relay.relay.attempt import Attempt
from dyn_relay.relay.context import Context
from dyn_relay.relay.downstream import Downstream
from dyn_relay.relay.failure import Failure, Kind
from dyn_relay.relay.queue import Crowded
from dyn_relay.relay.record import Outcome, RequestRecord, publish
from dyn_relay.relay.state import Step

#: On a whole answer whose tokens come from more than one version of the weights.
CROSSED_HEADER = b"x-dyn-relay-crossed-versions"
#: The status of our own error, by the last failure's kind; 502 for the others.
_STATUS = {Kind.CONNECT: 503, Kind.BUSY: 503, Kind.STALL: 504, Kind.FIRST_TOKEN: 504}
#: Failures in words that a client can do something with.
_ENGINES_WORD = (Kind.BUSY, Kind.FAILED, Kind.KEY)
#: Failures that an error message lists, the last ones.
HISTORY_SHOWN = 10


class Ending:
    """Ends one request. Every method that writes raises `ConnectionBroken` if the client has left meanwhile."""

    def __init__(
        self, context: Context, exchange: Exchange, downstream: Downstream, record: RequestRecord, *, native: bool
    ) -> None:
        self._context = context
        self._exchange = exchange
        self._downstream = downstream
        self._record = record
        self._native = native

    @property
    def unseen(self) -> bool:
        """The answer is only forwarded: how many tokens it has is not known here."""
        return not self._exchange.verdict.migratable and not self._exchange.streaming

    async def finish(self, attempt: Attempt) -> None:
        """The engine has said its last word, and it is an answer."""
        if not self._downstream.head_sent:
            try:
                answer = self._exchange.answer(trio.current_time())
            except CannotComplete as exc:
                await self._fail(502, exc.reason, f"the worker's answer cannot be read: {exc.reason}")
                return
            await self._downstream.answer(_with(self._marked(answer), attempt.worker_headers))
        if self._exchange.end is End.ABORTED:
            self.close(Step.ABORT, Outcome.ABORTED, "worker")
        else:
            self.close(Step.FINISH, Outcome.DONE, "worker")

    async def complete(self, history: tuple[Failure, ...]) -> bool:
        """After a cut: True if nothing was left to generate, and the request has ended, one way or the other."""
        try:
            rest = self._exchange.complete(trio.current_time())
        except CannotComplete as exc:
            await self.cannot_continue(exc.reason, history)
            return True
        if rest is None:
            return False
        await self._give(rest)
        self.close(Step.FINISH, Outcome.COMPLETED, "proxy")
        return True

    async def abort(self) -> None:
        """An abort was wished while no worker had the request, or the worker did not obey."""
        if self._downstream.said:  # but it had ended before, and it is the client that does not take the end
            await self._downstream.send(b"")
            self.close(Step.FINISH, Outcome.DONE, "worker")
            return
        rest = self._exchange.abort(trio.current_time())
        if rest is None:
            await self._fail(502, "aborted", "the request was aborted")
            return
        await self._give(rest)
        self.close(Step.ABORT, Outcome.ABORTED, "proxy")

    def may_relay(self, attempt: Attempt) -> bool:
        """May the engine's own error be the answer? Not if tokens of earlier attempts would be lost in silence."""
        exchange = self._exchange
        return exchange.delivered == exchange.attempt_tokens and (attempt.in_stream or not self._downstream.head_sent)

    async def relay_engine(self, attempt: Attempt, history: tuple[Failure, ...]) -> None:
        """The engine's own error is the answer, in its own words, where that is possible."""
        exchange, downstream, kind = self._exchange, self._downstream, history[-1].kind
        if not self.may_relay(attempt):
            status = _STATUS.get(kind, 502)
            if not attempt.in_stream and not exchange.delivered:
                status = exchange.answer(trio.current_time()).status  # only the head is out, for keep-alive comments
            await self._fail(status, kind.value, _words(history))
            return
        if exchange.streaming and attempt.in_stream:
            await downstream.send(downstream.finish(exchange.last_words()))
        else:
            answer = exchange.answer(trio.current_time())
            await downstream.answer(_with(answer, attempt.worker_headers))
        self._record.error = kind.value
        self.close(Step.FINISH, Outcome.ENGINE_ERROR, "worker")

    async def nobody_left(self, last: Attempt | None, history: tuple[Failure, ...], unfit: Mapping[str, str]) -> None:
        """Every worker was asked, or there is none; `unfit`: those that were passed over, by id, and why."""
        why = ", ".join(f"{worker}: {reason}" for worker, reason in islice(unfit.items(), HISTORY_SHOWN))
        if not history:
            await self._fail(503, "no_worker", self._nobody())
        elif unfit and (self._exchange.delivered or history[-1].kind not in _ENGINES_WORD):
            if self._record.started_work:
                words = f"; no other worker can take what the continuation needs ({why})"
                await self.failed("no_fit_worker", history, words)
            else:
                await self.failed("no_survivor", history, f"; no other worker has all that is asked for ({why})")
        elif any(failure.kind is Kind.UNFIT for failure in history):
            await self._fail(502, "continuation_refused", _words(history))
        elif history[-1].kind in _ENGINES_WORD and last is not None:
            await self.relay_engine(last, history)
        else:
            await self.failed("no_survivor", history)

    async def cannot_continue(self, reason: str, history: tuple[Failure, ...]) -> None:
        """The format refuses to go on."""
        await self.failed(reason, history, f"; the request cannot be continued because of {reason}")

    def left(self) -> None:
        """Nobody waits for the answer any more."""
        if self._downstream.given_up:
            self.close(Step.ABORT, Outcome.GIVEN_UP, "proxy")
        else:
            self._downstream.left()
            self.close(Step.ABORT, Outcome.CLIENT_GONE, "client")

    async def poison(self) -> None:
        """Workers died under it."""
        words = "workers died under this request before its first token: it is suspected of killing them"
        await self._fail(502, "suspected_poison", words)

    async def crowded(self, refusal: Crowded) -> None:
        """It did not get its turn."""
        after = [(b"retry-after", b"%d" % refusal.retry_after)]
        await self._fail(refusal.status, refusal.reason, str(refusal), after)

    async def timed_out(self, reason: str, words: str) -> None:
        """Its time is over."""
        await self._fail(504, reason, words)

    async def failed(self, reason: str, history: tuple[Failure, ...], words: str = "") -> None:
        """No attempt may follow the last failure."""
        await self._fail(_STATUS.get(history[-1].kind, 502), reason, _words(history) + words)

    def _nobody(self) -> str:
        """Who is missing: of a pair, which half. What is no format's of ours goes to decode workers alone."""
        roles = roles_of(self._context.config)
        wanted = roles if self._native else roles[-1:]
        return absent(self._context.fleet.workers, wanted) or "no worker is available"

    async def _give(self, rest: bytes) -> None:
        """Hand over the end of an answer that was made here."""
        if self._exchange.streaming:
            await self._downstream.send(self._downstream.finish(rest))
        else:
            await self._downstream.answer(self._marked(self._exchange.answer(trio.current_time())))

    def _marked(self, answer: Answer) -> Answer:
        """A whole answer; its head can still say what the head of a stream, long out, cannot."""
        if not self._exchange.crossed_versions():
            return answer
        return _with(answer, [(CROSSED_HEADER, b"yes")])

    async def _fail(self, status: int, reason: str, message: str, headers: Headers | None = None) -> None:
        """Tell the client that there is no complete answer, so that it cannot be overlooked."""
        exchange, downstream = self._exchange, self._downstream
        self._record.error = reason
        if downstream.head_sent or downstream.said:
            await downstream.fail(exchange.failure_event(status, reason, message))
        else:
            answer = exchange.failure(status, reason, message, self._record.started_work)
            await downstream.answer(_with(answer, headers or []))
        self.close(Step.FAIL, Outcome.FAILED, "proxy")

    def close(self, step: Step, outcome: Outcome, closed_by: str) -> None:
        """The state's last step, the trace row, the log line, the metrics."""
        record, exchange, context = self._record, self._exchange, self._context
        record.step(step)
        record.outcome, record.closed_by, record.status = outcome, closed_by, self._downstream.status
        record.refusal = record.refusal or exchange.verdict.reason
        record.migratable = not record.refusal
        record.prompt_tokens = exchange.prompt_tokens
        record.completion_tokens = None if self.unseen else exchange.delivered
        record.settle(exchange.delivered)
        record.cached_tokens, record.ended = exchange.cached_tokens, trio.current_time()
        record.crossed_versions, record.resampled = exchange.crossed_versions(), exchange.resampled()
        record.recomputed_rows = exchange.recomputed()
        if self._native:
            publish(record, context.trace)
            context.metrics.request_ended(outcome.value, record.ttft, exchange.cached_tokens)
        if record.refusal:
            context.metrics.refused(record.refusal)
        if record.bundle is None:
            context.metrics.answered(record.path if self._native else "bridged", record.status)


def _with(answer: Answer, headers: Headers) -> Answer:
    return Answer(answer.status, answer.body, answer.content_type, [*answer.headers, *headers])


def _words(history: tuple[Failure, ...]) -> str:
    return "; ".join(map(str, history[-HISTORY_SHOWN:]))
