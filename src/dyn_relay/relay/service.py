"""The relay's door: a client's request comes in, becomes a logical request, and is served to its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import trio

from dyn_relay.fleet.worker import Worker
from dyn_relay.formats.base import Answer, Bundle, Exchange, Explanation, NativeRequest, Outbound, Rejected
from dyn_relay.formats.opaque import OpaqueExchange
from dyn_relay.formats.traits import Traits
from dyn_relay.http11.errors import error_body
from dyn_relay.http11.headers import Headers, get
from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.relay.context import Context
from dyn_relay.relay.downstream import MIGRATABLE_HEADER, Downstream
from dyn_relay.relay.explain import explained
from dyn_relay.relay.headers import to_worker
from dyn_relay.relay.orders import Said, tell, tell_all
from dyn_relay.relay.queue import GENERATING, Entry
from dyn_relay.relay.record import Outcome, RequestRecord, publish
from dyn_relay.relay.request import LogicalRequest
from dyn_relay.relay.split import SplitRequest

#: RFC 9110, 9.2.1.
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
#: A worker of a pair would wait for the other half of such a request until its timeout.
_NOT_FOR_PAIRS = Answer(501, error_body(501, "of all that generates, prefill/decode pairs serve /generate alone"))
METHOD_NOT_ALLOWED = Answer(405, b'{"detail":"Method Not Allowed"}')


class Relay:
    """Serves every request that is not the proxy's own."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def paths(self) -> frozenset[str]:
        """The format's own paths: those whose requests outlive their workers."""
        return self._context.format.paths

    def explain(self, request: Request, traits: Traits, after: int) -> Explanation:
        """What would become of a request with this body and these headers. Raises `ValueError`: "FIELD: ..."."""
        context = self._context
        [path] = context.format.paths
        native = NativeRequest("POST", path, request.headers, request.body)
        return explained(context.format, context.config, native, traits, after)

    @property
    def stock(self) -> Traits:
        """Those of a worker of which nothing else is known."""
        return self._context.format.stock

    async def serve(self, connection: ServerConnection, request: Request) -> None:
        """One request to its end. Raises `ConnectionBroken` if the client has left and nothing else is to be told."""
        path = request.path.rstrip("/")
        if path in self._context.format.paths:
            await self._native(connection, request, path)
        elif path in GENERATING and request.method not in _SAFE and self._context.config.pd_disaggregation:
            self._context.metrics.answered(path, 501)
            await _answer(connection, _NOT_FOR_PAIRS, [(MIGRATABLE_HEADER, b"no; reason=path")])
        else:
            await self._bridge(connection, request)

    async def _native(self, connection: ServerConnection, request: Request, path: str) -> None:
        context = self._context
        if request.method not in context.format.methods:
            allow: Headers = [(b"allow", b", ".join(sorted(m.encode() for m in context.format.methods)))]
            context.metrics.answered(path, 405)
            await _answer(connection, METHOD_NOT_ALLOWED, [*allow, (MIGRATABLE_HEADER, b"no; reason=method")])
            return
        native = NativeRequest(request.method, path, request.headers, request.body)
        try:
            opened = self._open(native)
        except Rejected as rejected:
            await self._reject(connection, path, rejected.answer, rejected.reason, rejected.rid)
            return
        rids = [item.rid for item in opened.items] if isinstance(opened, Bundle) else [opened.rid]
        taken = next((rid for rid in rids if rid in context.live), None)
        if taken is not None:
            await self._reject(connection, path, context.format.duplicate(native, taken), "rid", taken)
            return
        headers = to_worker(request.headers, context.config, native=True)
        size = len(request.body)
        with self._queued(size) as entry:
            if isinstance(opened, Bundle):
                split = SplitRequest(context, connection, opened, headers, path, size=size, entry=entry)
                for one in split.requests:
                    self._enter(one)
                await split.serve(self._run)
            else:
                alone = LogicalRequest(
                    *(context, Downstream(connection), opened, headers, path), native=True, size=size, entry=entry
                )
                self._enter(alone)
                await self._run(alone)

    def _open(self, request: NativeRequest) -> Exchange | Bundle:
        """Raises `Rejected`."""
        format, live = self._context.format, self._context.live
        split = self._context.config.split_batches
        return format.split(request, live.fresh) if split else format.open(request, live.fresh())

    async def _reject(self, connection: ServerConnection, path: str, answer: Answer, reason: str, rid: str) -> None:
        """Answer in the engine's words what the engine would not take, or would die of; no worker sees it."""
        context, now = self._context, trio.current_time()
        streaming = answer.content_type.startswith(b"text/event-stream")
        record = RequestRecord(rid, path, streaming, context.wall(), now, migratable=False, refusal=reason)
        record.outcome, record.closed_by, record.status, record.ended = Outcome.REJECTED, "proxy", answer.status, now
        context.metrics.request_ended(Outcome.REJECTED.value, None, None)
        context.metrics.answered(path, answer.status)
        publish(record, context.trace)
        await _answer(connection, answer, [(MIGRATABLE_HEADER, b"no; reason=" + reason.encode())])

    async def _bridge(self, connection: ServerConnection, request: Request) -> None:
        context = self._context
        # Not the request line's own target: that may be in absolute form.
        target = f"{request.path}?{request.query}" if b"?" in request.target else request.path
        content_type = get(request.headers, b"content-type") or b""
        exchange = OpaqueExchange(request.method, target, content_type, request.body)
        headers = to_worker(request.headers, context.config)
        safe = request.method in _SAFE
        downstream, size = Downstream(connection), len(request.body)
        generating = request.path.rstrip("/") in GENERATING and not safe
        with self._queued(size) if generating else nullcontext() as entry:
            await LogicalRequest(
                *(context, downstream, exchange, headers, request.path),
                native=False,
                size=size,
                entry=entry,
                safe=safe,
            ).serve()

    @contextmanager
    def _queued(self, size: int) -> Iterator[Entry | None]:
        """A place for a request with a body of so many bytes, for as long as it lives."""
        held = self._context.metrics.replay_buffer_bytes
        held.inc(size)
        try:
            with self._context.queue.join() or nullcontext() as entry:
                yield entry
        finally:
            held.inc(-size)

    def _enter(self, request: LogicalRequest) -> None:
        self._context.live.add(request)
        self._context.metrics.requests_in_flight.inc()

    async def _run(self, request: LogicalRequest) -> None:
        """Serve a request that was entered."""
        try:
            await request.serve()
        finally:
            self._context.metrics.requests_in_flight.inc(-1)
            self._context.live.remove(request)

    async def tell_all(
        self, request: Request, timeout: float, workers: Sequence[Worker], *, once: bool = True
    ) -> list[Said]:
        """Hand a client's request on to each of the workers, and give what each said: see `orders.tell_all`."""
        context = self._context
        target = f"{request.path.rstrip('/')}?{request.query}" if request.query else request.path.rstrip("/")
        content_type = get(request.headers, b"content-type") or b""
        order = Outbound(request.method, target, request.body, content_type)
        headers = to_worker(request.headers, context.config, native=True)
        return await tell_all(context, workers, order, headers, timeout, once=once)

    def pause(self) -> None:
        """From now on no attempt begins: requests wait for `go_on`. What was not sent yet is taken back."""
        self._context.fleet.pause(True)
        for request in self._context.live:
            request.hold()

    def go_on(self) -> None:
        """End a pause."""
        self._context.fleet.pause(False)

    def relearn(self) -> None:
        """Read what all workers say of themselves, soon."""
        fleet = self._context.fleet
        self._context.chores.start(partial(fleet.relearn, fleet.workers))

    def abort(self, rid: str, *, everything: bool) -> int:
        """Abort what stock SGLang would abort: the rids that begin with `rid`, or everything; says how many there were.

        Live requests are followed to their current worker; nothing of them is resumed.
        """
        live = self._context.live
        requests = list(live) if everything else live.matching(rid)
        for request in requests:
            request.abort()
        return len(requests)

    def tell_workers(self, rid: str, *, everything: bool) -> None:
        """Abort what is not live here, but may be known to a worker (a chat completion), in the client's words."""
        context = self._context
        order = context.format.abort_all() if everything else context.format.abort(rid)
        for worker in context.fleet.workers:
            context.chores.start(partial(tell, context, worker, order))


async def _answer(connection: ServerConnection, answer: Answer, extra: Headers | None = None) -> None:
    headers = [(b"content-type", answer.content_type), *answer.headers, *(extra or [])]
    await connection.respond(answer.status, headers, answer.body)
