"""A request to another server as it came, and that one's answer as it comes. Knows nothing of engines.

Method, path, query, end-to-end headers and body go there; status, end-to-end headers and the body come back, frame by
frame. A client that does not read stops the reading of the origin. Nothing is held but what one read gives.
"""

from __future__ import annotations

import trio

from dyn_relay.http11.client import BadResponse, Upstream, request_parts
from dyn_relay.http11.headers import end_to_end
from dyn_relay.http11.response import ResponseReader
from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.net import ConnectionBroken, Ended, Network

#: Made anew for the next hop, or answered here.
_OURS = frozenset({b"host", b"content-length", b"expect"})


async def forward(network: Network, served: ServerConnection, request: Request, upstream: Upstream) -> None:
    """Serve `request` with what the server at the end of `upstream` says; `served` is not complete if that broke off.

    Raises `BadResponse` for an answer that makes no sense, `ConnectionBroken` if the client has left.
    """
    target = f"{request.path}?{request.query}" if b"?" in request.target else request.path
    headers = [field for field in end_to_end(request.headers) if field[0] not in _OURS]
    parts = request_parts(upstream.origin, request.method, target, headers, request.body)
    answer = _Answer(served, no_body=request.method == "HEAD")
    failure: list[BadResponse] = []
    ended: Ended | None = None

    async def give() -> None:
        try:
            for part in parts:
                await upstream.connection.send(part)
        except ConnectionBroken:
            pass  # it may have answered before it closed: reading tells

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give)
        try:
            ended = await network.relay(upstream.connection, served.connection, answer)
        except BadResponse as exc:  # carried out of the nursery as it is
            failure.append(exc)
        nursery.cancel_scope.cancel()
    if failure:
        raise failure[0]
    if ended is Ended.EOF:
        await served.connection.send(answer.eof())


class _Answer:
    """The bytes of an answer, from the framing of the origin to that of the client. A `net.Transform`."""

    def __init__(self, served: ServerConnection, *, no_body: bool) -> None:
        self.done = False
        self.rest = 0.0
        self._served = served
        self._response = ResponseReader(no_body=no_body)
        self._begun = False

    def feed(self, data: bytes) -> bytes:
        """Raises `BadResponse`."""
        body = self._response.feed(data)
        return self._framed(body) if self._response.head_complete else b""

    def eof(self) -> bytes:
        """The origin has closed: the rest, if that is the end of the answer."""
        return self._framed(b"") if not self.done and self._response.eof() else b""

    def _framed(self, body: bytes) -> bytes:
        response, head = self._response, b""
        if not self._begun:
            self._begun = True
            headers = end_to_end(response.headers)
            head = self._served.head(response.status, headers, delimited=response.close_delimited)
        self.done = response.complete
        return self._served.frame(body, head, last=self.done)
