"""A server that does on the wire exactly what a test says, on the simulated network."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import h2.config
import h2.connection
import h2.events
import hyperframe.frame
import trio
from h2.settings import SettingCodes, Settings

from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.channels import Call, Channels, open_channels
from dyn_relay.net import Connection, Listener
from dyn_testkit.simnet import Link, SimNetwork

HOST, PORT = "engine", 30001
HEAD = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0")]

E = TypeVar("E", bound=h2.events.Event)


def message(number: int, filler: int = 0) -> bytes:
    """A framed answer with one token id, and `filler` bytes of text."""
    data = pb.GenerateResponse(output_ids=[number], text="x" * filler).SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


class Hand:
    """One accepted connection. Nothing is sent or read but by a call of the test."""

    def __init__(self, connection: Connection, settings: dict[SettingCodes, int]) -> None:
        self.connection = connection
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.h2.local_settings = Settings(client=False, initial_values=settings)
        self.h2.initiate_connection()
        self._events: deque[h2.events.Event] = deque()

    async def flush(self) -> None:
        await self.connection.send(self.h2.data_to_send())

    async def event(self, kind: type[E], *, stream_id: int | None = None) -> E:
        """The next event of this kind (and stream); those before it are dropped."""
        while True:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, kind) and stream_id in (None, getattr(event, "stream_id", None)):
                    return event
            data = await self.connection.receive()
            assert data, f"the client closed; awaited {kind.__name__}"
            self._events.extend(self.h2.receive_data(data))
            await self.flush()

    async def request(self) -> int:
        """Read a whole request; its stream's number."""
        event = await self.event(h2.events.StreamEnded)
        return event.stream_id

    async def closed(self) -> list[h2.events.Event]:
        """Read until the client has closed; the events before."""
        seen = list(self._events)
        while data := await self.connection.receive():
            seen += self.h2.receive_data(data)
        return seen

    async def head(self, stream_id: int, fields: Any = HEAD, *, end: bool = False) -> None:
        self.h2.send_headers(stream_id, fields, end_stream=end)
        await self.flush()

    async def data(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Within what the client lets us send."""
        self.h2.send_data(stream_id, data, end_stream=end)
        await self.flush()

    async def pour(self, stream_id: int, data: bytes) -> None:
        """All of it, waiting for the client to let us."""
        while data:
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            if room:
                await self.data(stream_id, data[:room])
                data = data[room:]
            else:
                await self.event(h2.events.WindowUpdated)

    async def end(self, stream_id: int, fields: Any = OK) -> None:
        self.h2.send_headers(stream_id, fields, end_stream=True)
        await self.flush()

    async def answer(self, stream_id: int, *numbers: int) -> None:
        """A whole good answer."""
        await self.head(stream_id)
        for number in numbers:
            await self.data(stream_id, message(number))
        await self.end(stream_id)

    async def frame(self, kind: str, stream_id: int, *, flags: tuple[str, ...] = (), **fields: Any) -> None:
        """A frame that h2 would not make, by hyperframe's name for it."""
        made = getattr(hyperframe.frame, f"{kind}Frame")(stream_id, **fields)
        for flag in flags:
            made.flags.add(flag)
        await self.connection.send(made.serialize())

    async def goaway(self, last: int, code: int = 0, reason: bytes = b"") -> None:
        await self.frame("GoAway", 0, last_stream_id=last, error_code=code, additional_data=reason)


class World:
    """A client's channels to one address, and whoever listens there."""

    def __init__(self, network: SimNetwork, listener: Listener, channels: Channels, nursery: trio.Nursery) -> None:
        self.network = network
        self.listener = listener
        self.channels = channels
        self.nursery = nursery

    async def accept(self, **settings: int) -> Hand:
        """The next connection; our SETTINGS are sent at once."""
        named = {SettingCodes[name.upper()]: value for name, value in settings.items()}
        hand = Hand(await self.listener.accept(), named)
        await hand.flush()
        return hand

    def generate(self, rid: str = "r", **options: Any) -> Any:
        return self.channels.call(methods.GENERATE, pb.GenerateRequest(rid=rid), **options)

    @asynccontextmanager
    async def opened(self, rid: str = "r", **options: Any) -> AsyncIterator[tuple[Call[pb.GenerateResponse], Hand]]:
        """A call on a connection of its own, and the server's end of it."""
        accepted: list[Hand] = []

        async def accept() -> None:
            accepted.append(await self.accept())

        self.nursery.start_soon(accept)
        async with self.generate(rid, **options) as call:
            yield call, accepted[0]

    def start(self, rid: str = "r", **options: Any) -> Outcome:
        """A call in a task of its own, which takes all it gets."""
        outcome = Outcome()
        self.nursery.start_soon(self._run, outcome, rid, options)
        return outcome

    async def _run(self, outcome: Outcome, rid: str, options: dict[str, Any]) -> None:
        try:
            async with self.generate(rid, **options) as call:
                async for item in call:
                    outcome.numbers += item.output_ids
        except Exception as exc:
            outcome.failure = exc
        finally:
            outcome.over.set()


class Outcome:
    """What a call has given."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.failure: Exception | None = None
        self.over = trio.Event()

    async def wait(self) -> Outcome:
        await self.over.wait()
        return self

    async def fails(self, kind: type[Exception]) -> Any:
        await self.over.wait()
        assert type(self.failure) is kind, repr(self.failure)
        return self.failure


@asynccontextmanager
async def world(link: Link | None = None, **options: Any) -> AsyncIterator[World]:
    """`options`: of `open_channels`."""
    network = SimNetwork(seed=1, link=link)
    listener = await network.listen(HOST, PORT)
    with trio.fail_after(10 * 3600):
        async with trio.open_nursery() as nursery, open_channels(network, HOST, PORT, **options) as channels:
            yield World(network, listener, channels, nursery)
            nursery.cancel_scope.cancel()


async def numbers(call: Call[pb.GenerateResponse]) -> list[int]:
    """All that is left of a call."""
    return [number async for item in call for number in item.output_ids]
