"""One attempt: one dispatch of a logical request to one worker, from the dial to the last byte of its answer."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from dyn_relay.fleet.worker import Worker
from dyn_relay.formats.base import End, Exchange, Outbound, Reading
from dyn_relay.http11.client import Upstream, fetch, request_parts
from dyn_relay.http11.errors import BadResponse, EventTooLarge
from dyn_relay.http11.headers import Headers
from dyn_relay.net import ConnectFailed, Connection, ConnectionBroken, Ended
from dyn_relay.relay.context import Context
from dyn_relay.relay.downstream import Downstream
from dyn_relay.relay.failure import Failure, Kind, Phase
from dyn_relay.relay.reader import AnswerReader

T = TypeVar("T")

#: Seconds to wait for the end of the framing after the engine's last word, so that the connection can be reused.
TAIL_PATIENCE = 0.1
#: Seconds that a worker which cut an attempt gets to show that it lives.
LIFE_SIGN_PATIENCE = 2.0
#: Bodies above this are sent with an eye on the client: the worker may be slow to take them.
LARGE_BODY = 256 * 1024

_KINDS = {End.REFUSED: Kind.REFUSED, End.BUSY: Kind.BUSY, End.FAILED: Kind.FAILED, End.GARBAGE: Kind.GARBAGE}

#: Failures that are a whole, well-formed answer: the connection can serve another request.
_ANSWERS = (Kind.REFUSED, Kind.UNFIT, Kind.BUSY, Kind.FAILED)


class ClientGone(Exception):
    """The client closed its connection: nobody wants the answer any more."""


class Unwanted(Exception):
    """The request was aborted before the attempt was sent."""


async def unless_gone(client: Connection, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work()`, given up as soon as the client leaves. Raises `ClientGone`."""
    results: list[T] = []
    errors: list[Exception] = []
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            await client.wait_closed()
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        try:
            results.append(await work())
        except Exception as exc:  # carried out of the nursery as it is, not as a group
            errors.append(exc)
        nursery.cancel_scope.cancel()
    if errors:
        raise errors[0]
    if not results:
        raise ClientGone
    return results[0]


class Attempt:
    """One dispatch. `run` returns None when the engine has said its last word, else the failure."""

    def __init__(
        self,
        context: Context,
        exchange: Exchange,
        downstream: Downstream,
        worker: Worker,
        rid: str,
        on_token: Callable[[], None],
    ) -> None:
        self.worker = worker
        self.rid = rid
        #: The request may have reached the worker: only then can it have a use for an abort.
        self.sent = False
        self.reader: AnswerReader | None = None
        self._context = context
        self._exchange = exchange
        self._downstream = downstream
        self._on_token = on_token
        self._client = downstream.connection.connection
        self._dialling = trio.CancelScope()
        self._sent_at = 0.0

    def unwanted(self) -> None:
        """The request was aborted: if the attempt is not sent yet, it never is."""
        self._dialling.cancel()

    async def run(self, headers: Headers) -> Failure | None:
        """Dial, send, read. `headers` go to the worker with the body.

        Raises `ClientGone`, `Unwanted`, `CannotComplete`.
        """
        outbound: Outbound | None = None
        for redialled in (False, True):
            try:
                upstream = await self._dial(fresh=redialled)
            except ConnectFailed as exc:
                if not redialled:
                    return self._failure(Kind.CONNECT, Phase.DIAL, str(exc))
                # The reused connection ended with our request on it, and nobody listens there any more: that was no
                # idle connection's age, the worker died with the request in its hands.
                return self._failure(Kind.CUT, Phase.SENT, str(exc))
            try:
                if outbound is None:
                    outbound = self._exchange.dispatch(self.worker.traits, self.rid, trio.current_time())
                failure = await self._converse(upstream, outbound, headers)
            except BaseException:
                upstream.discard()
                raise
            if failure is None or failure.kind is not Kind.STALE:
                return failure
        raise AssertionError("a fresh connection is never stale")

    async def _dial(self, *, fresh: bool) -> Upstream:
        pool, origin = self._context.pool, self.worker.origin
        upstream = None if fresh else pool.take(origin)
        if upstream is not None:
            return upstream
        with self._dialling if not self.sent else trio.CancelScope():
            return await unless_gone(self._client, lambda: pool.acquire(origin, fresh=True))
        raise Unwanted

    async def _converse(self, upstream: Upstream, outbound: Outbound, headers: Headers) -> Failure | None:
        reader = self.reader = AnswerReader(
            self._exchange,
            self._downstream,
            no_body=outbound.method == "HEAD",
            max_event=self._context.config.max_event_size,
            on_token=self._on_token,
        )
        self.sent = True
        self._sent_at = trio.current_time()
        failure = await self._send(upstream, outbound, headers) or await self._read(upstream, reader)
        if failure is None and not reader.response.complete:
            await self._read_tail(upstream, reader)
        if failure is None or failure.kind in _ANSWERS:
            upstream.release(reader.response)
        else:
            upstream.discard()
        return failure

    async def _send(self, upstream: Upstream, outbound: Outbound, headers: Headers) -> Failure | None:
        own: Headers = [(b"content-type", outbound.content_type)] if outbound.content_type else []
        parts = request_parts(self.worker.origin, outbound.method, outbound.path, [*own, *headers], outbound.body)

        async def send() -> None:
            for part in parts:
                await upstream.connection.send(part)

        try:
            with trio.fail_after(self._context.config.stall_timeout_secs or math.inf):
                if len(outbound.body) > LARGE_BODY:
                    await unless_gone(self._client, send)
                else:
                    await send()
        except ConnectionBroken as exc:
            return self._failure(Kind.STALE if upstream.reused else Kind.CUT, Phase.SENT, str(exc))
        except trio.TooSlowError:
            return self._failure(Kind.STALL, Phase.SENT, "the worker does not take the request")
        return None

    async def _read(self, upstream: Upstream, reader: AnswerReader) -> Failure | None:
        """Read the answer, handing the steady state to the pump; wake only at deadlines."""
        relay = self._context.network.relay
        silence = _Silence(self._context, self._exchange, self._sent_at)
        while True:
            deadline = silence.deadline(reader)
            ended: Ended | None = None
            try:
                with trio.CancelScope(deadline=deadline):
                    ended = await relay(upstream.connection, self._client, reader)
            except (BadResponse, EventTooLarge) as exc:
                return self._failure(Kind.GARBAGE, self._phase(reader), str(exc))
            if ended is not None:
                return await self._ended(ended, upstream, reader)
            kind = await self._judge_silence(silence, reader)
            if kind is not None:
                return self._failure(kind, self._phase(reader), silence.words(kind))

    async def _ended(self, ended: Ended, upstream: Upstream, reader: AnswerReader) -> Failure | None:
        if ended is Ended.SINK_GONE:
            raise ClientGone
        if ended is Ended.EOF:
            rest = reader.eof()
            if rest:
                await self._downstream.send(rest)
        if reader.done:
            end = self._exchange.end
            if end in _KINDS:
                return self._failure(self._kind(end), self._phase(reader), self._exchange.detail)
            if end is not None or reader.reading is Reading.OPAQUE:
                return None
        if upstream.reused and not reader.response.bytes_seen:
            return self._failure(Kind.STALE, Phase.SENT, "")
        return self._failure(
            Kind.CUT, self._phase(reader), "reset" if ended is Ended.SOURCE_BROKEN else "end of stream"
        )

    async def _judge_silence(self, silence: _Silence, reader: AnswerReader) -> Kind | None:
        now = trio.current_time()
        if silence.no_first_token(reader, now):
            return Kind.FIRST_TOKEN
        if now < silence.deadline(reader):
            return None  # tokens came meanwhile
        alive = await unless_gone(self._client, self._ask_health)
        return silence.judge(reader, alive)

    async def _ask_health(self) -> bool:
        """Does the worker pass a probe? A busy engine is not a dead one."""
        with trio.move_on_after(self._context.config.stall_timeout_secs):
            return (await self._context.fleet.ask(self.worker)).ok
        return False

    async def worker_died(self) -> bool:
        """After a cut: is it the worker that is gone, and not just this connection? Takes at most a few seconds.

        The info endpoint answers from the HTTP process's memory, also while the engine is busy.
        """
        context = self._context
        try:
            await fetch(
                context.pool, self.worker.origin, "GET", context.format.info_paths[0], timeout=LIFE_SIGN_PATIENCE
            )
        except (ConnectFailed, ConnectionBroken, BadResponse, trio.TooSlowError):
            return True
        return False

    async def _read_tail(self, upstream: Upstream, reader: AnswerReader) -> None:
        """The engine's last word is there, the end of its framing is not: read on briefly, to keep the connection."""
        with trio.move_on_after(TAIL_PATIENCE):
            try:
                while not reader.response.complete:
                    data = await upstream.connection.receive()
                    if not data:
                        return
                    reader.response.feed(data)
            except (ConnectionBroken, BadResponse):
                return

    def _kind(self, end: End) -> Kind:
        continued = self._exchange.delivered > self._exchange.attempt_tokens
        return Kind.UNFIT if end is End.REFUSED and continued else _KINDS[end]

    def _phase(self, reader: AnswerReader) -> Phase:
        if self._exchange.attempt_tokens:
            return Phase.TOKENS
        return Phase.ANSWERED if reader.response.bytes_seen else Phase.SENT

    def _failure(self, kind: Kind, phase: Phase, detail: str) -> Failure:
        return Failure(kind, phase, self.worker.id, detail)


class _Silence:
    """How long one attempt may be silent.

    Before the first token a healthy worker may take as long as it likes (its queue may be long), unless
    --first-token-timeout-secs says otherwise. After it, a worker whose health endpoint answers gets one more stall
    timeout: stock SGLang's can answer 200 long after its scheduler died. A refused (not migratable) request is only
    ever given up when its worker does not answer either: nobody could do better.
    """

    def __init__(self, context: Context, exchange: Exchange, sent_at: float) -> None:
        self._config = context.config
        self._exchange = exchange
        self._sent_at = sent_at
        self._checked_at = sent_at
        self._granted_for = -1.0

    def deadline(self, reader: AnswerReader) -> float:
        """When to wake up and look."""
        stall = self._config.stall_timeout_secs
        deadline = math.inf
        if stall:
            deadline = max(self._heard(reader), self._checked_at) + stall + self._exchange.stall_allowance()
        first = self._config.first_token_timeout_secs
        if first and reader.first_token is None and self._exchange.verdict.migratable:
            deadline = min(deadline, self._sent_at + first)
        return deadline

    def no_first_token(self, reader: AnswerReader, now: float) -> bool:
        """True once --first-token-timeout-secs is over."""
        first = self._config.first_token_timeout_secs
        return (
            bool(first)
            and reader.first_token is None
            and self._exchange.verdict.migratable
            and now >= self._sent_at + first
        )

    def judge(self, reader: AnswerReader, alive: bool) -> Kind | None:
        """The worker was asked; is the silence a stall?"""
        self._checked_at = trio.current_time()
        if not alive:
            return Kind.STALL
        if reader.first_token is None or not self._exchange.verdict.migratable:
            return None
        heard = self._heard(reader)
        if self._granted_for == heard:
            return Kind.STALL
        self._granted_for = heard
        return None

    def words(self, kind: Kind) -> str:
        """For the failure's detail."""
        if kind is Kind.FIRST_TOKEN:
            return f"no token within {self._config.first_token_timeout_secs:g} s"
        return f"no token for {self._config.stall_timeout_secs:g} s"

    def _heard(self, reader: AnswerReader) -> float:
        heard = reader.last_token if self._exchange.verdict.migratable else reader.last_event
        return heard if heard is not None else self._sent_at
