"""A logical request: its attempts, one after the other, until it has an end that the client can trust."""

from __future__ import annotations

from functools import partial

import trio

from dyn_relay.fleet.poison import Finding, SuspectedPoison, Trial
from dyn_relay.fleet.worker import Worker
from dyn_relay.formats.base import CannotComplete, Exchange
from dyn_relay.formats.traits import UNKNOWN, Traits
from dyn_relay.http11.headers import Headers
from dyn_relay.net import ConnectionBroken
from dyn_relay.relay.affinity import key_of
from dyn_relay.relay.attempt import Attempt
from dyn_relay.relay.budget import limited, too_long
from dyn_relay.relay.choice import Choice, Pair
from dyn_relay.relay.context import Context
from dyn_relay.relay.downstream import Downstream
from dyn_relay.relay.ending import Ending
from dyn_relay.relay.failure import Action, Failure, Kind
from dyn_relay.relay.farewell import abort, farewell
from dyn_relay.relay.leg import beside
from dyn_relay.relay.queue import Crowded, Entry
from dyn_relay.relay.record import AttemptRecord, Outcome, RequestRecord
from dyn_relay.relay.state import Step
from dyn_relay.relay.turnstile import Place
from dyn_relay.relay.waiting import ClientGone, Unwanted, unless_gone

#: Failures after which there is nothing to finish here: the engine was never asked, or would not take it.
_NOTHING_TO_COMPLETE = (Kind.CONNECT, Kind.BUSY, Kind.UNFIT)
#: Seconds. Poison kills when its prompt is processed.
SUSPICION_WINDOW = 60.0


class LogicalRequest:
    """One client request, from its dispatch to its end."""

    def __init__(
        self,
        context: Context,
        downstream: Downstream,
        exchange: Exchange,
        headers: Headers,
        path: str,
        *,
        native: bool,
        size: int,
        entry: Entry | None,
        safe: bool = False,
    ) -> None:
        """`headers` go to each worker; `native`: on a format's own path, not bridged; `safe`: it changes nothing.

        `size`: of the client's body, in bytes; `entry`: where it waits for its turn, if anywhere.
        """
        self.rid = exchange.rid
        #: What its client calls it, where that is not its rid: it, too, may be used to abort it.
        self.alias = ""
        #: Names under which workers may know attempts of this request, beside its own rid.
        self.names: list[str] = []
        #: Somebody asked for this request to be aborted.
        self.abort_wished = False
        self.record = RequestRecord(exchange.rid, path, exchange.streaming, context.wall(), trio.current_time())
        self._context = context
        self._exchange = exchange
        self._headers = headers
        self._native = native
        self._safe = safe
        self._size = size
        self._entry = entry
        self._downstream = downstream
        self._ending = Ending(context, exchange, self._downstream, self.record, native=native)
        self._client = downstream.client
        key = key_of(headers, exchange, context.config)
        self._choice = Choice(context, exchange, self.record, self._client, key, native=native)
        #: The attempt in progress, and the one that failed last.
        self._current: Attempt | None = None
        self._last: Attempt | None = None

    async def serve(self) -> None:
        """Run the request to its end. Raises what is a defect of ours, after the request has ended."""
        interval = self._context.config.sse_keep_alive_interval_secs
        if not interval or not self._exchange.streaming:
            return await self._guarded()
        self._admit(UNKNOWN)  # the head may have to go out before any worker is chosen
        errors: list[Exception] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._downstream.keep_alive, interval)
            try:
                await self._guarded()
            except Exception as exc:  # carried out of the nursery as it is
                errors.append(exc)
            nursery.cancel_scope.cancel()
        if errors:
            raise errors[0]
        return None

    async def _guarded(self) -> None:
        ending = self._ending
        recovery = self._choice.recovery
        try:
            if not recovery.limited and await self._run():
                return  # as almost always: no time limit came into being
            with recovery.scope():
                await self._run(limited=True)
                return
            self._leave()
            if not self._answered():
                await ending.timed_out(*recovery.expired)
        except (ClientGone, ConnectionBroken):
            self._leave()
            ending.left()
        except trio.Cancelled:
            self._leave()
            if not self._answered():
                ending.close(Step.FAIL, Outcome.SHUTDOWN, "proxy")
                self._downstream.break_off()
            raise
        except Exception:
            # A defect of ours: the server tells the client and reports it; the request must still have one end.
            self._leave()
            self.record.error = "internal_error"
            ending.close(Step.FAIL, Outcome.FAILED, "proxy")
            raise
        finally:
            recovery.release()

    def _answered(self) -> bool:
        """Was the request interrupted when its client had the whole answer, and only the framing was awaited?"""
        if self._downstream.ended:
            self._ending.close(Step.FINISH, Outcome.DONE, "worker")
        return self._downstream.ended

    async def _run(self, *, limited: bool = False) -> bool:
        """Serve until the request has ended; False as soon as its time is limited, unless that is known already."""
        ending = self._ending
        try:
            if not self.record.attempts:
                await self._enter()
            return await self._attempts(limited)
        except Unwanted:
            self._current = None
            await ending.abort()
        except CannotComplete as exc:
            await ending.cannot_continue(exc.reason, self._choice.budget.history)
        except SuspectedPoison:
            await ending.poison()
        except Crowded as exc:
            self._admit(UNKNOWN)
            await ending.crowded(exc)
        return True

    async def _attempts(self, limited: bool) -> bool:
        """See `_run`."""
        choice, ending = self._choice, self._ending
        while not self.abort_wished:
            if self.record.started_work and self._context.fleet.calm.disturbed:
                await choice.wait(self._context.fleet.calm.wait)
            pair = await choice.pair()
            if pair is None:
                if not self.record.attempts:
                    self._admit(UNKNOWN)  # for the header of what is about to be said
                unfit = choice.candidates.unfit(choice.budget.excluded)
                await ending.nobody_left(self._last, choice.budget.history, unfit)
                return True
            failure = await self._try(pair)
            if failure is not None and failure.kind is Kind.STALE and self._may_redial(pair):
                # Under another name: the worker may have read the request, and be at work on it.
                self._leave()
                self.record.step(Step.CUT)
                failure = await self._try(pair, again=True)
            if failure is None:
                assert self._last is not None
                choice.recovery.release()
                await ending.finish(self._last)
                return True
            if not await self._survives(failure):
                return True
            if pause := choice.budget.backoff(self._context.rng):
                await choice.wait(partial(trio.sleep, pause))
            if choice.recovery.limited and not limited:
                return False
        await ending.abort()
        return True

    async def _enter(self) -> None:
        """Wait for the request's turn. Raises `Crowded`, `ClientGone`, `Unwanted`."""
        if self._entry is not None:
            try:
                await self._choice.wait(self._entry.wait)
            finally:
                self.record.queued = trio.current_time() - self.record.started

    # -- before it -------------------------------------------------------------------------------------------------

    def _may_redial(self, pair: Pair) -> bool:
        fleet = self._context.fleet
        return pair.target.worker in fleet.staying and not (self.abort_wished or (fleet.paused and self._native))

    @property
    def _repeatable(self) -> bool:
        """It may be sent twice: a stale connection does not tell whether the worker has read it."""
        return self._safe or self._exchange.verdict.migratable

    def _admit(self, traits: Traits) -> None:
        """Judge the request by the worker that will see it first."""
        exchange, record = self._exchange, self.record
        tokens = exchange.prompt_tokens + exchange.delivered
        verdict = exchange.verdict = limited(exchange.admit(traits), self._context.config, tokens, self._size)
        self._downstream.judge(verdict)
        record.migratable, record.refusal = verdict.migratable, verdict.reason
        # What is not migratable goes out as it is: under the client's name, or under one that only its worker knows.
        record.rid = self.rid if self._exchange.named or verdict.migratable else ""

    # -- one attempt -----------------------------------------------------------------------------------------------

    async def _try(self, pair: Pair, *, again: bool = False) -> Failure | None:
        """One attempt; None if the engine has said its last word. Raises `SuspectedPoison`, `Unwanted`.

        `again`: at the same worker, whose idle connection had gone stale.
        """
        context, exchange, choice, target = self._context, self._exchange, self._choice, pair.target
        fleet, worker = context.fleet, target.worker
        if not self.record.started_work:
            choice.first = worker
            self._admit(worker.traits)
        record = AttemptRecord(worker.id, worker.url, self._name(), trio.current_time(), exchange.delivered)
        self.record.attempts.append(record)
        self.record.step(Step.DISPATCH)
        rank = choice.candidates.rank(target)
        fingerprint = exchange.fingerprint() if fleet.wary else b""
        lease = fleet.lease(target, exchange.generations, lambda: exchange.prompt_tokens + exchange.delivered)
        with (
            lease,
            fleet.trial(*pair.workers, fingerprint=fingerprint, proven=choice.proven) as trial,
            beside(context, exchange, choice, pair) as leg,
        ):

            def on_token() -> None:
                trial.token()
                choice.progressed(record.resumed_from)

            if leg is not None:
                record.prefill, record.prefill_url = leg.worker.id, leg.worker.url
            record.aggregated = choice.prefills is not None and leg is None
            if record.aggregated:
                context.fallback.note(on=True)
                self._downstream.aggregate()
            attempt = self._current = Attempt(
                *(context, exchange, self._downstream, target, rank, record.rid, on_token),
                reuse=self._repeatable and leg is None,
                again=again,
                leg=leg,
            )
            try:
                failure = await attempt.run(self._headers)
                record.cause, record.detail = (failure.kind.value, failure.words) if failure else (None, "")
            finally:
                self._close(attempt, record)
            if leg is not None and leg.answer is not None:
                context.fallback.note(on=False)
            if failure is None:
                trial.token()  # an answer that shows no tokens (opaque) clears as well
                fleet.report(worker, True)
                if leg is not None and leg.answer is not None and leg.answer.status < 400:
                    fleet.report(leg.worker, True)
                elif leg is not None and leg.failure is not None:
                    fleet.report(leg.worker, False, leg.failure.words, leg.failure.kind.value)
                self._current, self._last = None, attempt
                return None
            if failure.kind is Kind.INTERRUPTED and self._resumes:
                fleet.calm.disturb()
            blamed = attempt.blamed(failure)
            if failure.rule.penalty and not self.abort_wished:
                refused = failure.kind is Kind.KEY
                fleet.report(blamed.worker, False, failure.words, failure.kind.value, key_refused=refused)
            if failure.kind is Kind.BUSY:
                fleet.full(blamed, attempt.retry_after)
            if self._suspicious(failure, record):
                await self._investigate(trial, blamed.worker)
        return failure

    async def _investigate(self, trial: Trial, suspected: Worker) -> None:
        """The attempt failed before its first token: did its worker die of it? Raises `SuspectedPoison`."""
        if not await unless_gone(self._client, partial(self._context.fleet.lives, suspected)):
            trial.fingerprint = self._exchange.fingerprint()
            if trial.died(suspected.id) is Finding.CONVICTED:
                self._leave()
                raise SuspectedPoison

    def _suspicious(self, failure: Failure, record: AttemptRecord) -> bool:
        """May the request be what killed the worker, if that died?

        Of an answer that is only forwarded no token is seen, though it may have had thousands: only an early death
        speaks against it.
        """
        late = self._ending.unseen and record.ended - record.started > SUSPICION_WINDOW
        return failure.rule.suspicious and not self._choice.proven and not late

    def _name(self) -> str:
        """The rid for the next attempt: the client's own until a worker may know it, then fresh ones.

        Also a fresh one if the client's own is a prefix of another live rid or extends one: SGLang matches aborts by
        prefix, so that to abort one of the two attempts would be to abort both. Also if workers are still being told to
        drop what had the name before: its client has left and come back. A request that is not migratable has the
        client's name at every worker.
        """
        live = self._context.live
        taken = self.record.started_work or live.related(self.rid) or live.dropped(self.rid)
        renamed = self._exchange.verdict.migratable and taken
        if not renamed or not self._native:
            return self.record.rid
        name = live.fresh()
        live.remember(name)
        self.names.append(name)
        return name

    def _close(self, attempt: Attempt, record: AttemptRecord) -> None:
        record.close(trio.current_time(), attempt.reader)
        if attempt.sent:
            self.record.started_work = True
            record.tokens = self._exchange.attempt_tokens
            if record.tokens:
                self.record.step(Step.PROGRESS)
        if self._native:
            self._context.metrics.attempt_ended(record)

    # -- aborts ----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Somebody wishes this request to end: its current worker is told, and nothing is resumed."""
        self.abort_wished = True
        self._choice.interrupt()
        if self._current is not None:
            self._current.unwanted()
            if self._current.sent:
                attempt = self._current
                self._context.chores.start(partial(abort, self._context, attempt, lambda: self._current is attempt))

    # -- taken away ------------------------------------------------------------------------------------------------

    def movable(self, worker: Worker) -> bool:
        """The attempt is there, and another worker could go on with it at once."""
        attempt = self._current
        return attempt is not None and attempt.uses(worker) and self._movable(attempt)

    @property
    def permitted(self) -> bool:
        """It has a permit for a continuation, which has no token yet."""
        return self._choice.recovery.holds

    def move(self, worker: Worker, permit: Place | None = None) -> None:
        """`worker` is to be empty: if the request is `movable`, end the attempt; the next one has the permit.

        None: the one that it has.
        """
        if not self.movable(worker):
            if permit is not None:
                permit.leave()
            return
        attempt = self._current
        assert attempt is not None
        if permit is not None:
            self._choice.recovery.take(permit)
        attempt.part(partial(self._may_part, attempt, worker))

    def hold(self) -> None:
        """Everything is paused: an attempt that is not sent yet never is."""
        if self._current is not None and not self._current.sent:
            self._current.part(lambda: True)

    def _may_part(self, attempt: Attempt, worker: Worker) -> bool:
        """Is the request `movable` still, now that its attempt can be ended? If not, others can use the permit."""
        if not self._movable(attempt):
            self._choice.recovery.release()
            return False
        self._choice.left = worker
        return True

    def _movable(self, attempt: Attempt) -> bool:
        exchange, fleet = self._exchange, self._context.fleet
        tokens = exchange.prompt_tokens + exchange.delivered
        if attempt.sent and (not exchange.leavable or too_long(self._context.config, tokens)):
            return False
        return not (self.abort_wished or fleet.paused) and self._choice.has_room()

    def _leave(self) -> list[trio.Event]:
        """Give the current attempt up: its workers, which may still live, are told to stop."""
        attempt, self._current = self._current, None
        return farewell(self._context, attempt)

    # -- after a failure -------------------------------------------------------------------------------------------

    async def _survives(self, failure: Failure) -> bool:
        """Decide what a failure means; True if another attempt is to be made, else the request has ended."""
        attempt, ending = self._current, self._ending
        assert attempt is not None
        if attempt.paired and not self._exchange.verdict.migratable:
            # The next attempt has the same name, and may go to one of the two: it must not be taken for this one.
            for told in self._leave():
                await unless_gone(self._client, told.wait)
        elif failure.rule.abort or attempt.paired:
            self._leave()
        self._current, self._last = None, attempt
        self._choice.budget = self._choice.budget.after(failure)
        history = self._choice.budget.history
        if failure.rule.action is Action.RELAY or self._engine_has_spoken(failure, attempt):
            await ending.relay_engine(attempt, history)
            return False
        if failure.kind not in _NOTHING_TO_COMPLETE:
            if await ending.complete(history):
                return False
            self.record.settle(self._exchange.delivered)
        if self.abort_wished:
            return True  # `_run` ends it
        if failure.kind is Kind.INTERRUPTED and not self._resumes:
            await ending.abort()
            return False
        reason = self._forbids(failure)
        if not reason:
            self._choice.recovery.begin(failure)
            self.record.step(Step.CUT)
            return True
        if failure.kind is Kind.INTERRUPTED:
            await ending.abort()  # it was somebody's wish, after all
        elif failure.kind is Kind.FAILED and not self._exchange.delivered:
            await ending.relay_engine(attempt, history)
        else:
            await ending.failed(reason, history)
        return False

    @property
    def _resumes(self) -> bool:
        """What somebody has aborted at its engine goes on elsewhere."""
        return self._context.config.on_abort == "resume"

    def _engine_has_spoken(self, failure: Failure, attempt: Attempt) -> bool:
        """A request that cannot be continued has failed in the engine's own words: the client gets these."""
        spoken = failure.kind is Kind.FAILED and not self._exchange.verdict.migratable
        return spoken and self._ending.may_relay(attempt)

    def _forbids(self, failure: Failure) -> str:
        """Why no attempt may follow, a bounded label; "" if one may."""
        if failure.rule.action is Action.MIGRATE and not self._exchange.verdict.migratable:
            return self._exchange.verdict.reason
        if self._choice.budget.spent:
            return "migration_limit"
        tokens = self._exchange.prompt_tokens + self._exchange.delivered
        if failure.rule.action is Action.MIGRATE and too_long(self._context.config, tokens):
            return "migration_max_seq_len"
        return ""
