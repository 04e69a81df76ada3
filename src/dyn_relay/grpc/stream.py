"""One call's stream: what has come of its answer, and whether that is all."""

from __future__ import annotations

from collections.abc import Callable

import trio

from dyn_relay.grpc import metadata
from dyn_relay.grpc.http2 import STREAM_WINDOW
from dyn_relay.grpc.messages import Inbox
from dyn_relay.grpc.metadata import Metadata
from dyn_relay.grpc.status import CallFailed, Lost
from dyn_relay.net import STOPPED

#: Seconds without a byte in the middle of a message that is waited for, after which its sender is taken for lost.
HALF_MESSAGE = 60.0


class Stream:
    """Filled by the connection's task, emptied by the call's."""

    __slots__ = (
        "_grant",
        "_inbox",
        "_news",
        "_window",
        "answered",
        "ended",
        "failure",
        "headers",
        "id",
        "sent",
        "trailers",
    )

    def __init__(self, stream_id: int, max_message: int, grant: Callable[[int, int], None]) -> None:
        """`grant(stream_id, size)` lets the server send `size` more bytes."""
        self.id = stream_id
        #: The request is out, all of it.
        self.sent = False
        #: A head has come: the server has seen the request.
        self.answered = False
        #: Nothing more will come. `failure` says why, if the end was not a good one.
        self.ended = False
        self.failure: CallFailed | None = None
        self.headers: Metadata = ()
        self.trailers: Metadata = ()
        self._inbox = Inbox(max_message)
        self._grant = grant
        #: Bytes that the server may still send.
        self._window = STREAM_WINDOW
        #: Somebody waits for a message, or for the end.
        self._news: trio.Event | None = None

    # What the call does.

    def take(self) -> bytes | None:
        """The next message if it is complete; its bytes may be sent anew. Raises as `Inbox.take` does."""
        message = self._inbox.take()
        if message is not None:
            self._open(STREAM_WINDOW - len(self._inbox))
        return message

    async def wait(self) -> None:
        """Return when `take` may have something to give, or the stream has ended.

        The rest of a message that is longer than the window comes in only while it is waited for. Raises `Lost` if it
        stays away: whoever has begun a message has all of it.
        """
        if self.ended or self._inbox.ready:
            await trio.lowlevel.checkpoint()
            return
        self._news = trio.Event()
        try:
            self._open(max(STREAM_WINDOW, self._inbox.missing))
            while not self._news.is_set():
                held = len(self._inbox)
                with trio.move_on_after(HALF_MESSAGE) as scope:
                    await self._news.wait()
                    return
                stopped = trio.current_time() > scope.deadline + STOPPED
                if held and held == len(self._inbox) and not stopped:
                    raise Lost(f"half a message, and no more of it for {HALF_MESSAGE:g} s")
        finally:
            self._news = None

    def outcome(self) -> CallFailed | None:
        """How the ended stream ended, all its messages being taken; None if with OK."""
        if self.failure is None and self._inbox:
            return Lost("the answer ended in the middle of a message")
        return self.failure

    # What the connection does.

    def head(self, fields: Metadata, *, last: bool) -> None:
        """The head of the answer; `last`: and its end."""
        self.answered = True
        if last:
            self.finish(fields)
        elif (failure := metadata.head_failure(fields)) is not None:
            self.end(failure)
        else:
            try:
                self.headers = metadata.received(fields)
            except Lost as lost:
                self.end(lost)

    def feed(self, data: bytes, size: int) -> None:
        """`data` has come, in `size` bytes of the window (more than its length if it was padded)."""
        self._window -= size
        self._inbox.feed(data)
        if self._news is not None:
            if self._inbox.ready:
                self._news.set()
            else:
                self._open(max(STREAM_WINDOW, self._inbox.missing))

    def finish(self, fields: Metadata) -> None:
        """The trailers."""
        failure = metadata.ending(fields)
        try:
            self.trailers = metadata.received(fields)
        except Lost as lost:
            failure = failure or lost
        self.end(failure)

    def end(self, failure: CallFailed | None) -> None:
        """Nothing more will come."""
        self.ended = True
        self.failure = failure
        if self._news is not None:
            self._news.set()

    def _open(self, window: int) -> None:
        """Let the server send so many bytes; told in large parts, so that few frames say so."""
        size = window - self._window
        if size >= STREAM_WINDOW // 2 and not self.ended:
            self._window = window
            self._grant(self.id, size)
