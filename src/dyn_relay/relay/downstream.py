"""What the client has been given so far, and how to give it more."""

from __future__ import annotations

import trio

from dyn_relay.formats.base import Answer, Verdict
from dyn_relay.http11.errors import BadResponse
from dyn_relay.http11.headers import Headers, end_to_end
from dyn_relay.http11.server import ServerConnection
from dyn_relay.http11.sse import comment
from dyn_relay.net import Sink
from dyn_relay.relay.fallback import AGGREGATED_HEADER

#: Says on every answer that a worker takes part in whether the request would survive that worker.
MIGRATABLE_HEADER = b"x-dyn-relay-migratable"
_EVENT_STREAM: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
#: What is written down of a client that left before it saw a status: nginx's word for it; nobody is ever sent it.
CLIENT_CLOSED = 499
#: Seconds that a client which does not read gets to take the error event that ends its stream.
FAIL_PATIENCE = 2.0
_KEEP_ALIVE = comment(b"keep-alive")


def protection(verdict: Verdict) -> bytes:
    """What `MIGRATABLE_HEADER` says."""
    return b"yes" if verdict.migratable else b"no; reason=" + verdict.reason.encode("ascii", "replace")


class Downstream:
    """One answer to one client, streamed or whole."""

    __slots__ = (
        "_aggregated",
        "_answered",
        "_answering",
        "_delimited",
        "_events",
        "_finished",
        "_head_sent",
        "_headers",
        "_streamed",
        "_verdict",
        "connection",
        "last_write",
        "status",
    )

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection
        #: What the client sees; 0 while it has seen nothing, `CLIENT_CLOSED` if it has left by then.
        self.status = 0
        #: When the client last got a byte of a stream.
        self.last_write = trio.current_time()
        self._aggregated = False
        self._verdict = b"yes"
        self._head_sent = self._finished = self._answering = self._answered = False
        self._headers: Headers | None = None
        self._streamed = 200
        self._delimited = False
        #: The body is a stream of events, in which comments have a place.
        self._events = True

    @property
    def client(self) -> Sink:
        """Who gets the answer."""
        return self.connection.connection

    @property
    def head_sent(self) -> bool:
        """The head of a streamed answer is out: from now on errors are events and broken framing."""
        return self._head_sent

    @property
    def given_up(self) -> bool:
        """It is not the client that left: its answer has failed for another reason, and nobody wants this one."""
        return False

    @property
    def said(self) -> bool:
        """The end of the answer has been made: whatever happens now, nothing else may follow it."""
        return self._finished or self._answering

    @property
    def ended(self) -> bool:
        """The whole answer has been handed to the system."""
        return self._answered or (self._finished and not self.client.pending)

    def left(self) -> None:
        """The client is gone."""
        self.status = self.status or CLIENT_CLOSED

    @property
    def _says(self) -> Headers:
        aggregated = [(AGGREGATED_HEADER, b"yes")] if self._aggregated else []
        return [(MIGRATABLE_HEADER, self._verdict), *aggregated]

    def judge(self, verdict: Verdict) -> None:
        """What the answer's header says."""
        self._verdict = protection(verdict)

    def aggregate(self) -> None:
        """An attempt goes to a worker that does all of it, in a fleet of pairs; a header says so if there is time."""
        self._aggregated = True

    def take_head(self, status: int, headers: Headers, *, events: bool, delimited: bool) -> None:
        """The head for a streamed answer, of the worker that is about to be the first to give something of it.

        End-to-end headers only; content-length is kept unless the body is a stream of `events`, which may grow.
        `delimited`: the worker ends its body by closing, so that a cut cannot be told from the end; nor can the client.
        Raises `BadResponse` if the client has begun to read a stream of events, and this is none.
        """
        if self.head_sent:
            if not events:
                raise BadResponse("the answer is no stream of events, and one has begun")
            return
        # A worker behind a relay of its own says what that one would rescue; here only our word counts.
        kept = [pair for pair in end_to_end(headers) if pair[0] != MIGRATABLE_HEADER]
        self._headers = [pair for pair in kept if pair[0] != b"content-length"] if events else kept
        self._events, self._delimited = events, delimited and not events
        self._streamed = status

    def wrap(self, body: bytes, *, last: bool = False) -> bytes:
        """Body bytes of a stream as they go on the wire, the head before the first, the end after the last."""
        if self._head_sent:
            return self.connection.frame(body, last=last)
        self._head_sent = True
        self.status = self._streamed
        headers = [*(self._headers or _EVENT_STREAM), *self._says]
        head = self.connection.head(self.status, headers, delimited=self._delimited)
        return self.connection.frame(body, head, last=last)

    def finish(self, body: bytes) -> bytes:
        """As `wrap`, and the end of the answer. Nothing if that was made before: an answer ends once."""
        if self._finished:
            return b""
        self._finished = True
        return self.wrap(body, last=True)

    @property
    def takes_chunks(self) -> bool:
        """What `wrap` makes of body bytes is the one chunk of them."""
        return self._head_sent and self.connection.in_chunks

    async def send(self, data: bytes) -> None:
        """Wire bytes that `wrap` or `finish` gave. Raises `ConnectionBroken`."""
        await self.client.send(data)

    async def answer(self, answer: Answer) -> None:
        """A whole answer; only while no head was sent. Raises `ConnectionBroken`."""
        self._answering = True
        self.status = answer.status
        headers = [(b"content-type", answer.content_type), *answer.headers, *self._says]
        await self.connection.respond(answer.status, headers, answer.body)
        self._answered = True

    async def fail(self, event: bytes) -> None:
        """Break a started answer off: an error event, then no last chunk, so that nobody takes it for complete.

        A body whose length was told gets no event: it could make up that length. Nor does one whose end was made: what
        the client has not taken of it is lost.
        """
        try:
            if self.said or any(name == b"content-length" for name, _ in self._headers or []):
                return
            with trio.move_on_after(FAIL_PATIENCE):
                await self.send(self.wrap(event))
        finally:
            self.break_off()

    def break_off(self) -> None:
        """End the connection, so that nobody takes the answer for complete."""
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
                head_sent = self._head_sent
                if not self.connection.connection.offer(self.wrap(_KEEP_ALIVE)):
                    # Bytes are waiting for the client already, so it is not silent for want of a comment.
                    self._head_sent = head_sent
