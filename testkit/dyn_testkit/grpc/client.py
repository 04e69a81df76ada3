"""A small gRPC client over the `Network` seam: a peer that shares no code with the proxy's client or the server here.

It sees what others hide: which stream was reset with which code, which GOAWAY came, what was left unread.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import trio
from google.protobuf.message import Message
from hyperframe.frame import Frame, GoAwayFrame

from dyn_relay.grpc.methods import Method
from dyn_relay.net import Connection, ConnectionBroken, Network
from dyn_testkit.background import background

R = TypeVar("R", bound=Message)


@dataclass(eq=False, slots=True)
class Answer(Generic[R]):
    """The answer to one call, as far as it came."""

    stream: int
    response: type[R]
    headers: dict[str, str] = field(default_factory=dict)
    trailers: dict[str, str] = field(default_factory=dict)
    #: Bytes of its messages, and those that were sent but not taken.
    data: bytearray = field(default_factory=bytearray)
    held: int = 0
    #: How it ended: "" (not yet), "end", "eof" or "reset" of the connection, "rst_stream CODE".
    ended: str = ""
    changed: trio.Event = field(default_factory=trio.Event)

    @property
    def status(self) -> int | None:
        """The gRPC status; None if none came."""
        told = (self.headers | self.trailers).get("grpc-status")
        return None if told is None else int(told)

    @property
    def message(self) -> str:
        """The status's message."""
        return unquote((self.headers | self.trailers).get("grpc-message", ""))

    @property
    def frames(self) -> list[tuple[int, bytes]]:
        """The flag and the bytes of each whole message."""
        found, at = [], 0
        while at + 5 <= len(self.data):
            flag, size = struct.unpack_from(">BI", self.data, at)
            if at + 5 + size > len(self.data):
                break
            found.append((flag, bytes(self.data[at + 5 : at + 5 + size])))
            at += 5 + size
        return found

    @property
    def messages(self) -> list[R]:
        """The messages. Raises `google.protobuf.message.DecodeError`."""
        return [self.response.FromString(data) for _, data in self.frames]

    def note(self) -> None:
        """Something has come."""
        self.changed.set()
        self.changed = trio.Event()

    async def reaches(self, messages: int) -> None:
        """Return once so many messages are there, or it has ended."""
        while len(self.frames) < messages and not self.ended:
            await self.changed.wait()

    async def done(self) -> Answer[R]:
        """It, once it has ended."""
        while not self.ended:
            await self.changed.wait()
        return self


class _Patient(h2.connection.H2Connection):
    """h2 ends a connection with the first GOAWAY, and opens no stream too many; here calls go on, and are refused."""

    @property
    def open_outbound_streams(self) -> int:
        return 0

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[h2.events.Event]]:
        told = h2.events.ConnectionTerminated()
        told.error_code, told.last_stream_id = frame.error_code, frame.last_stream_id
        return [], [told]


class Client:
    """One connection. Make one with `open_client`."""

    def __init__(self, connection: Connection, window: int | None) -> None:
        self.connection = connection
        #: Bytes that a server may send ahead on each stream, whose window then stays shut; None: all is taken at once.
        self.window = window
        self.answers: dict[int, Answer[Any]] = {}
        #: `(last stream, code)` of each GOAWAY.
        self.goaways: list[tuple[int, int]] = []
        #: The server's settings, by their numbers; bytes after which nothing was understood any more.
        self.settings: dict[int, int] = {}
        self.nonsense = b""
        self._h2 = _Patient(h2.config.H2Configuration(header_encoding="utf-8"))
        self._lock = trio.Lock()

    async def start(self) -> None:
        """Send the preface."""
        self._h2.initiate_connection()
        if self.window is not None:
            self._h2.update_settings({4: self.window})
        await self.flush()

    async def call(
        self, method: Method[Any, R], request: Message | bytes, metadata: Iterable[tuple[str, str]] = ()
    ) -> Answer[R]:
        """Send a whole request; bytes are sent as they are, prefix and all."""
        answer = await self.open(method, metadata)
        data = request if isinstance(request, bytes) else request.SerializeToString()
        await self.send(answer, data if isinstance(request, bytes) else struct.pack(">BI", 0, len(data)) + data)
        return answer

    async def open(self, method: Method[Any, R], metadata: Iterable[tuple[str, str]] = ()) -> Answer[R]:
        """Send the head of a request."""
        stream = self._h2.get_next_available_stream_id()
        head = [(":method", "POST"), (":scheme", "http"), (":path", method.path), (":authority", "worker")]
        self._h2.send_headers(stream, [*head, ("content-type", "application/grpc"), ("te", "trailers"), *metadata])
        answer = self.answers[stream] = Answer(stream, method.response)
        await self.flush()
        return answer

    async def send(self, answer: Answer[Any], data: bytes, *, end: bool = True) -> None:
        """Send bytes of a request's body; small ones, for its windows are not looked at."""
        size = self._h2.max_outbound_frame_size
        for at in range(0, len(data), size):
            self._h2.send_data(answer.stream, data[at : at + size])
        if end:
            self._h2.end_stream(answer.stream)
        await self.flush()

    def room(self, answer: Answer[Any]) -> int:
        """Bytes that the server's windows take of this call."""
        return self._h2.local_flow_control_window(answer.stream)

    async def cancel(self, answer: Answer[Any]) -> None:
        """RST_STREAM(CANCEL)."""
        self._h2.reset_stream(answer.stream, 8)
        answer.ended = "cancelled"
        await self.flush()

    async def grant(self, answer: Answer[Any]) -> None:
        """Take what was held back: the server may send as much again."""
        held, answer.held = answer.held, 0
        self._h2.acknowledge_received_data(held, answer.stream)
        await self.flush()

    async def flush(self) -> None:
        """Write what is to be written; a broken connection is for `run` to see."""
        async with self._lock:
            try:
                await self.connection.send(self._h2.data_to_send())
            except ConnectionBroken:
                pass

    async def run(self) -> None:
        """Read until the connection ends."""
        how = "eof"
        try:
            while data := await self.connection.receive():
                for event in self._h2.receive_data(data):
                    self._take(event)
                await self.flush()
        except ConnectionBroken:
            how = "reset"
        except h2.exceptions.ProtocolError:
            how, self.nonsense = "nonsense", data
        for answer in self.answers.values():
            answer.ended = answer.ended or how
            answer.note()

    def _take(self, event: h2.events.Event) -> None:
        answer = self.answers.get(getattr(event, "stream_id", None) or 0)
        match event:
            case h2.events.RemoteSettingsChanged(changed_settings=changed):
                self.settings |= {int(number): one.new_value for number, one in changed.items()}
            case h2.events.ConnectionTerminated():
                self.goaways.append((event.last_stream_id or 0, int(event.error_code or 0)))
        if answer is None:
            return
        match event:
            case h2.events.ResponseReceived():
                answer.headers = {str(name): str(value) for name, value in event.headers or ()}
            case h2.events.TrailersReceived():
                answer.trailers = {str(name): str(value) for name, value in event.headers or ()}
            case h2.events.DataReceived():
                answer.data += event.data or b""
                answer.held += event.flow_controlled_length or 0
                if self.window is None:
                    self._h2.acknowledge_received_data(answer.held, answer.stream)
                    answer.held = 0
            case h2.events.StreamEnded():
                answer.ended = "end"
            case h2.events.StreamReset():
                answer.ended = f"rst_stream {int(event.error_code or 0)}"
        answer.note()


@asynccontextmanager
async def open_client(network: Network, url: str, window: int | None = None) -> AsyncIterator[Client]:
    """A connection to `grpc://host:port` that lasts as long as the block. Raises `dyn_relay.net.ConnectFailed`."""
    host, _, port = url.removeprefix("grpc://").partition(":")
    client = Client(await network.connect(host, int(port)), window)
    async with background() as nursery:
        try:
            await client.start()
            nursery.start_soon(client.run)
            yield client
        finally:
            client.connection.close()


async def ask(
    network: Network,
    url: str,
    method: Method[Any, R],
    request: Message | bytes,
    metadata: Iterable[tuple[str, str]] = (),
) -> Answer[R]:
    """One call on a connection of its own. Never raises for a cut. Raises `dyn_relay.net.ConnectFailed`."""
    async with open_client(network, url) as client:
        return await (await client.call(method, request, metadata)).done()
