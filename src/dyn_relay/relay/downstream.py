"""What the client has been given so far, and how to give it more."""

from __future__ import annotations

import trio

from dyn_relay.formats.base import Answer, Verdict
from dyn_relay.http11.headers import Headers, end_to_end
from dyn_relay.http11.server import ServerConnection
from dyn_relay.http11.sse import comment

#: Says on every answer that a worker takes part in whether the request would survive that worker.
MIGRATABLE_HEADER = b"x-dyn-relay-migratable"
_EVENT_STREAM: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
#: Seconds that a client which does not read gets to take the error event that ends its stream.
FAIL_PATIENCE = 2.0
_KEEP_ALIVE = comment(b"keep-alive")


class Downstream:
    """One answer to one client, streamed or whole."""

    __slots__ = (
        "_answered",
        "_answering",
        "_events",
        "_finished",
        "_headers",
        "_streamed",
        "_verdict",
        "connection",
        "head_sent",
        "last_write",
        "status",
    )

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        #: The head of a streamed answer is out: from now on errors are events and broken framing.
        self.head_sent = False
        #: What the client sees; 0 while it has seen nothing.
        self.status = 0
        #: When the client last got a byte of a stream.
        self.last_write = trio.current_time()
        self._verdict = b"yes"
        self._finished = self._answering = self._answered = False
        self._headers: Headers | None = None
        self._streamed = 200
        #: The body is a stream of events, in which comments have a place.
        self._events = True

    @property
    def ended(self) -> bool:
        """The whole answer has been handed to the system."""
        return self._answered or (self._finished and not self.connection.connection.pending)

    def judge(self, verdict: Verdict) -> None:
        """What the answer's header says."""
        self._verdict = b"yes" if verdict.migratable else b"no; reason=" + verdict.reason.encode("ascii", "replace")

    def take_head(self, status: int, headers: Headers, *, sized: bool) -> None:
        """The head for a streamed answer: the first worker's, end-to-end headers only; `sized` keeps content-length."""
        if self._headers is None:
            # A worker behind a relay of its own says what that one would rescue; here only our word counts.
            kept = [pair for pair in end_to_end(headers) if pair[0] != MIGRATABLE_HEADER]
            self._headers = kept if sized else [pair for pair in kept if pair[0] != b"content-length"]
            self._events = not sized
            self._streamed = status

    def wrap(self, body: bytes) -> bytes:
        """Body bytes of a stream as they go on the wire, the head before the first."""
        if self.head_sent:
            return self.connection.frame(body)
        self.head_sent = True
        self.status = self._streamed
        headers = [*(self._headers or _EVENT_STREAM), (MIGRATABLE_HEADER, self._verdict)]
        return self.connection.head(self.status, headers) + self.connection.frame(body)

    def finish(self, body: bytes) -> bytes:
        """As `wrap`, and the end of the answer."""
        self._finished = True
        return self.wrap(body) + self.connection.last()

    async def send(self, data: bytes) -> None:
        """Wire bytes that `wrap` or `finish` gave. Raises `ConnectionBroken`."""
        await self.connection.connection.send(data)

    async def answer(self, answer: Answer) -> None:
        """A whole answer; only while no head was sent. Raises `ConnectionBroken`."""
        self._answering = True
        self.status = answer.status
        headers = [(b"content-type", answer.content_type), *answer.headers, (MIGRATABLE_HEADER, self._verdict)]
        await self.connection.respond(answer.status, headers, answer.body)
        self._answered = True

    async def fail(self, event: bytes) -> None:
        """Break a started answer off: an error event, then no last chunk, so that nobody takes it for complete.

        A body whose length was told gets no event: it could make up that length.
        """
        try:
            if any(name == b"content-length" for name, _ in self._headers or []):
                return
            with trio.move_on_after(FAIL_PATIENCE):
                await self.send(self.wrap(event))
        finally:
            self.connection.break_off()

    async def keep_alive(self, interval: float) -> None:
        """Send a comment whenever a stream's client got nothing for `interval` seconds; runs until cancelled."""
        while True:
            await trio.sleep_until(self.last_write + interval)
            if self._finished or self._answering or not self._events:
                return
            now = trio.current_time()
            if now >= self.last_write + interval:
                self.last_write = now
                head_sent = self.head_sent
                if not self.connection.connection.offer(self.wrap(_KEEP_ALIVE)):
                    # Bytes are waiting for the client already, so it is not silent for want of a comment.
                    self.head_sent = head_sent
