"""A logical request: its attempts, one after the other, until it has an end that the client can trust."""

from __future__ import annotations

from functools import partial

import trio

from dyn_relay.fleet.poison import Finding, NotYet, SuspectedPoison
from dyn_relay.fleet.worker import Worker
from dyn_relay.formats.base import CannotComplete, End, Exchange, Reading, Verdict
from dyn_relay.http11.headers import Headers
from dyn_relay.http11.server import ServerConnection
from dyn_relay.net import ConnectionBroken
from dyn_relay.relay.attempt import Attempt, ClientGone, Unwanted, unless_gone
from dyn_relay.relay.budget import AttemptBudget
from dyn_relay.relay.context import Context
from dyn_relay.relay.downstream import Downstream
from dyn_relay.relay.failure import Action, Failure, Kind
from dyn_relay.relay.orders import tell
from dyn_relay.relay.record import AttemptRecord, Outcome, RequestRecord, publish
from dyn_relay.relay.state import State, Step, advance

#: The status of our own error, by the last failure's kind; 502 for the others.
_STATUS = {Kind.CONNECT: 503, Kind.BUSY: 503, Kind.STALL: 504, Kind.FIRST_TOKEN: 504}
#: Failures after which there is nothing to finish here: the engine has answered, or was never asked.
_NOTHING_TO_COMPLETE = (Kind.CONNECT, Kind.BUSY, Kind.REFUSED)
#: An abort is said again at this interval, in seconds, so many times, while its attempt goes on.
ABORT_INTERVAL = 1.0
ABORT_REPEATS = 5
#: Failures that an error message lists, the last ones.
HISTORY_SHOWN = 10
#: Seconds. Poison kills when its prompt is processed.
SUSPICION_WINDOW = 60.0


class LogicalRequest:
    """One client request, from its dispatch to its end."""

    def __init__(
        self,
        context: Context,
        connection: ServerConnection,
        exchange: Exchange,
        headers: Headers,
        path: str,
        *,
        native: bool,
    ) -> None:
        """`headers` go to each worker; `native`: on a format's own path, not bridged."""
        self.rid = exchange.rid
        self.state = State.OPEN
        #: Names under which workers know attempts of this request.
        self.attempt_rids: list[str] = []
        #: The attempt in progress.
        self.current: Attempt | None = None
        self._last: Attempt | None = None
        #: Since when all workers are busy or gone.
        self._busy_since: float | None = None
        #: The failure that the next token will have survived, for the metrics.
        self._moving = ""
        #: Somebody asked for this request to be aborted.
        self.abort_wished = False
        self.record = RequestRecord(exchange.rid, path, exchange.streaming, context.wall(), trio.current_time())
        self._context = context
        self._exchange = exchange
        self._headers = headers
        self._native = native
        self._downstream = Downstream(connection)
        self._client = connection.connection
        self._budget = AttemptBudget(context.config.migration_limit)

    async def serve(self) -> None:
        """Run the request to its end; never raises but for cancellation."""
        interval = self._context.config.sse_keep_alive_interval_secs
        if interval and self._exchange.streaming:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._downstream.keep_alive, interval)
                await self._guarded()
                nursery.cancel_scope.cancel()
        else:
            await self._guarded()

    async def _guarded(self) -> None:
        limit = self._context.config.request_timeout_secs
        try:
            if not limit:
                return await self._run()
            with trio.move_on_after(limit):
                return await self._run()
            self._leave()
            await self._fail(504, "request_timeout", f"the request did not end within {limit:g} s")
        except (ClientGone, ConnectionBroken):
            self._leave()
            self._end(Step.ABORT, Outcome.CLIENT_GONE, "client")
        except trio.Cancelled:
            self._leave()
            if self._downstream.ended:  # the client has its answer; only the worker's framing was still awaited
                self._end(Step.FINISH, Outcome.DONE, "proxy")
            else:
                self._end(Step.FAIL, Outcome.SHUTDOWN, "proxy")
                self._downstream.connection.break_off()
            raise
        except Exception:
            # A defect of ours: the server tells the client and reports it; the request must still have one end.
            self._leave()
            self.record.reason = "internal_error"
            self._end(Step.FAIL, Outcome.FAILED, "proxy")
            raise

    async def _run(self) -> None:
        try:
            while not self.abort_wished:
                worker = await self._choose()
                if worker is None:
                    return await self._give_up()
                failure = await self._try(worker)
                if failure is None:
                    return await self._finish()
                if not await self._survives(failure):
                    return None
                delay = self._budget.backoff(self._context.rng)
                await unless_gone(self._client, partial(trio.sleep, delay))
        except Unwanted:
            self.current = None
        except CannotComplete as exc:
            return await self._fail(502, exc.reason, f"{self._history()}; it cannot be continued: {exc.reason}")
        except SuspectedPoison:
            self._leave()
            words = "workers died under this request before its first token: it is suspected of killing them"
            return await self._fail(502, "suspected_poison", words)
        return await self._abort_here()

    async def _choose(self) -> Worker | None:
        """A worker for the next attempt; None if nobody is left to ask. Raises `SuspectedPoison`."""
        while True:
            worker = await self._pick()
            if worker is not None:
                return worker
            lap = self._budget.lap()
            if lap is None:
                if not self._patient():
                    return None
                lap = self._budget.again()
            self._budget = lap

    def _patient(self) -> bool:
        """Tokens are at stake and some worker is only busy: is there still time to ask again?"""
        now = trio.current_time()
        if not self._exchange.delivered or not self._budget.busy:
            return False
        if self._busy_since is None:
            self._busy_since = now
        return now < self._busy_since + self._context.config.busy_patience_secs

    async def _pick(self) -> Worker | None:
        fleet, exchange, excluded = self._context.fleet, self._exchange, self._budget.excluded

        def accept(worker: Worker) -> bool:
            return self.state is State.OPEN or exchange.compatible(worker.traits)

        if self._proven or not fleet.wary:
            return fleet.pick(excluded, accept)
        while True:
            try:
                return fleet.choose_now(exchange.fingerprint(), excluded, accept)
            except NotYet:
                await unless_gone(self._client, fleet.changed)

    @property
    def _proven(self) -> bool:
        """It cannot be what kills workers: it has given tokens, or is none of our format's requests."""
        return bool(self._exchange.delivered) or not self._native

    def _admit(self, worker: Worker) -> None:
        config = self._context.config
        verdict = self._exchange.admit(worker.traits)
        if verdict.migratable and not config.migration_limit:
            verdict = Verdict("migration_limit")
        elif verdict.migratable and self._too_long():
            verdict = Verdict("migration_max_seq_len")
        self._downstream.judge(verdict)
        self.record.migratable, self.record.reason = verdict.migratable, verdict.reason
        if not verdict.migratable:
            self._context.metrics.refused(verdict.reason)

    async def _try(self, worker: Worker) -> Failure | None:
        """One attempt; None if the engine has said its last word. Raises `SuspectedPoison`."""
        context, exchange = self._context, self._exchange
        if self.state is State.OPEN:
            self._admit(worker)
        record = AttemptRecord(worker.id, worker.url, self._name(), trio.current_time(), exchange.delivered)
        self.record.attempts.append(record)
        self._step(Step.DISPATCH)
        fingerprint = exchange.fingerprint() if context.fleet.wary else b""
        with (
            context.fleet.lease(worker),
            context.fleet.trial(worker, fingerprint, proven=self._proven) as trial,
        ):

            def on_token() -> None:
                trial.token()
                self._busy_since = None
                if self._moving:
                    context.metrics.migrated(self._moving, record.resumed_from)
                    self._moving = ""

            attempt = self.current = Attempt(context, exchange, self._downstream, worker, record.rid, on_token)
            try:
                failure = await attempt.run(self._headers)
                record.cause, record.detail = (failure.kind.value, failure.detail) if failure else (None, "")
            finally:
                self._close(attempt, record)
            if failure is None:
                trial.token()  # an answer that shows no tokens (opaque) clears as well
            elif self._suspicious(failure, record) and await unless_gone(self._client, attempt.worker_died):
                trial.fingerprint = exchange.fingerprint()
                if trial.died() is Finding.CONVICTED:
                    self._budget = self._budget.after(failure)
                    raise SuspectedPoison
        return failure

    def _suspicious(self, failure: Failure, record: AttemptRecord) -> bool:
        """May the request be what killed the worker, if that died?

        Of a unary answer that is only forwarded no token is seen, though it may have had thousands: only an early death
        speaks against it.
        """
        late = self._unseen and record.ended - record.started > SUSPICION_WINDOW
        return failure.rule.suspicious and not late

    @property
    def _unseen(self) -> bool:
        """The answer is only forwarded: how many tokens it has is not known here."""
        return not self._exchange.verdict.migratable and not self._exchange.streaming

    def _name(self) -> str:
        """The rid for the next attempt: the client's own until a worker may know it, then fresh ones.

        Also a fresh one if the client's own is a prefix of another live rid or extends one: SGLang matches aborts by
        prefix, so that to abort one of the two attempts would be to abort both.
        """
        live = self._context.live
        if not self.attempt_rids and not (self._exchange.verdict.migratable and live.related(self.rid)):
            return self.rid
        name = live.fresh()
        live.remember(name)
        return name

    def _close(self, attempt: Attempt, record: AttemptRecord) -> None:
        record.close(trio.current_time(), attempt.reader)
        if attempt.sent:
            self.attempt_rids.append(record.rid)
            record.tokens = self._exchange.attempt_tokens
            if record.tokens:
                self._step(Step.PROGRESS)
        self._context.metrics.attempt_ended(record)

    # -- aborts ----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Somebody wishes this request to end: its current worker is told, and nothing is resumed."""
        self.abort_wished = True
        if self.current is not None:
            self.current.unwanted()
            if self.current.sent:
                self._context.chores.start_soon(self._tell_until_ended, self.current)

    async def _tell_until_ended(self, attempt: Attempt) -> None:
        """An abort may overtake the request that it means; say it again while the attempt goes on."""
        for _ in range(ABORT_REPEATS):
            await tell(self._context, attempt.worker, self._context.format.abort(attempt.rid))
            await trio.sleep(ABORT_INTERVAL)
            if self.current is not attempt:
                return

    def _leave(self) -> None:
        """Give the current attempt up: its worker, which may still live, is told to stop."""
        attempt, self.current = self.current, None
        if attempt is None or not attempt.sent or not self._native:
            return
        if not self._context.live.related(attempt.rid):  # a related one is not migratable, and kept its name
            self._context.chores.start_soon(
                tell, self._context, attempt.worker, self._context.format.abort(attempt.rid)
            )

    # -- after a failure -------------------------------------------------------------------------------------------

    async def _survives(self, failure: Failure) -> bool:
        """Decide what a failure means; True if another attempt is to be made, else the request has ended."""
        rule = failure.rule
        attempt = self.current
        assert attempt is not None
        if rule.penalty:
            self._context.fleet.report(attempt.worker, False, failure.detail, failure.kind.value)
        if rule.abort:
            self._leave()
        self.current, self._last = None, attempt
        if failure.kind not in _NOTHING_TO_COMPLETE and await self._completed_here(failure):
            return False
        if self.abort_wished:
            return True  # `_run` ends it
        if rule.action is Action.RELAY:
            await self._relay_engine(attempt, failure)
            return False
        self._budget = self._budget.after(failure)
        reason = self._forbids(failure)
        if not reason:
            self._moving = failure.kind.value if rule.counts else self._moving
            self._step(Step.CUT)
            return True
        if failure.kind is Kind.FAILED and not self._exchange.delivered:
            await self._relay_engine(attempt, failure)
        else:
            await self._fail(_STATUS.get(failure.kind, 502), reason, self._history())
        return False

    def _forbids(self, failure: Failure) -> str:
        """Why no attempt may follow, a bounded label; "" if one may."""
        if failure.rule.action is Action.MIGRATE and not self._exchange.verdict.migratable:
            return self._exchange.verdict.reason
        if self._budget.spent:
            return "migration_limit"
        if failure.rule.action is Action.MIGRATE and self._too_long():
            return "migration_max_seq_len"
        return ""

    def _too_long(self) -> bool:
        limit = self._context.config.migration_max_seq_len
        return limit is not None and self._exchange.prompt_tokens + self._exchange.delivered > limit

    # -- ends ------------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """The engine has said its last word, and it is an answer."""
        assert self.current is not None
        self._context.fleet.report(self.current.worker, True)
        self.current = None
        if not self._downstream.ended:
            await self._downstream.answer(self._exchange.answer(trio.current_time()))
        if self._exchange.end is End.ABORTED:
            self._end(Step.ABORT, Outcome.ABORTED, "worker")
        else:
            self._end(Step.FINISH, Outcome.DONE, "worker")

    async def _completed_here(self, failure: Failure) -> bool:
        """True if nothing was left to generate and the request has ended, one way or the other."""
        try:
            rest = self._exchange.complete(trio.current_time())
        except CannotComplete as exc:
            words = f"{failure}; the request cannot be continued because of {exc.reason}"
            await self._fail(_STATUS.get(failure.kind, 502), exc.reason, words)
            return True
        if rest is None:
            return False
        await self._give(rest)
        self._end(Step.FINISH, Outcome.COMPLETED, "proxy")
        return True

    async def _abort_here(self) -> None:
        """An abort was wished while no worker had the request."""
        rest = self._exchange.abort(trio.current_time())
        if rest is None:
            await self._fail(502, "aborted", "the request was aborted")
            return
        await self._give(rest)
        self._end(Step.ABORT, Outcome.ABORTED, "proxy")

    async def _give(self, rest: bytes) -> None:
        """Hand over the end of an answer that was made here."""
        if self._exchange.streaming:
            await self._downstream.send(self._downstream.finish(rest))
        else:
            await self._downstream.answer(self._exchange.answer(trio.current_time()))

    async def _relay_engine(self, attempt: Attempt, failure: Failure) -> None:
        """The engine's own error is the answer, unless tokens were delivered already: they would be lost in silence."""
        exchange, downstream = self._exchange, self._downstream
        in_stream = attempt.reader is not None and attempt.reader.reading is Reading.EVENTS
        if exchange.delivered or (downstream.head_sent and not in_stream):
            await self._fail(_STATUS.get(failure.kind, 502), "no_survivor", self._history())
            return
        if exchange.streaming and in_stream:
            await downstream.send(downstream.finish(exchange.last_words()))
        else:
            await downstream.answer(exchange.answer(trio.current_time()))
        self.record.reason = self.record.reason or failure.kind.value
        self._end(Step.FINISH, Outcome.ENGINE_ERROR, "worker")

    async def _give_up(self) -> None:
        """Every worker was asked, or there is none."""
        history = self._budget.history
        if not history:
            await self._fail(503, "no_worker", "no worker is available")
        elif history[-1].kind in (Kind.BUSY, Kind.FAILED) and self._last is not None:
            await self._relay_engine(self._last, history[-1])
        elif any(failure.kind is Kind.UNFIT for failure in history):
            await self._fail(502, "continuation_refused", self._history())
        else:
            await self._fail(_STATUS.get(history[-1].kind, 502), "no_survivor", self._history())

    async def _fail(self, status: int, reason: str, message: str) -> None:
        """Tell the client that there is no complete answer, so that it cannot be overlooked."""
        exchange, downstream = self._exchange, self._downstream
        self.record.reason = reason
        if downstream.head_sent:
            await downstream.fail(exchange.failure_event(status, reason, message))
        else:
            await downstream.answer(exchange.failure(status, reason, message, bool(self.attempt_rids)))
        self._end(Step.FAIL, Outcome.FAILED, "proxy")

    def _history(self) -> str:
        return "; ".join(map(str, self._budget.history[-HISTORY_SHOWN:]))

    def _step(self, step: Step) -> None:
        self.state = advance(self.state, step)

    def _end(self, step: Step, outcome: Outcome, closed_by: str) -> None:
        """The one end: its trace row, its log line, its metrics."""
        self._step(step)
        record, exchange, metrics = self.record, self._exchange, self._context.metrics
        record.outcome, record.closed_by, record.status = outcome, closed_by, self._downstream.status
        record.prompt_tokens = exchange.prompt_tokens
        record.completion_tokens = None if self._unseen else exchange.delivered
        record.cached_tokens, record.ended = exchange.cached_tokens, trio.current_time()
        if self._native:
            metrics.request_ended(outcome.value, record.ttft, exchange.cached_tokens)
            publish(record, self._context.trace, self._budget.migrations)
