"""The client before a real grpcio server, over real sockets: both must mean the same by the protocol."""

from __future__ import annotations

import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import trio
import trustme

from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.channels import Channels, KeepAlive, open_channels
from dyn_relay.grpc.http2 import STREAM_WINDOW
from dyn_relay.grpc.messages import MAX_MESSAGE
from dyn_relay.grpc.status import CallFailed, Code, Lost, Refused
from dyn_relay.net import ConnectFailed
from dyn_relay.sockets import open_network
from tests.grpc.hand import numbers
from tests.grpc.peer import Peer, serving


@pytest.fixture
def peer() -> Iterator[Peer]:
    with serving() as running:
        yield running


@asynccontextmanager
async def channels(peer: Peer, **options: Any) -> AsyncIterator[Channels]:
    with trio.fail_after(60):
        async with open_network() as network, open_channels(network, "127.0.0.1", peer.port, **options) as made:
            yield made


def order(text: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(rid=text)


async def failure(made: Channels, text: str, **options: Any) -> tuple[list[int], CallFailed]:
    given: list[int] = []
    try:
        async with made.call(methods.GENERATE, order(text), **options) as call:
            async for item in call:
                given += item.output_ids
    except CallFailed as failed:
        return given, failed
    raise AssertionError("the call ended well")


async def test_unary(peer: Peer) -> None:
    async with channels(peer) as made:
        answer = await made.unary(methods.TOKENIZE, pb.TokenizeRequest(text="hello"), timeout=50)
        assert (list(answer.tokens), answer.input_text) == ([5], "hello")
        assert peer.left[0] is not None
        assert 0 < peer.left[0] <= 50


async def test_streaming(peer: Peer) -> None:
    async with channels(peer) as made:
        for count in (0, 1, 3000):
            async with made.call(methods.GENERATE, order(f"count {count}")) as call:
                assert await numbers(call) == list(range(count))


async def test_many_at_once(peer: Peer) -> None:
    async with channels(peer) as made:
        done: list[int] = []

        async def run() -> None:
            async with made.call(methods.GENERATE, order("count 50")) as call:
                assert await numbers(call) == list(range(50))
            done.append(1)

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(run)
        assert len(done) == 40


async def test_the_largest_messages_both_ways(peer: Peer) -> None:
    text = "x" * (MAX_MESSAGE - 100)
    async with channels(peer) as made:
        answer = await made.unary(methods.TOKENIZE, pb.TokenizeRequest(text=text), timeout=None)
        assert answer.input_text == text


async def test_one_that_is_larger_than_the_client_takes(peer: Peer) -> None:
    async with channels(peer, max_message=1000) as made:
        given, failed = await failure(made, "flood 1000")
        assert isinstance(failed, Lost)
        assert (given, failed.unprocessed) == ([], False)


async def test_one_that_is_larger_than_the_server_takes() -> None:
    with serving(("grpc.max_receive_message_length", 1000)) as peer:
        async with channels(peer) as made:
            _, failed = await failure(made, "x" * 200_000)
            assert isinstance(failed, Refused)
            assert failed.code is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
async def test_statuses(code: grpc.StatusCode, peer: Peer) -> None:
    async with channels(peer) as made:
        given, failed = await failure(made, f"fail {code.name} so 100% ü\n")
        assert isinstance(failed, Refused)
        assert (given, failed.code.name, int(failed.code)) == ([7], code.name, code.value[0])
        assert failed.message == "so 100% ü\n"


async def test_a_refusal_at_once(peer: Peer) -> None:
    async with channels(peer) as made:
        with pytest.raises(Refused) as caught:
            async with made.call(methods.TEXT_GENERATE, pb.TextGenerateRequest()) as call:
                await anext(call)
        assert (caught.value.code, caught.value.message) == (Code.UNIMPLEMENTED, "no ünits: 100% of \n them")


async def test_a_method_that_the_server_has_not(peer: Peer) -> None:
    async with channels(peer) as made:
        with pytest.raises(Refused) as caught:
            await made.unary(methods.FLUSH_CACHE, pb.FlushCacheRequest(), timeout=None)
        assert caught.value.code is Code.UNIMPLEMENTED


async def test_metadata(peer: Peer) -> None:
    raw = bytes(range(256))
    async with channels(peer) as made:
        async with made.call(
            methods.GENERATE, order("trailers"), metadata=[(b"plain", b"a, b"), (b"raw-bin", raw)]
        ) as call:
            assert await numbers(call) == [1]
            assert call.headers == [(b"ascii", b"plain"), (b"raw-bin", b"\0\xff,")]
            assert call.trailers == [(b"last", b"words"), (b"end-bin", b"\xfe")]
        assert peer.seen[0]["plain"] == "a, b"
        assert peer.seen[0]["raw-bin"] == raw
        assert peer.left == [None] or peer.left[0] > 10**6  # no deadline


async def test_deadlines(peer: Peer) -> None:
    async with channels(peer) as made:
        _, failed = await failure(made, "hang", timeout=0.2)
        assert isinstance(failed, Refused)
        assert failed.code is Code.DEADLINE_EXCEEDED


async def test_leaving_cancels(peer: Peer) -> None:
    async with channels(peer) as made:
        async with made.call(methods.GENERATE, order("hang")) as call:
            await anext(call)
        assert await trio.to_thread.run_sync(peer.cancelled.acquire, True, 30)
        async with made.call(methods.GENERATE, order("count 2")) as call:
            assert await numbers(call) == [0, 1]


async def test_a_slow_taker_stops_the_server(peer: Peer) -> None:
    # What the server holds itself: one message being written, and what grpcio takes ahead of the window.
    bound = (STREAM_WINDOW + 128 * 1024) // 1000
    async with channels(peer) as made, made.call(methods.GENERATE, order("flood 1000")) as call:
        for taken in range(1, 500):
            await anext(call)
            if taken % 100 == 0:
                await trio.sleep(0.05)  # time enough to send thousands
            assert peer.sent - taken <= bound


async def test_the_servers_limit_of_streams() -> None:
    with serving(("grpc.max_concurrent_streams", 2)) as peer:
        async with channels(peer) as made, trio.open_nursery() as nursery:
            for _ in range(7):
                nursery.start_soon(_counted, made)


async def _counted(made: Channels) -> None:
    async with made.call(methods.GENERATE, order("count 5")) as call:
        assert await numbers(call) == list(range(5))


async def test_a_server_that_stops_lets_calls_end(peer: Peer) -> None:
    async with channels(peer) as made, made.call(methods.GENERATE, order("hang")) as call:
        assert list((await anext(call)).output_ids) == [1]
        stopped: threading.Event = peer.server.stop(60)
        # It has said so when it refuses others.
        for _ in range(1000):
            with pytest.raises((ConnectFailed, Lost, Refused)) as caught:
                async with made.call(methods.GENERATE, order("count 1")) as other:
                    await anext(other)
            if caught.type is ConnectFailed:
                break
        peer.go_on.set()
        assert await numbers(call) == [2]
        assert await trio.to_thread.run_sync(stopped.wait, 30)


async def test_one_that_is_stopped_at_once(peer: Peer) -> None:
    async with channels(peer) as made, made.call(methods.GENERATE, order("hang")) as call:
        await anext(call)
        peer.server.stop(0)
        with pytest.raises((Lost, Refused)):
            await anext(call)


IMPATIENT = KeepAlive(silence=0.01, timeout=20, interval=0.01)
#: As by default, but for the silence.
PATIENT = KeepAlive(silence=0.01, timeout=20, interval=310)


async def test_pings_that_come_too_often_are_taken_for_abuse() -> None:
    """What `KeepAlive` says of servers."""
    with serving(("grpc.http2.min_ping_interval_without_data_ms", 60_000)) as peer:
        async with channels(peer, keepalive=IMPATIENT) as made:
            given, failed = await failure(made, "hang")
            assert given == [1]
            assert "too many pings" in str(failed).lower().replace("_", " ")


async def test_ours_are_not() -> None:
    """One in each silence between two messages, however short: six of them, where three would be too many."""
    with serving(("grpc.http2.min_ping_interval_without_data_ms", 60_000)) as peer:
        async with channels(peer, keepalive=PATIENT) as made, made.call(methods.GENERATE, order("step 6")) as call:
            (transport,) = made._transports
            async for _ in call:
                while transport._pinged is not None or not transport._next_ping:  # noqa: ASYNC110
                    await trio.sleep(0.005)
                peer.go_on.set()


AUTHORITY = trustme.CA()


@pytest.fixture(scope="module")
def secure() -> Iterator[Peer]:
    leaf = AUTHORITY.issue_cert("127.0.0.1")
    pair = (leaf.private_key_pem.bytes(), b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    with serving(credentials=grpc.ssl_server_credentials([pair])) as running:
        yield running


async def test_tls(secure: Peer) -> None:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    async with channels(secure, tls=context) as made:
        answer = await made.unary(methods.TOKENIZE, pb.TokenizeRequest(text="x" * 10**6), timeout=50)
        assert list(answer.tokens) == [10**6]
        async with made.call(methods.GENERATE, order("count 300")) as call:
            assert await numbers(call) == list(range(300))


async def test_a_certificate_that_is_not_trusted(secure: Peer) -> None:
    async with channels(secure, tls=ssl.create_default_context()) as made:
        with pytest.raises(ConnectFailed, match="certificate verify failed"):
            await made.unary(methods.TOKENIZE, pb.TokenizeRequest(), timeout=50)


async def test_plain_words_to_a_tls_server(secure: Peer) -> None:
    async with channels(secure) as made:
        with pytest.raises(ConnectFailed, match=r"before it spoke HTTP/2|does not speak HTTP/2"):
            await made.unary(methods.TOKENIZE, pb.TokenizeRequest(), timeout=50)
