"""A request for several answers, split: each is a logical request of its own, whose client is a part of the whole.

The items know nothing of each other: each has its attempts, its budget, its trace row. A part stands where a client
would: the events of a stream go into the one stream of the whole as they come, a whole answer is kept for the list. The
first item that fails fails the whole; the others find that their client has left.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import trio

from dyn_relay.formats.base import Answer, Bundle, Item, Verdict
from dyn_relay.formats.traits import UNKNOWN
from dyn_relay.http11.errors import BadResponse
from dyn_relay.http11.headers import Headers
from dyn_relay.http11.server import ServerConnection
from dyn_relay.net import Sink
from dyn_relay.relay.context import Context
from dyn_relay.relay.downstream import FAIL_PATIENCE, Downstream
from dyn_relay.relay.ending import CROSSED_HEADER
from dyn_relay.relay.queue import Entry
from dyn_relay.relay.request import LogicalRequest


class Part(Downstream):
    """The client of one item. Also its `net.Sink`."""

    __slots__ = ("_split", "item", "whole")

    def __init__(self, split: SplitRequest, connection: ServerConnection, item: Item) -> None:
        super().__init__(connection)
        self.item = item
        #: The item's whole answer, once it is there.
        self.whole: Answer | None = None
        self._split = split

    # -- as a Downstream

    @property
    def client(self) -> Sink:
        return self

    @property
    def head_sent(self) -> bool:
        return self._split.downstream.head_sent

    @property
    def given_up(self) -> bool:
        return self._split.failed

    def take_head(self, status: int, headers: Headers, *, events: bool, delimited: bool) -> None:
        """Only a stream of events can be part of one. Raises `BadResponse`."""
        if not events:
            raise BadResponse("the answer is no stream of events, and cannot be part of one")
        self._split.downstream.take_head(status, headers, events=True, delimited=False)

    def aggregate(self) -> None:
        """The whole is as its items are."""
        self._split.downstream.aggregate()

    def wrap(self, body: bytes, *, last: bool = False) -> bytes:
        """The framing is the whole's, and so is its end."""
        self.status = 200
        return body

    def finish(self, body: bytes) -> bytes:
        if self._finished:
            return b""
        self._finished = True
        return self.wrap(body)

    async def answer(self, answer: Answer) -> None:
        self._answering = self._answered = True
        self.status, self.whole = answer.status, answer
        self._split.answered(self, answer)

    async def fail(self, event: bytes) -> None:
        self._split.break_off(b"" if self.said else self.wrap(event))

    def break_off(self) -> None:
        self._split.break_off(b"")

    async def keep_alive(self, interval: float) -> None:
        """The whole's does it for all."""

    # -- as a Sink

    async def send(self, data: bytes) -> None:
        if data:
            self._split.take(self, data)
        await self._split.flush()
        await trio.lowlevel.checkpoint()  # neither reading nor writing need be one, and the others have their turns

    @property
    def pending(self) -> bool:
        return self._split.pending

    async def wait_closed(self) -> None:
        await self._split.over.wait()


class SplitRequest:
    """One client request for several answers, from its dispatch to its end."""

    def __init__(
        self,
        context: Context,
        connection: ServerConnection,
        bundle: Bundle,
        headers: Headers,
        path: str,
        *,
        size: int,
        entry: Entry | None,
    ) -> None:
        """`size`: of the client's body, in bytes; `entry`: where the whole waits for its turn, if anywhere."""
        self.downstream = Downstream(connection)
        #: Nobody wants the items' answers any more: the client left, or one of them failed.
        self.over = trio.Event()
        #: The whole has failed, because one of its items did.
        self.failed = False
        self._context = context
        self._bundle = bundle
        self._path = path
        self._client = connection.connection
        self._lock = trio.Lock()
        #: Taken from the items, not handed to the client's connection yet; only while that is at work on something.
        self._unsent: list[bytes] = []
        #: An engine's own error, which is the answer to the whole.
        self._instead: Answer | None = None
        #: Some event has gone into the stream.
        self._begun = False
        #: What was said of the failure is all that the client will get: no end of the framing.
        self._broken = False
        self._defects: list[Exception] = []
        self._parts = [Part(self, connection, item) for item in bundle.items]
        self.requests = [
            LogicalRequest(context, part, part.item, headers, path, native=True, size=size, entry=entry)
            for part in self._parts
        ]
        for index, (request, item) in enumerate(zip(self.requests, bundle.items, strict=True)):
            request.alias = item.alias
            request.record.bundle, request.record.index = bundle.name, index
            item.admit(UNKNOWN)  # the head may go out before each has a worker

    @property
    def _streaming(self) -> bool:
        return self._bundle.items[0].streaming

    async def serve(self, run: Callable[[LogicalRequest], Awaitable[None]]) -> None:
        """Serve all items with `run`, to the end of the last. Raises what is a defect of ours, `ConnectionBroken`."""
        interval = self._context.config.sse_keep_alive_interval_secs
        self._judge()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                if interval and self._streaming:
                    nursery.start_soon(self.downstream.keep_alive, interval)
                async with trio.open_nursery() as items:
                    for request in self.requests:
                        items.start_soon(self._run, run, request)
                nursery.cancel_scope.cancel()
            if self._defects:
                raise self._defects[0]
            await self._conclude()
        finally:
            self._context.metrics.answered(self._path, self.downstream.status)

    async def _watch(self) -> None:
        await self._client.wait_closed()
        self.over.set()

    async def _run(self, run: Callable[[LogicalRequest], Awaitable[None]], request: LogicalRequest) -> None:
        try:
            await run(request)
        except Exception as exc:  # carried out of the nursery as it is
            self._defects.append(exc)
            self._fail()

    def _judge(self) -> None:
        """The whole is only as safe as each of its items."""
        verdicts = [item.verdict for item in self._bundle.items]
        self.downstream.judge(next((verdict for verdict in verdicts if not verdict.migratable), Verdict()))

    def _fail(self) -> bool:
        """An item has failed, and with it the whole; False if that was over before."""
        if self.over.is_set():
            return False
        self.failed = True
        self.over.set()
        return True

    # -- what the parts do

    @property
    def pending(self) -> bool:
        """Something waits for the client to take what came before it."""
        return bool(self._unsent) or self._client.pending

    def take(self, part: Part, data: bytes) -> None:
        """An item's events. What comes after the end is nobody's."""
        if self.over.is_set():
            return
        if part.said and part.item.outright:
            # Stock says this before anything else, and then ends. After other events it would pass for a whole stream.
            self._broken = self._begun
            self._fail()
        self._write(data)
        self._begun = True

    def _write(self, events: bytes) -> None:
        if not self.downstream.head_sent:
            self._judge()
        self._unsent.append(self.downstream.wrap(events))
        self.downstream.last_write = trio.current_time()

    async def flush(self) -> None:
        """Hand over what the items have given so far. Raises `ConnectionBroken`."""
        if self._lock.locked():
            await self._lock.acquire()
        else:
            self._lock.acquire_nowait()
        try:
            while self.pending:
                data = b"".join(self._unsent)
                self._unsent.clear()
                await self._client.send(data)
        finally:
            self._lock.release()

    def answered(self, part: Part, answer: Answer) -> None:
        """An item has its whole answer; if that is an error, it is the whole's."""
        if answer.status != 200 and self._fail():
            self._instead = answer

    def break_off(self, event: bytes) -> None:
        """An item has failed, with this as the last word, or nothing that could be said."""
        if self._fail():
            self._broken = True
            if event:
                self._write(event)

    # -- the end

    async def _conclude(self) -> None:
        downstream = self.downstream
        if self.over.is_set() and not self.failed:
            downstream.left()
            return
        late = self._instead is not None and downstream.head_sent  # by a comment at that very moment
        if self._broken or late:
            try:
                with trio.move_on_after(FAIL_PATIENCE):
                    await self.flush()
            finally:
                downstream.break_off()
            return
        self._judge()
        if self._instead is not None:
            await downstream.answer(self._instead)
        elif self._streaming:
            self._unsent.append(downstream.finish(self._bundle.terminator))
            await self.flush()
        else:
            wholes = [part.whole for part in self._parts if part.whole is not None]
            answer = self._bundle.join(wholes)
            crossed = [pair for whole in wholes for pair in whole.headers if pair[0] == CROSSED_HEADER]
            await downstream.answer(replace(answer, headers=[*answer.headers, *crossed[:1]]))
