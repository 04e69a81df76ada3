"""What is known of an engine: who asks it, who waits for another's answer, and what the log says of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from h2 import events
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from dyn_relay.direct.engine import QUICK, SPARSE, Engine, Facts
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.metadata import Metadata
from dyn_relay.grpc.status import Code, Refused
from dyn_relay.net import ConnectFailed
from tests.grpc.hand import HEAD, HOST, PORT, Hand, World, world

Play = Callable[[Hand, int, dict[str, str]], Awaitable[None]]
RIGHT, WRONG = [[(b"authorization", key)] for key in (b"right", b"wrong")]


async def tells(hand: Hand, stream_id: int, **info: Any) -> None:
    """Its server info."""
    said = pb.GetServerInfoResponse(json_info=json.dumps(info)).SerializeToString()
    await hand.head(stream_id)
    await hand.data(stream_id, b"\0" + len(said).to_bytes(4, "big") + said)
    await hand.end(stream_id)


async def hangs(hand: Hand, stream_id: int, head: dict[str, str]) -> None:
    """No answer; its HTTP/2 lives, and answers pings."""


class Asked:
    """Those who want the facts of one engine, each in a task of its own."""

    def __init__(self, w: World) -> None:
        self.engine = Engine(w.channels)
        self.got: list[Facts | Exception] = []
        self._world = w

    async def ask(self, count: int, metadata: Metadata = ()) -> None:
        """Return once all of them have got something."""
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(self._one, metadata)

    async def _one(self, metadata: Metadata) -> None:
        try:
            self.got.append(await self.engine.facts(metadata))
        except (ConnectFailed, Refused) as exc:
            self.got.append(exc)


@asynccontextmanager
async def asked(play: Play) -> AsyncIterator[tuple[Asked, list[dict[str, str]]]]:
    """Before a server that does this with each call; the heads of all calls."""
    heads: list[dict[str, str]] = []

    async def serve(w: World, hand: Hand) -> None:
        while True:
            request = await hand.event(events.RequestReceived)
            heads.append(dict(request.headers))
            await play(hand, request.stream_id, heads[-1])

    async def accept(w: World) -> None:
        while True:
            w.nursery.start_soon(serve, w, await w.accept())

    async with world(idle_timeout=3600) as w:
        w.nursery.start_soon(accept, w)
        yield Asked(w), heads


async def test_one_answer_is_for_all_who_wait(autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int, head: dict[str, str]) -> None:
        await trio.sleep(10)
        await tells(hand, stream_id, port=7)

    async with asked(play) as (who, heads):
        await who.ask(8)  # as many as a connection has place for
        assert [facts.http_port for facts in who.got if isinstance(facts, Facts)] == [7] * 8
        assert len(heads) == 1


async def test_at_an_engine_that_hangs_nobody_waits_more_than_twice(autojump_clock: MockClock) -> None:
    async with asked(hangs) as (who, _):
        await who.ask(20)
        assert [failure.code for failure in who.got if isinstance(failure, Refused)] == [Code.DEADLINE_EXCEEDED] * 20
        assert trio.current_time() <= 2 * QUICK + 1


async def test_nor_where_none_can_be_reached(autojump_clock: MockClock) -> None:
    async with world() as w:
        w.network.hang((HOST, PORT))
        who = Asked(w)
        await who.ask(20)
        assert [type(failure) for failure in who.got] == [ConnectFailed] * 20
        assert trio.current_time() <= 6


async def test_who_comes_later_waits_no_longer(autojump_clock: MockClock) -> None:
    """Somebody asks at any time."""

    async def later(seconds: float) -> None:
        await trio.sleep(seconds)
        began = trio.current_time()
        await who.ask(1)
        waits.append(trio.current_time() - began)

    waits: list[float] = []
    async with asked(hangs) as (who, _):
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(later, 7.0 * number)
        assert len(waits) == 20
        assert max(waits) <= 2 * QUICK + 1


async def test_another_s_wrong_key_refuses_nobody_else(autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int, head: dict[str, str]) -> None:
        await trio.sleep(1)
        if head["authorization"] == "right":
            await tells(hand, stream_id, port=7)
        else:
            await hand.head(stream_id, [*HEAD, ("grpc-status", "16")], end=True)

    async with asked(play) as (who, heads), trio.open_nursery() as nursery:
        nursery.start_soon(who.ask, 1, WRONG)
        await wait_all_tasks_blocked()
        await who.ask(3, RIGHT)
        assert [isinstance(facts, Facts) for facts in who.got] == [False, True, True, True]
        assert heads[0]["authorization"] == "wrong"


async def test_who_asks_may_leave(autojump_clock: MockClock) -> None:
    async def play(hand: Hand, stream_id: int, head: dict[str, str]) -> None:
        if stream_id > 1:
            await tells(hand, stream_id)

    async with asked(play) as (who, heads), trio.open_nursery() as nursery, trio.open_nursery() as leaving:
        leaving.start_soon(who.ask, 1)
        await wait_all_tasks_blocked()
        nursery.start_soon(who.ask, 1)
        await wait_all_tasks_blocked()
        assert len(heads) == 1
        leaving.cancel_scope.cancel()
    assert [type(facts) for facts in who.got] == [Facts]


async def test_what_was_told_over_an_older_connection_is_asked_again_once(autojump_clock: MockClock) -> None:
    """Meanwhile there are others, which may lead to another process."""

    async def play(hand: Hand, stream_id: int, head: dict[str, str]) -> None:
        await trio.sleep(1)
        await tells(hand, stream_id)

    async with asked(play) as (who, heads), trio.open_nursery() as nursery:
        nursery.start_soon(who.ask, 8)
        await wait_all_tasks_blocked()
        assert len(heads) == 1
        who.engine.channels.made += 1
        await trio.sleep(100)
        assert (len(who.got), len(heads)) == (8, 2)


@pytest.mark.parametrize(
    ("info", "warned"),
    [
        ({}, True),
        ({"incremental_streaming_output": False, "stream_interval": SPARSE - 1}, True),
        ({"stream_interval": SPARSE}, False),
        ({"incremental_streaming_output": True, "stream_interval": 1}, False),
    ],
)
async def test_the_log_warns_once_of_an_engine_whose_answers_cost_too_much(
    autojump_clock: MockClock, info: dict[str, Any], warned: bool
) -> None:
    async def play(hand: Hand, stream_id: int, head: dict[str, str]) -> None:
        await tells(hand, stream_id, **info)

    async with asked(play) as (who, _):
        with capture_logs() as lines:
            for _ in range(2):
                await who.engine.server_info()
    advice = [line["advice"] for line in lines if line["log_level"] == "warning"]
    assert ["--incremental-streaming-output" in one for one in advice] == [True] * warned


async def test_and_again_when_it_is_another_one(autojump_clock: MockClock) -> None:
    intervals = iter([1, 1, 1000, 1])

    async def play(hand: Hand, stream_id: int, head: dict[str, str]) -> None:
        await tells(hand, stream_id, stream_interval=next(intervals))

    async with asked(play) as (who, _):
        with capture_logs() as lines:
            for _ in range(4):
                await who.engine.server_info()
    assert len([line for line in lines if line["log_level"] == "warning"]) == 2
