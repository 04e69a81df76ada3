"""One HTTP/2 connection to a server, and the streams on it.

Two tasks own it: one reads, one writes what could not be written at once and keeps the time. Whoever has a stream
leaves bytes with h2 and goes on; only a request that is larger than the windows makes its sender wait. Nobody who
takes slowly holds up another: the connection's window is given back as bytes come in, a stream's as they are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import trio
from h2 import events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError

from dyn_relay.grpc.frames import FrameSplitter, GoAway
from dyn_relay.grpc.http2 import CONNECTION_WINDOW, code_name, goodbye, new_client
from dyn_relay.grpc.options import Options
from dyn_relay.grpc.status import Lost
from dyn_relay.grpc.stream import Stream
from dyn_relay.net import RECEIVE_SIZE, STOPPED, ConnectFailed, Connection, ConnectionBroken

#: Bytes waiting to be written above which no request's data is added.
_BACKLOG = 65536

#: ... and above which nothing more is read: a peer that makes us answer (PING, SETTINGS) must take the answers.
_BACKLOG_TO_READ = 4 * _BACKLOG

#: A stream's number must stay below this.
_LAST_STREAM_ID = 2**31 - 1


class Transport:
    """One connection. Its owner runs `run`, and counts in `claims` the calls that are to be made on it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        #: Of all that were ever open to this server, from 1; 0 before.
        self.number = 0
        self._h2 = new_client()
        self._frames = FrameSplitter()
        self._scope = trio.CancelScope()
        self._connection: Connection | None = None
        #: Set once it is known whether calls can be made: it is open, or it is over.
        self._settled = trio.Event()
        self._refusal: ConnectFailed | None = None
        #: The server's SETTINGS have come.
        self._greeted = False
        #: No new streams: the server said so, or the numbers are used up.
        self._draining = False
        self._closed = False
        #: Calls that hold a place here, whether their streams are open or not.
        self.claims = 0
        self._streams: dict[int, Stream] = {}
        self._backlog = bytearray()
        #: Wakes the writing task: there is something to write, or to be in time for.
        self._wake = trio.Event()
        self._alarm = math.inf
        #: Senders that wait for room, and the reading task while the peer does not take.
        self._room = trio.lowlevel.ParkingLot()
        #: Received bytes of the connection's window that were not given back yet.
        self._ungranted = 0
        #: When the last byte came; when the last ping went, until it is answered; when the next may go at the earliest.
        self._heard = 0.0
        self._pinged: float | None = None
        self._next_ping = 0.0
        self._idle_since = 0.0

    # For its owner.

    @property
    def capacity(self) -> int:
        """How many calls may be here at a time; 0 when it takes no more."""
        if self._closed or self._draining:
            return 0
        if not self._greeted:
            return self._options.streams_per_connection
        return min(self._options.streams_per_connection, self._h2.remote_settings.max_concurrent_streams)

    def stale(self) -> bool:
        """It is idle, and what has come from the server since was not read yet: it may be an end."""
        return not self.claims and self._connection is not None and not self._connection.quiet()

    async def settled(self) -> None:
        """Return when it is known whether calls can be made (see `capacity`). Raises `ConnectFailed`."""
        await self._settled.wait()
        if self._refusal is not None:
            raise ConnectFailed(str(self._refusal))

    async def run(self) -> None:
        """Dial, and carry streams until the connection is over."""
        try:
            with self._scope:
                await self._dial()
                self._settled.set()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    await self._read()
        except ConnectFailed as exc:
            self._refusal = exc
        finally:
            self.close("the channels were closed")
            if self._connection is not None:
                self._connection.close()
            self._settled.set()

    def close(self, why: str, code: int = ErrorCodes.NO_ERROR) -> None:
        """The connection is over, and with it what is on it. The first reason counts; `code`: what the peer is told."""
        if self._closed:
            return
        self._closed = True
        for stream in list(self._streams.values()):
            self._lose(stream, why)
        if self._connection is not None and not self._backlog:
            self._connection.offer(goodbye(self._h2, code))
        self._room.unpark_all()
        self._scope.cancel()

    async def open(self, fields: list[tuple[bytes, bytes]], body: bytes) -> Stream:
        """Send a request. It needs one of the `claims`, and `capacity` for it.

        Returns early if the answer ends before the request was read. Raises `Lost` if there is no connection any more.
        """
        if not self.capacity:
            raise Lost("the connection takes no more calls", unprocessed=True)
        stream_id = self._h2.get_next_available_stream_id()
        self._draining = stream_id + 2 >= _LAST_STREAM_ID
        self._h2.send_headers(stream_id, fields)
        stream = Stream(stream_id, self._options.max_message, self._grant)
        self._streams[stream_id] = stream
        self._look_at_clock()
        try:
            await self._send(stream, body)
        except BaseException:
            self.cancel(stream)
            raise
        return stream

    def cancel(self, stream: Stream) -> None:
        """Nobody wants the rest of this stream."""
        if not stream.ended:
            stream.end(Lost("the call was left"))
            self._forget(stream, reset=True)
            self._flush()

    def release(self) -> None:
        """One claim less."""
        self.claims -= 1
        if not self.claims:
            self._idle_since = trio.current_time()
            self._look_at_clock()

    # Reading.

    async def _dial(self) -> None:
        """Connect and exchange SETTINGS. Raises `ConnectFailed`."""
        options, peer = self._options, self._options.authority
        with trio.move_on_after(options.connect_timeout) as scope:
            self._connection = await options.network.connect(options.host, options.port, options.tls)
            try:
                await self._connection.send(self._h2.data_to_send())
                while not self._greeted:
                    data = await self._connection.receive()
                    if not data:
                        raise ConnectFailed(f"{peer}: closed before it spoke HTTP/2")
                    self._feed(data)
            except ConnectionBroken as exc:
                raise ConnectFailed(f"{peer}: broke before it spoke HTTP/2: {exc}") from exc
            except ProtocolError as exc:
                raise ConnectFailed(f"{peer}: does not speak HTTP/2: {exc}") from exc
        if scope.cancelled_caught:
            what = "no connection" if self._connection is None else "no HTTP/2 SETTINGS"
            raise ConnectFailed(f"{peer}: {what} within {options.connect_timeout:g} s")
        self._heard = self._idle_since = trio.current_time()

    async def _read(self) -> None:
        assert self._connection is not None
        while not self._closed:
            try:
                data = await self._connection.receive()
                if not data:
                    self.close("the server closed the connection")
                    return
                self._heard = trio.current_time()
                self._feed(data)
            except ConnectionBroken as exc:
                self.close(f"the connection broke: {exc}")
                return
            except ProtocolError as exc:
                self.close(f"the server broke HTTP/2: {exc}", exc.error_code)
                return
            if len(data) >= RECEIVE_SIZE // 4:
                await trio.lowlevel.checkpoint()  # a fast server must not keep those waiting who take what it sends
            while len(self._backlog) > _BACKLOG_TO_READ:
                await self._room.park()

    def _feed(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            if isinstance(frame, GoAway):
                self._goaway(frame)
                continue
            for event in self._h2.receive_data(frame):
                handle = _HANDLERS.get(type(event))
                if handle is not None:
                    handle(self, event)
        self._flush()

    def _on_head(self, event: events.ResponseReceived) -> None:
        self._hear_answer()
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            last = event.stream_ended is not None
            stream.head(event.headers, last=last)
            self._settle(stream, last=last)

    def _on_data(self, event: events.DataReceived) -> None:
        self._hear_answer()
        self._ungranted += event.flow_controlled_length
        if self._ungranted >= CONNECTION_WINDOW // 2:
            self._h2.increment_flow_control_window(self._ungranted)
            self._ungranted = 0
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            last = event.stream_ended is not None
            if last:
                # Before `feed`, which would grant more on a stream that h2 has closed.
                stream.end(Lost("the answer ended without trailers"))
            stream.feed(event.data, event.flow_controlled_length)
            self._settle(stream, last=last)

    def _on_trailers(self, event: events.TrailersReceived) -> None:
        self._hear_answer()
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            stream.finish(event.headers)
            self._settle(stream, last=True)

    def _on_reset(self, event: events.StreamReset) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            refused = event.error_code == ErrorCodes.REFUSED_STREAM
            why = f"the server reset the stream: {code_name(event.error_code)}"
            stream.end(Lost(why, unprocessed=refused and not stream.answered))
            self._forget(stream, reset=False)

    def _on_room(self, event: events.Event) -> None:
        self._room.unpark_all()

    def _on_settings(self, event: events.RemoteSettingsChanged) -> None:
        self._greeted = True
        self._room.unpark_all()

    def _on_pong(self, event: events.PingAckReceived) -> None:
        if self._pinged is not None:
            self._next_ping = self._pinged + self._options.keepalive.interval
            self._pinged = None
            self._look_at_clock()

    def _goaway(self, frame: GoAway) -> None:
        self._draining = True
        why = f"the server goes away: {code_name(frame.code)}{': ' if frame.reason else ''}{frame.reason}"
        for stream in list(self._streams.values()):
            if stream.id > frame.last_stream_id:
                stream.end(Lost(why, unprocessed=not stream.answered))
                self._forget(stream, reset=False)
        self._drained()

    def _hear_answer(self) -> None:
        """The server has sent HEADERS or DATA: its count of pings begins anew.

        Until a ping is answered this may be older than the ping, and changes nothing: the pong sets the time again.
        """
        if self._next_ping:
            self._next_ping = 0.0
            self._look_at_clock()

    def _settle(self, stream: Stream, *, last: bool) -> None:
        if stream.ended:
            # Also what is complete in one direction only has to be reset: the server may wait for our half.
            self._forget(stream, reset=not (last and stream.sent))

    def _lose(self, stream: Stream, why: str) -> None:
        stream.end(Lost(why))
        self._forget(stream, reset=False)

    def _forget(self, stream: Stream, *, reset: bool) -> None:
        if self._streams.pop(stream.id, None) is None:
            return
        if reset and not self._closed:
            self._h2.reset_stream(stream.id, ErrorCodes.CANCEL)
        self._room.unpark_all()
        self._drained()

    def _drained(self) -> None:
        if self._draining and not self._streams:
            self.close("the server goes away")

    # Writing.

    async def _send(self, stream: Stream, body: bytes) -> None:
        rest = memoryview(body)
        while not stream.ended:
            room = min(
                len(rest),
                self._h2.local_flow_control_window(stream.id),
                self._h2.max_outbound_frame_size,
                _BACKLOG - len(self._backlog),
            )
            if room <= 0:
                self._flush()
                await self._room.park()
                continue
            stream.sent = room == len(rest)
            self._h2.send_data(stream.id, rest[:room], end_stream=stream.sent)
            self._flush()
            if stream.sent:
                return
            rest = rest[room:]
            await trio.lowlevel.checkpoint()

    def _grant(self, stream_id: int, size: int) -> None:
        self._h2.increment_flow_control_window(size, stream_id)
        self._flush()

    def _flush(self) -> None:
        """Write what h2 has to say; what cannot be written at once is left to the writing task."""
        data = self._h2.data_to_send()
        if not data or self._closed or self._connection is None:
            return
        if self._backlog or not self._connection.offer(data):
            self._backlog += data
        if self._backlog or self._connection.pending:
            self._wake.set()

    async def _write(self) -> None:
        assert self._connection is not None
        while True:
            while self._backlog or self._connection.pending:
                data = bytes(memoryview(self._backlog)[:RECEIVE_SIZE])
                try:
                    await self._connection.send(data)
                except ConnectionBroken as exc:
                    self.close(f"the connection broke: {exc}")
                    return
                del self._backlog[: len(data)]
                self._room.unpark_all()
            self._wake = trio.Event()
            self._alarm = self._due()
            with trio.move_on_at(self._alarm):
                await self._wake.wait()
            self._keep_time()

    # Time.

    def _due(self) -> float:
        """When `_keep_time` has something to do."""
        keepalive = self._options.keepalive
        if self._pinged is not None:
            return max(self._pinged, self._heard) + keepalive.timeout
        if self._streams:
            return max(self._heard + keepalive.silence, self._next_ping)
        return math.inf if self.claims else self._idle_since + self._options.idle_timeout

    def _look_at_clock(self) -> None:
        if self._due() < self._alarm:
            self._wake.set()

    def _keep_time(self) -> None:
        now = trio.current_time()
        if now > self._alarm + STOPPED:
            # We stood still, not the server: its bytes may lie unread, and this task may run before the one that reads
            # them. So it has all of its time from now on.
            self._heard = now
        if now < self._due():
            return
        if self._pinged is not None:
            self.close(f"the server has not answered a ping for {self._options.keepalive.timeout:g} s")
        elif self._streams:
            self._pinged = now
            self._h2.ping(b"dynrelay")
            self._flush()
        else:
            self.close("idle")


_HANDLERS: dict[type[events.Event], Callable[[Transport, Any], None]] = {
    events.ResponseReceived: Transport._on_head,
    events.DataReceived: Transport._on_data,
    events.TrailersReceived: Transport._on_trailers,
    events.StreamReset: Transport._on_reset,
    events.WindowUpdated: Transport._on_room,
    events.RemoteSettingsChanged: Transport._on_settings,
    events.PingAckReceived: Transport._on_pong,
}
