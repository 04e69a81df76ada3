"""One HTTP/2 connection of a gRPC server: frames in, calls out.

Its task reads all the time and runs each call, once its request is whole, in a task of its own; calls write what the
client's windows allow. GOAWAY is written by hand: h2 would end the connection with it, but calls that it spares go on.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import trio
from h2.errors import ErrorCodes
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame, SettingsFrame

from dyn_relay.grpc.status import Code
from dyn_relay.net import Connection, ConnectionBroken
from dyn_testkit.grpc.call import Call, CallGone
from dyn_testkit.grpc.framing import Status, begun, check_prefix, parse_timeout

#: The largest number of a stream: a GOAWAY that names it spares all calls.
ALL_STREAMS = (1 << 31) - 1
#: Bytes that a connection's window has in the beginning, by RFC 9113.
_FIRST_WINDOW = 65535

#: Serves one call, whose request is whole. Raises `Status`.
Answer = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Limits:
    """How a server bounds its clients; the defaults are those of SGLang 0.5.23."""

    #: Calls at once; None: any number.
    streams: int | None = None
    #: Bytes that a client may send ahead, on one stream and on all of them.
    window: int = 1 << 20
    #: A call ends when its `grpc-timeout` is over; SGLang leaves that to its clients.
    deadlines: bool = False


class Wire:
    """A connection of a server, whose calls `answer` serves."""

    def __init__(
        self,
        connection: Connection,
        answer: Answer,
        limits: Limits | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.connection = connection
        #: Wall-clock time, seconds.
        self.wall = wall
        #: Calls in progress, by their streams; how many there ever were.
        self.calls: dict[int, Call] = {}
        self.total = 0
        #: Nothing that clients send is acknowledged: their windows run dry.
        self.deaf = False
        self._answer = answer
        self._limits = limits or Limits()
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self._pending = bytearray()
        self._lock = trio.Lock()
        #: Something is to be written; a window has grown.
        self._dirty = trio.Event()
        self._grown = trio.Event()
        #: Calls on later streams are not begun any more.
        self._last = ALL_STREAMS
        self._newest = 0
        self._leaving = False
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Serve until the client has gone, or `cut`. Closes the connection; never raises for what a client does."""
        self._greet()
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    await self._read(nursery)
                    self._lose(self.calls.values(), left=True)
                    nursery.cancel_scope.cancel()
        finally:
            self.connection.close()

    def _greet(self) -> None:
        window = self._limits.window
        ahead = {SettingCodes.MAX_CONCURRENT_STREAMS: ALL_STREAMS, SettingCodes.INITIAL_WINDOW_SIZE: window}
        self._h2.local_settings = Settings(client=False, initial_values=ahead)
        self._h2.initiate_connection()
        if window > _FIRST_WINDOW:
            self._h2.increment_flow_control_window(window - _FIRST_WINDOW)
        if self._limits.streams is not None:
            # Told beside h2, which would end the connection of a client that has not heard of it yet.
            told = SettingsFrame(0, settings={SettingCodes.MAX_CONCURRENT_STREAMS: self._limits.streams})
            self._raw(told.serialize())

    def cut(self, *, reset: bool = False) -> None:
        """End the connection with all its calls: FIN, or RST."""
        self._lose(self.calls.values())
        if reset:
            self.connection.abort()
        else:
            self.connection.close()
        self._scope.cancel()

    async def go_away(self, last: int | None = None, code: int = 0) -> None:
        """Say GOAWAY. Calls on streams above `last` (None: the newest one) are dropped without a word: not processed.

        The others go on; when they have ended, so does the connection. Raises `CallGone`.
        """
        self._last = self._newest if last is None else last
        self._leaving = True
        self._raw(GoAwayFrame(0, last_stream_id=self._last, error_code=code).serialize())
        dropped = [call for call in self.calls.values() if call.stream > self._last]
        for call in dropped:
            call.gone = True
        await self._flush()
        self._lose(dropped)
        self._leave_if_done()

    def say(self, data: bytes) -> None:
        """Write bytes that are no HTTP/2, soon."""
        self._raw(data)
        self._dirty.set()

    # What comes in ------------------------------------------------------------------------------------------------

    async def _read(self, nursery: trio.Nursery) -> None:
        try:
            while data := await self.connection.receive():
                try:
                    events = self._h2.receive_data(data)
                except h2.exceptions.ProtocolError:
                    await self._flush()  # h2 has written why
                    return
                for event in events:
                    self._take(event, nursery)
                self._dirty.set()
        except (ConnectionBroken, CallGone):
            return

    def _take(self, event: h2.events.Event, nursery: trio.Nursery) -> None:
        match event:
            case h2.events.RequestReceived():
                self._open(event, nursery)
            case h2.events.DataReceived():
                self._receive(event, nursery)
            case h2.events.StreamEnded():
                self._begin(event.stream_id, self._answer, nursery)
            case h2.events.StreamReset():
                self._lose((call for call in self.calls.values() if call.stream == event.stream_id), left=True)
                self._leave_if_done()
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                self._grow()
            case h2.events.ConnectionTerminated():
                self._lose(self.calls.values(), left=True)
                self._scope.cancel()

    def _open(self, event: h2.events.RequestReceived, nursery: trio.Nursery) -> None:
        stream = event.stream_id or 0
        if stream > self._last:
            return
        if self._limits.streams is not None and len(self.calls) >= self._limits.streams:
            self._h2.reset_stream(stream, ErrorCodes.REFUSED_STREAM)
            return
        self._newest = stream
        headers = tuple((str(name), str(value)) for name, value in event.headers or ())
        call = Call(self, stream, dict(headers).get(":path", ""), tuple(h for h in headers if h[0][0] != ":"))
        timeout = parse_timeout(call.header("grpc-timeout") or "")
        if timeout is not None and self._limits.deadlines:
            call.deadline = trio.current_time() + timeout
        self.calls[stream] = call
        self.total += 1
        encoding = call.header("grpc-encoding") or "identity"
        if encoding != "identity":
            why = f"Content is compressed with `{encoding}` which isn't supported"
            self._begin(stream, _refuse(Status(Code.UNIMPLEMENTED, why)), nursery)

    def _receive(self, event: h2.events.DataReceived, nursery: trio.Nursery) -> None:
        stream = event.stream_id or 0
        if not self.deaf:
            self._h2.acknowledge_received_data(event.flow_controlled_length or 0, stream)
        call = self.calls.get(stream)
        if call is None or call.begun:
            return
        call.body += event.data or b""
        if begun(call.body):
            try:
                check_prefix(call.body)
            except Status as wrong:
                self._begin(stream, _refuse(wrong), nursery)

    def _begin(self, stream: int | None, answer: Answer, nursery: trio.Nursery) -> None:
        call = self.calls.get(stream or 0)
        if call is not None and not call.begun:
            call.begun = True
            nursery.start_soon(self._serve, call, answer)

    async def _serve(self, call: Call, answer: Answer) -> None:
        try:
            with call.scope:
                try:
                    with trio.move_on_at(call.deadline) as deadline:
                        await answer(call)
                    late = deadline.cancelled_caught
                    await call.finish(Code.DEADLINE_EXCEEDED if late else Code.OK, "Timeout expired" if late else "")
                except Status as status:
                    await call.finish(status.code, status.message)
        except CallGone:
            pass
        finally:
            self.calls.pop(call.stream, None)
            self._dirty.set()
            self._leave_if_done()

    def _lose(self, calls: Iterable[Call], *, left: bool = False) -> None:
        for call in tuple(calls):
            self.calls.pop(call.stream, None)
            call.gone, call.left = True, left and not call.ended
            call.scope.cancel()

    def _leave_if_done(self) -> None:
        if self._leaving and not self.calls:
            self._scope.cancel()

    # What goes out ------------------------------------------------------------------------------------------------

    async def send_headers(self, call: Call, headers: Iterable[tuple[str, str]], *, end: bool = False) -> None:
        """A head, or trailers. Raises `CallGone`."""
        self._check(call)
        self._h2.send_headers(call.stream, list(headers), end_stream=end)
        await self._flush()

    async def send_data(self, call: Call, data: bytes) -> None:
        """DATA frames, as the windows allow. Raises `CallGone`."""
        left = memoryview(data)
        while left:
            self._check(call)
            grown = self._grown
            size = min(self._h2.local_flow_control_window(call.stream), self._h2.max_outbound_frame_size, len(left))
            if size > 0:
                self._h2.send_data(call.stream, bytes(left[:size]))
                left = left[size:]
            if size <= 0 or not left:
                await self._flush()
            if size <= 0:
                await grown.wait()

    async def send_end(self, call: Call) -> None:
        """END_STREAM without trailers. Raises `CallGone`."""
        self._check(call)
        self._h2.end_stream(call.stream)
        await self._flush()

    async def send_reset(self, call: Call, code: int) -> None:
        """RST_STREAM. Raises `CallGone`."""
        self._check(call)
        self._h2.reset_stream(call.stream, code)
        await self._flush()

    def _check(self, call: Call) -> None:
        if call.gone:
            raise CallGone

    def _grow(self) -> None:
        self._grown.set()
        self._grown = trio.Event()

    def _raw(self, data: bytes) -> None:
        self._pending += self._h2.data_to_send()
        self._pending += data

    async def _flush(self) -> None:
        """Hand over all that is to be written. Raises `CallGone`."""
        async with self._lock:
            self._raw(b"")
            data = bytes(self._pending)
            self._pending.clear()
            try:
                # Also when there is nothing new: a call that was cancelled here may have left a rest.
                await self.connection.send(data)
            except ConnectionBroken:
                self._lose(self.calls.values(), left=True)
                raise CallGone from None

    async def _write(self) -> None:
        """Write what no call waits for: acknowledgements, and what cancelled calls have left."""
        try:
            while True:
                await self._flush()
                await self._dirty.wait()
                self._dirty = trio.Event()
        except CallGone:
            self._scope.cancel()


def _refuse(wrong: Status) -> Answer:
    async def answer(call: Call) -> None:
        raise wrong

    return answer
