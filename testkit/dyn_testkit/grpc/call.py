"""One call, as its handler sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import TYPE_CHECKING

import trio
from google.protobuf.message import Message

from dyn_relay.grpc.status import Code
from dyn_testkit.grpc.framing import frame, spell_message

if TYPE_CHECKING:
    from dyn_testkit.grpc.wire import Wire


class CallGone(Exception):
    """The call was reset, or its connection is gone: nothing more can be said."""


@dataclass(eq=False, slots=True)
class Call:
    """A call on one HTTP/2 stream. The handler sends, then returns (OK) or raises `Status`."""

    wire: Wire
    stream: int
    path: str
    #: The request's other headers, names in lower case.
    metadata: tuple[tuple[str, str], ...]
    #: When it must have ended, by its `grpc-timeout`; seconds of trio's clock.
    deadline: float = math.inf
    #: Bytes of its request so far.
    body: bytearray = field(default_factory=bytearray)
    #: Around its handler.
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    #: Its handler has been started.
    begun: bool = False
    #: Nothing more can be said; before its end, the client reset it or closed the connection.
    gone: bool = False
    left: bool = False
    #: The head was sent; the end was sent.
    headed: bool = False
    ended: bool = False

    def header(self, name: str) -> str | None:
        """The first value of a header."""
        return next((value for key, value in self.metadata if key == name), None)

    async def head(self) -> None:
        """Send the head, if it is not out yet. Raises `CallGone`."""
        if not self.headed:
            self.headed = True
            await self.wire.send_headers(self, self._head())

    async def send(self, message: Message | bytes) -> None:
        """Send a message and wait until it is out: a client that grants no window holds this up. Raises `CallGone`."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        await self.send_raw(frame(data))

    async def send_raw(self, data: bytes) -> None:
        """Send bytes where messages stand. Raises `CallGone`."""
        await self.head()
        await self.wire.send_data(self, data)

    async def finish(self, code: Code, message: str = "") -> None:
        """End it with a status; without a head, that is all there is. Raises `CallGone`."""
        if self.ended:
            return
        trailers = [("grpc-status", str(int(code)))]
        if message:
            trailers.append(("grpc-message", spell_message(message)))
        self.ended = True
        await self.wire.send_headers(self, trailers if self.headed else self._head() + trailers, end=True)

    async def refuse(self, status: int) -> None:
        """End it with an HTTP status and no word of gRPC, as what stands between may do. Raises `CallGone`."""
        self.ended = True
        await self.wire.send_headers(self, [(":status", str(status)), ("content-type", "text/plain")], end=True)

    def _head(self) -> list[tuple[str, str]]:
        date = formatdate(self.wire.wall(), usegmt=True)
        return [(":status", "200"), ("content-type", "application/grpc"), ("date", date)]

    async def end_without_status(self) -> None:
        """End it as no gRPC server may: no trailers. Raises `CallGone`."""
        await self.head()
        self.ended = True
        await self.wire.send_end(self)

    async def reset(self, code: int) -> None:
        """End it with RST_STREAM and this HTTP/2 error code. Raises `CallGone`."""
        self.ended = True
        await self.wire.send_reset(self, code)
