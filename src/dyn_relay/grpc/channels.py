"""Calls to one gRPC server, over as many connections as they need."""

from __future__ import annotations

import math
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic

import trio
from google.protobuf.message import DecodeError

from dyn_relay.grpc.messages import MAX_MESSAGE, framed
from dyn_relay.grpc.metadata import Metadata, request_fields
from dyn_relay.grpc.methods import Method, Q, R
from dyn_relay.grpc.options import KeepAlive, Options
from dyn_relay.grpc.status import CallFailed, Code, Lost, Refused
from dyn_relay.grpc.stream import Stream
from dyn_relay.grpc.transport import Transport
from dyn_relay.net import ConnectFailed, Network

__all__ = ["Call", "Channels", "KeepAlive", "Newer", "open_channels"]


class Call(Generic[R]):
    """One call: an async iterator of its messages, which ends only when the server has said OK.

    Else it raises, now and whenever it is asked again, after the messages that came before: `Refused` (also for the
    deadline, and at once then), `Lost`. One task at a time may iterate.
    """

    def __init__(self, transport: Transport, stream: Stream, response: type[R], deadline: float) -> None:
        self._transport = transport
        self._stream = stream
        self._response = response
        self._deadline = deadline
        self._failure: CallFailed | None = None

    @property
    def headers(self) -> Metadata:
        """The metadata at the answer's beginning; empty before the first message or the end has been seen."""
        return self._stream.headers

    @property
    def trailers(self) -> Metadata:
        """The metadata at the answer's end; empty before."""
        return self._stream.trailers

    def __aiter__(self) -> Call[R]:
        return self

    async def __anext__(self) -> R:
        if self._failure is not None:
            raise self._failure
        try:
            data = await self._next()
            if data is not None:
                return self._response.FromString(data)
        except CallFailed as failure:
            self._fail(failure)
            raise
        except DecodeError:
            lost = Lost(f"the message is no {self._response.DESCRIPTOR.name}")
            self._fail(lost)
            raise lost from None
        raise StopAsyncIteration

    async def _next(self) -> bytes | None:
        stream = self._stream
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if trio.current_time() >= self._deadline:
                raise _late()
            if (message := stream.take()) is not None:
                return message
            if stream.ended:
                if (failure := stream.outcome()) is not None:
                    raise failure
                return None
            if self._deadline == math.inf:
                await stream.wait()
            else:
                with trio.move_on_at(self._deadline):
                    await stream.wait()

    def _fail(self, failure: CallFailed) -> None:
        self._failure = failure
        self._transport.cancel(self._stream)


class Newer(Exception):
    """The call was not sent: the connection that it would go over is younger than what its request was made from."""


class Channels:
    """The connections to one server. Made by `open_channels`."""

    def __init__(self, options: Options, nursery: trio.Nursery) -> None:
        self._options = options
        self._nursery = nursery
        self._scheme = b"http" if options.tls is None else b"https"
        self._authority = options.authority.encode("ascii")
        #: Oldest first: calls gather on the old ones, so that the young ones can go.
        self._transports: list[Transport] = []
        self._closed = False
        #: How many connections there ever were. What is known of the server holds while this stays: the next one may
        #: lead to another process.
        self.made = 0

    def close(self) -> None:
        """No new connections: who still waits for one gets `ConnectFailed`."""
        self._closed = True

    @asynccontextmanager
    async def call(
        self,
        method: Method[Q, R],
        request: Q,
        *,
        timeout: float | None = None,
        metadata: Metadata = (),
        known: int | None = None,
    ) -> AsyncIterator[Call[R]]:
        """Send a request; leaving the block before the end of the answer cancels the call at the server.

        `timeout`: seconds for everything from the dial to the end, told to the server; none if None.
        `known`: as many connections were `made` when the request was written.
        Raises `Newer` if it would go over a younger one, `ConnectFailed`, `Refused(DEADLINE_EXCEEDED)`,
        `TooLarge`, `Lost`, and `ValueError` for metadata that cannot be sent.
        """
        body = framed(request.SerializeToString(), self._options.max_message)
        deadline = math.inf if timeout is None else trio.current_time() + timeout
        if timeout is not None and timeout <= 0:
            raise _late()
        fields = request_fields(self._scheme, self._authority, method.path, timeout, metadata)
        transport: Transport | None = None
        stream: Stream | None = None
        try:
            with trio.move_on_at(deadline) as scope:
                transport = await self._claim()
                if known is not None and transport.number > known:
                    raise Newer
                stream = await transport.open(fields, body)
            if transport is None or stream is None:
                assert scope.cancelled_caught
                raise _late()
            yield Call(transport, stream, method.response, deadline)
        finally:
            if transport is not None:
                if stream is not None:
                    transport.cancel(stream)
                transport.release()

    async def unary(self, method: Method[Q, R], request: Q, *, timeout: float | None, metadata: Metadata = ()) -> R:
        """The one message of the answer. Raises what `call` and `Call` raise; `Lost` if there is none, or another."""
        answer: R | None = None
        async with self.call(method, request, timeout=timeout, metadata=metadata) as call:
            async for message in call:
                if answer is not None:
                    raise Lost("more than one message answers a call that has one")
                answer = message
        if answer is None:
            raise Lost("no message answers a call that has one")
        return answer

    async def reach(self) -> None:
        """Return once a call could be made, dialling if need be. Raises `ConnectFailed`."""
        (await self._claim()).release()

    async def _claim(self) -> Transport:
        """A connection with a place for one more call, the place being taken."""
        while True:
            transport = self._with_place()
            dialled = transport is None
            if transport is None:
                if self._closed:
                    raise ConnectFailed(f"{self._options.authority}: the channels are closed")
                transport = Transport(self._options)
                self._transports.append(transport)
                self._nursery.start_soon(self._run, transport)
            transport.claims += 1
            try:
                await transport.settled()
            except BaseException:
                transport.release()
                raise
            if not transport.number:
                self.made = transport.number = self.made + 1
            if transport.claims <= transport.capacity:
                return transport
            # It holds fewer than was thought, or has gone since it was chosen.
            transport.release()
            if dialled and not transport.capacity:
                raise ConnectFailed(f"{self._options.authority}: takes no calls")

    def _with_place(self) -> Transport | None:
        for transport in self._transports:
            if transport.claims < transport.capacity and not transport.stale():
                return transport
        return None

    async def _run(self, transport: Transport) -> None:
        try:
            await transport.run()
        finally:
            self._transports.remove(transport)


@asynccontextmanager
async def open_channels(
    network: Network,
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    connect_timeout: float = 5.0,
    streams_per_connection: int = 8,
    idle_timeout: float = 60.0,
    max_message: int = MAX_MESSAGE,
    keepalive: KeepAlive | None = None,
) -> AsyncIterator[Channels]:
    """Calls to the server at `host:port`, for as long as the block lasts; connections are made when they are needed.

    `tls`: a client context of its own, since its ALPN is set to h2 here; plain text if None.
    `connect_timeout`: seconds until the server's SETTINGS must be here.
    `streams_per_connection`: calls on one connection at most, so that its death does not take all; fewer if the server
    says so. `idle_timeout`: seconds until a connection without calls is closed.
    `max_message`: bytes of a message at most, either way.
    """
    if tls is not None:
        tls.set_alpn_protocols(["h2"])
    options = Options(
        network,
        host,
        port,
        tls,
        connect_timeout,
        streams_per_connection,
        idle_timeout,
        max_message,
        keepalive or KeepAlive(),
    )
    async with trio.open_nursery() as nursery:
        channels = Channels(options, nursery)
        try:
            yield channels
        finally:
            channels.close()
            nursery.cancel_scope.cancel()


def _late() -> Refused:
    return Refused(Code.DEADLINE_EXCEEDED, "the deadline of the call has passed")
