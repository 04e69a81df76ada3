"""The clients of a run: each sends one request and reads its answer, at its own pace, to the end or until it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from dyn_relay.net import ConnectFailed, Network
from dyn_testkit.client import Response, begin
from dyn_testkit.history import Record
from dyn_testkit.watch import EventReader, Watch

if TYPE_CHECKING:
    from dyn_testkit.simulation.scenario import RequestPlan


class Client:
    """One client."""

    def __init__(self, plan: RequestPlan, clients: Clients) -> None:
        self.plan = plan
        #: When somebody asked for its abort.
        self.aborted: float | None = None
        self._clients = clients
        self._reader = EventReader(plan.key, clients.watch)
        self._rest = b""
        self._response = Response()
        self._scope = trio.CancelScope()

    @property
    def rid(self) -> str:
        """The name that it gave its request; "" if none."""
        return str(self.plan.body.get("rid") or "")

    def leave(self) -> None:
        """Close the connection in the middle of the answer."""
        self._scope.cancel()

    async def run(self, network: Network, url: str) -> Record:
        """Send the request; what came of it."""
        sent = trio.current_time()
        error = ""
        with self._scope:
            try:
                await self._converse(network, url)
                error = "" if self._response.complete else self._response.broken or "the answer broke off"
            except ConnectFailed as exc:
                error = str(exc)
        left = self._scope.cancelled_caught
        return self._record(self._response, error, sent, left=left)

    async def _converse(self, network: Network, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        connection = await network.connect(host, int(port))
        try:
            ongoing = await begin(connection, "/generate", self.plan.body, headers={"connection": "close"})
            response = self._response = ongoing.response
            while await ongoing.more():
                await self._hear(response.parts[-1])
            response.body = b"".join(response.parts)
        finally:
            connection.close()

    def _record(self, response: Response, error: str, sent: float, *, left: bool) -> Record:
        headers = {name.decode().lower(): value.decode() for name, value in response.headers}
        streamed = headers.get("content-type", "").startswith("text/event-stream") or not headers
        fields: dict[str, Any] = self._reader.read() if streamed else {}
        return Record(
            key=self.plan.key,
            body=self.plan.body,
            status=response.status,
            headers=headers,
            text="" if streamed else response.body.decode("utf-8", "replace"),
            error="the client left" if left else error,
            left=left or self.aborted is not None,
            aborted=self.aborted,
            sent=sent,
            ended=trio.current_time(),
            **fields,
        )

    async def _hear(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._reader.line(line.decode("utf-8", "replace"), trio.current_time())
        if self._clients.pace:
            await trio.sleep(self._clients.pace)


class Clients:
    """All clients of a run."""

    def __init__(self) -> None:
        self.watch = Watch()
        #: Seconds that each takes for each read.
        self.pace = 0.0
        self._live: dict[str, Client] = {}

    @property
    def live(self) -> list[Client]:
        """Those that wait for their answers, in the order in which they came."""
        return list(self._live.values())

    async def run(self, plan: RequestPlan, network: Network, url: str) -> Record:
        """One client from its beginning to its end."""
        client = self._live[plan.key] = Client(plan, self)
        try:
            return await client.run(network, url)
        finally:
            del self._live[plan.key]
            self.watch.finish(plan.key)
