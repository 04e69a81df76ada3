"""The server's side of gRPC, as its own frames show it: messages, statuses, windows, resets, GOAWAY."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.methods import Method
from dyn_relay.grpc.status import Code
from dyn_testkit import strategies
from dyn_testkit.grpc import MAX_MESSAGE, Call, CallGone, Limits, Status, frame
from dyn_testkit.grpc.client import open_client
from dyn_testkit.grpc.wire import ALL_STREAMS
from dyn_testkit.simnet import Link
from tests.grpc_engine.engine_kit import URL, serving, talking

REQUEST = pb.GenerateRequest(input_ids=[1, 2, 3])
NOWHERE = Method("/sglang.runtime.v1.SglangService/Nope", pb.GenerateRequest, pb.GenerateResponse)


async def echo(call: Call, request: pb.GenerateRequest) -> None:
    for token in request.input_ids:
        await call.send(pb.GenerateResponse(output_ids=[token]))


async def forever(call: Call, request: pb.GenerateRequest) -> None:
    await call.send(pb.GenerateResponse(output_ids=[0]))
    await trio.sleep_forever()


def ids(answer: Any) -> list[list[int]]:
    return [list(message.output_ids) for message in answer.messages]


async def test_a_call_has_a_head_messages_and_trailers() -> None:
    async with serving(echo) as server:
        answer = await server.ask(REQUEST)
    assert answer.headers[":status"] == "200"
    assert answer.headers["content-type"] == "application/grpc"
    assert answer.headers["date"].endswith(" GMT")
    assert ids(answer) == [[1], [2], [3]]
    assert [flag for flag, _ in answer.frames] == [0, 0, 0]
    assert (answer.trailers, answer.ended) == ({"grpc-status": "0"}, "end")


@pytest.mark.parametrize(
    "message", ["", "plain words, punctuation: ~ ! /", "50 % of ünï\n\tcode 👩‍🚀", "%41 is not A", "\x7f\x00"]
)
@pytest.mark.parametrize("begun", [False, True])
async def test_a_status_keeps_its_words(message: str, begun: bool) -> None:
    async def handler(call: Call, request: pb.GenerateRequest) -> None:
        if begun:
            await call.head()
        raise Status(Code.FAILED_PRECONDITION, message)

    async with serving(handler) as server:
        answer = await server.ask(REQUEST)
    assert (answer.status, answer.message, ids(answer)) == (9, message, [])
    spelled = (answer.trailers if begun else answer.headers).get("grpc-message", "")
    assert all(" " <= char <= "~" for char in spelled)
    assert bool(answer.trailers) is begun  # without a head, it is all in one frame


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b"", Code.INTERNAL, "Missing request message."),
        (b"\0\0\0", Code.INTERNAL, "Unexpected EOF decoding stream."),
        (frame(b"\x0a\x01")[:-1], Code.INTERNAL, "Unexpected EOF decoding stream."),
        (frame(b"\xff\xff\xff"), Code.INTERNAL, "failed to decode Protobuf message: "),
        (frame(b"", compressed=True), Code.INTERNAL, "protocol error: received message with compressed-flag but no"),
        (b"\x02\0\0\0\0", Code.INTERNAL, "protocol error: received message with invalid compression flag: 2"),
        (frame(b"") * 2, Code.UNIMPLEMENTED, "more than one request message"),
    ],
)
async def test_a_body_that_is_no_request_is_refused(body: bytes, code: Code, message: str) -> None:
    async with serving(echo) as server:
        answer = await server.ask(body)
    assert answer.status == code
    assert answer.message.startswith(message)
    assert not answer.data


async def test_a_compressed_request_is_refused() -> None:
    async with serving(echo) as server:
        answer = await server.ask(frame(b"", compressed=True), [("grpc-encoding", "gzip")])
        plain = await server.ask(REQUEST, [("grpc-encoding", "identity")])
    assert (answer.status, answer.message) == (12, "Content is compressed with `gzip` which isn't supported")
    assert plain.status == Code.OK


async def test_a_message_beyond_the_limit_is_refused_by_its_length_alone() -> None:
    async with talking(echo) as (_, client):
        refused = await client.open(methods.GENERATE)
        await client.send(refused, struct.pack(">BI", 0, MAX_MESSAGE + 1), end=False)
        await wait_all_tasks_blocked()
        largest = await client.open(methods.GENERATE)
        await client.send(largest, struct.pack(">BI", 0, MAX_MESSAGE), end=False)
        await wait_all_tasks_blocked()
    assert refused.status == Code.OUT_OF_RANGE
    limit = f"found {MAX_MESSAGE + 1} bytes, the limit is: {MAX_MESSAGE} bytes"
    assert refused.message == f"Error, decoded message length too large: {limit}"
    assert not largest.headers


async def test_a_method_that_is_not_there() -> None:
    async with talking(echo) as (_, client):
        answer = await (await client.call(NOWHERE, REQUEST)).done()
        again = await (await client.call(methods.GENERATE, REQUEST)).done()
    assert (answer.status, answer.message) == (Code.UNIMPLEMENTED, "")
    assert again.status == Code.OK


@pytest.mark.parametrize(
    ("timeout", "seconds"), [("3S", 3.0), ("1500m", 1.5), ("2M", 120.0), ("1H", 3600.0), ("5000000u", 5.0)]
)
async def test_a_deadline_ends_a_call(timeout: str, seconds: float, autojump_clock: MockClock) -> None:
    async with serving(forever, limits=Limits(deadlines=True)) as server:
        began = trio.current_time()
        answer = await server.ask(REQUEST, [("grpc-timeout", timeout)])
        assert trio.current_time() - began == pytest.approx(seconds)
    assert (answer.status, ids(answer)) == (Code.DEADLINE_EXCEEDED, [[0]])


@pytest.mark.parametrize("timeout", ["", "S", "123456789S", "1.5S", "1s", "-1S"])
async def test_a_deadline_that_is_none_is_ignored(timeout: str) -> None:
    async with serving(echo, limits=Limits(deadlines=True)) as server:
        answer = await server.ask(REQUEST, [("grpc-timeout", timeout)])
    assert answer.status == Code.OK


@pytest.mark.parametrize("how", ["reset", "close", "abort"])
async def test_a_client_that_leaves_ends_its_call(how: str) -> None:
    ended = trio.Event()
    calls: list[Call] = []

    async def handler(call: Call, request: pb.GenerateRequest) -> None:
        calls.append(call)
        try:
            await forever(call, request)
        finally:
            ended.set()

    async with talking(handler) as (_, client):
        answer = await client.call(methods.GENERATE, REQUEST)
        await answer.reaches(1)
        if how == "reset":
            await client.cancel(answer)
        elif how == "close":
            client.connection.close()
        else:
            client.connection.abort()
        await ended.wait()
        await wait_all_tasks_blocked()
        [call] = calls
        assert (call.gone, call.left) == (True, True)
        with pytest.raises(CallGone):
            await call.send(b"")
        if how == "reset":  # the connection serves on
            other = await client.call(methods.GENERATE, REQUEST)
            await other.reaches(1)
            assert ids(other) == [[0]]


@pytest.mark.parametrize("window", [1, 300, 70000])
async def test_nothing_is_sent_beyond_a_window(window: int) -> None:
    message = pb.GenerateResponse(text="x" * 1000)
    out = 0

    async def handler(call: Call, request: pb.GenerateRequest) -> None:
        nonlocal out
        for _ in range(100):
            await call.send(message)
            out += 1

    size = len(frame(message.SerializeToString()))
    async with talking(handler, window=window) as (_, client):
        answer = await client.call(methods.GENERATE, REQUEST)
        await wait_all_tasks_blocked()
        most = min(window, 65535)  # the connection's own window is never more than that here
        assert len(answer.data) == most
        assert out == most // size  # a message counts as sent when it is out
        while not answer.ended and len(answer.data) < min(5000, 40 * window):
            before = len(answer.data)
            await client.grant(answer)
            await wait_all_tasks_blocked()
            assert before < len(answer.data) <= before + window
        if window == 70000:
            await client.grant(answer)
            await answer.done()
            assert [one.text for one in answer.messages] == [message.text] * 100


async def test_a_slow_reader_holds_up_nobody_else() -> None:
    """The first stream fills its window, and another one goes on beside it."""

    async def handler(call: Call, request: pb.GenerateRequest) -> None:
        for _ in range(request.input_ids[0]):
            await call.send(pb.GenerateResponse(text="x" * 1000))

    async with talking(handler, window=10000) as (_, client):
        slow = await client.call(methods.GENERATE, pb.GenerateRequest(input_ids=[50]))
        await wait_all_tasks_blocked()
        quick = await client.call(methods.GENERATE, pb.GenerateRequest(input_ids=[5]))
        await quick.done()
        assert (quick.status, len(quick.messages)) == (Code.OK, 5)
        assert (slow.ended, len(slow.data)) == ("", 10000)


async def test_a_deaf_server_takes_no_more_than_its_windows() -> None:
    async with talking(echo, limits=Limits(window=4000)) as (server, client):
        [wire] = server.wires
        wire.deaf = True
        answer = await client.open(methods.GENERATE)
        await client.send(answer, bytes(4000), end=False)
        await wait_all_tasks_blocked()
        assert client.room(answer) == 0
        wire.deaf = False
        other = await client.open(methods.GENERATE)
        await client.send(other, bytes(3000), end=False)
        await wait_all_tasks_blocked()
        assert client.room(other) == 4000


async def test_settings_are_those_of_stock() -> None:
    async with talking(echo) as (server, client):
        await wait_all_tasks_blocked()
        assert client.settings[3] == ALL_STREAMS
        assert client.settings[4] == 1 << 20
        server.wires[0].deaf = True
        answer = await client.open(methods.GENERATE)
        assert client.room(answer) == 1 << 20
        await client.send(answer, bytes(600_000), end=False)
        beside = await client.open(methods.GENERATE)
        assert client.room(beside) == (1 << 20) - 600_000  # the connection's own window is no larger


async def test_a_stream_too_many_is_refused() -> None:
    async with talking(forever, limits=Limits(streams=2)) as (_, client):
        many = [await client.open(methods.GENERATE) for _ in range(3)]
        await many[2].done()
        assert [answer.ended for answer in many] == ["", "", "rst_stream 7"]
        await client.cancel(many[0])
        last = await client.call(methods.GENERATE, REQUEST)
        await last.reaches(1)
        assert ids(last) == [[0]]


async def test_a_graceful_goaway_spares_what_has_begun() -> None:
    go = trio.Event()

    async def handler(call: Call, request: pb.GenerateRequest) -> None:
        await call.send(pb.GenerateResponse(output_ids=[1]))
        await go.wait()
        await call.send(pb.GenerateResponse(output_ids=[2]))

    async with talking(handler) as (server, client):
        first = await client.call(methods.GENERATE, REQUEST)
        second = await client.call(methods.GENERATE, REQUEST)
        await second.reaches(1)
        await server.wires[0].go_away()
        late = await client.call(methods.GENERATE, REQUEST)
        await wait_all_tasks_blocked()
        assert client.goaways == [(second.stream, 0)]
        go.set()
        await first.done()
        await second.done()
        assert ids(first) == ids(second) == [[1], [2]]
        assert (first.status, second.status) == (0, 0)
        await late.done()
        assert (late.ended, late.headers) == ("eof", {})


async def test_a_goaway_drops_later_streams_without_a_word() -> None:
    async with talking(forever) as (server, client):
        first = await client.call(methods.GENERATE, REQUEST)
        second = await client.call(methods.GENERATE, REQUEST)
        await second.reaches(1)
        await server.wires[0].go_away(first.stream, 11)
        await wait_all_tasks_blocked()
        assert client.goaways == [(first.stream, 11)]
        assert (first.ended, second.ended, [*server.wires[0].calls]) == ("", "", [first.stream])
        await client.cancel(first)
        await second.done()
        assert (second.ended, second.trailers) == ("eof", {})


@pytest.mark.parametrize(("reset", "seen"), [(False, "eof"), (True, "reset")])
async def test_a_cut_is_seen_as_it_was_made(reset: bool, seen: str) -> None:
    async with talking(forever) as (server, client):
        answer = await client.call(methods.GENERATE, REQUEST)
        await answer.reaches(1)
        call = server.wires[0].calls[answer.stream]
        server.wires[0].cut(reset=reset)
        await answer.done()
        assert (answer.ended, call.gone, call.left) == (seen, True, False)


async def test_bytes_that_are_no_http2_end_a_connection() -> None:
    async with serving(echo) as server:
        connection = await server.network.connect("server", 1)
        await connection.send(b"GET / HTTP/1.1\r\n\r\n")
        while await connection.receive():
            pass
        assert (await server.ask(REQUEST)).status == Code.OK


@settings(max_examples=60)
@given(strategies.links(), st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=400), min_size=1, max_size=4))
def test_any_link_gives_the_same_answers(link: Link, prompts: list[list[int]]) -> None:
    """Frames cut anywhere, small buffers, several calls side by side."""

    async def main() -> None:
        async with serving(echo_whole, link=link) as server, open_client(server.network, URL) as client:
            calls = [await client.call(methods.GENERATE, pb.GenerateRequest(input_ids=prompt)) for prompt in prompts]
            for prompt, call in zip(prompts, calls, strict=True):
                await call.done()
                assert (ids(call), call.status) == ([prompt, prompt[::-1]], Code.OK)

    trio.run(main, clock=MockClock(autojump_threshold=0))


async def echo_whole(call: Call, request: pb.GenerateRequest) -> None:
    await call.send(pb.GenerateResponse(output_ids=request.input_ids))
    await call.send(pb.GenerateResponse(output_ids=request.input_ids[::-1]))
