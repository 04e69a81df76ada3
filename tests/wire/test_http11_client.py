"""The client: origins, requests, the pool's rules for reuse, one-shot requests (D1, A5, C11)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import h11
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked
from wire_kit import MemoryConnection, MemoryNetwork, read_until

from dyn_relay.http11.client import BadResponse, Origin, Pool, ResponseReader, Upstream, fetch, request_parts
from dyn_relay.http11.headers import end_to_end
from dyn_relay.net import ConnectFailed, Connection, ConnectionBroken

W1 = Origin("w1", 30000)
W2 = Origin("w2", 30000)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

GOOD_URLS = {
    "http://h:30000": (Origin("h", 30000), "http://h:30000"),
    "http://h": (Origin("h", 80), "http://h"),
    "http://h:80/": (Origin("h", 80), "http://h"),
    "HTTP://H:1": (Origin("h", 1), "http://h:1"),
    "https://h": (Origin("h", 443, True), "https://h"),
    "https://h:8443/a/b/": (Origin("h", 8443, True, "/a/b"), "https://h:8443/a/b"),
    "http://127.0.0.1:31001/prefix": (Origin("127.0.0.1", 31001, False, "/prefix"), "http://127.0.0.1:31001/prefix"),
    "http://[::1]:31001": (Origin("::1", 31001), "http://[::1]:31001"),
}


@pytest.mark.parametrize("url", GOOD_URLS)
def test_origin(url: str) -> None:
    origin, text = GOOD_URLS[url]
    assert Origin.parse(url) == origin
    assert str(origin) == text
    assert Origin.parse(text) == origin


BAD_URLS = {
    "": "scheme",
    "h:30000": "scheme",
    "ftp://h:1": "scheme",
    "http://": "host",
    "http://:1": "host",
    "http://h:x": "[Pp]ort",
    "http://h:70000": "[Pp]ort",
    "http://h:0": "port 0",
    "http://u:p@h": "credentials",
    "http://h?a=b": "query",
    "http://h#a": "fragment",
    "http://h?": "query",
    "http://h/a b": "blanks",
    "http://h\r\n": "control",
    "http://hä": "non-ASCII",
    "http://[::1": "IPv6",
}


@pytest.mark.parametrize("url", BAD_URLS)
def test_what_is_no_origin_and_why(url: str) -> None:
    with pytest.raises(ValueError, match=BAD_URLS[url]):
        Origin.parse(url)


def parsed(parts: list[bytes]) -> tuple[h11.Request, bytes]:
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(b"".join(parts))
    request = peer.next_event()
    assert isinstance(request, h11.Request)
    body = b""
    while not isinstance(event := peer.next_event(), h11.EndOfMessage):
        assert isinstance(event, h11.Data)
        body += event.data
    return request, body


def test_a_request_as_h11_reads_it() -> None:
    headers = [(b"host", b"evil"), (b"content-length", b"99"), (b"te", b"gzip"), (b"x-a", b"b"), (b"upgrade", b"h2c")]
    origin = Origin("h", 30000, prefix="/p")
    request, body = parsed(request_parts(origin, "POST", "/generate?x=1", headers, b"{}"))
    assert (request.method, request.target, body) == (b"POST", b"/p/generate?x=1", b"{}")
    assert list(request.headers) == [
        (b"host", b"h:30000"),
        (b"x-a", b"b"),
        (b"accept-encoding", b"identity"),
        (b"content-length", b"2"),
    ]


def test_a_body_is_announced_where_one_is_expected() -> None:
    assert (b"content-length", b"0") in parsed(request_parts(W1, "POST", "/a", [], b""))[0].headers
    got, _ = parsed(request_parts(W1, "GET", "/a", [(b"accept-encoding", b"zstd")], b""))
    assert list(got.headers) == [(b"host", b"w1:30000"), (b"accept-encoding", b"zstd")]


def test_a_large_body_is_not_copied() -> None:
    body = b"x" * 100_000
    head, sent = request_parts(W1, "POST", "/a", [], body)
    assert sent is body
    assert head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("path", ["/a b", "/a\r\nX: y", "/a\n", "a", "", "/a\t"])
def test_a_path_that_would_change_the_request(path: str) -> None:
    with pytest.raises(ValueError, match="target"):
        request_parts(W1, "GET", path, [], b"")


def test_a_header_that_would_change_the_request() -> None:
    with pytest.raises(ValueError, match="line end"):
        request_parts(W1, "GET", "/", [(b"a", b"b\r\nc: d")], b"")


def test_hop_by_hop_headers_do_not_travel() -> None:
    headers = [
        (b"connection", b"close, X-Private"),
        (b"x-private", b"1"),
        (b"keep-alive", b"timeout=5"),
        (b"proxy-authorization", b"x"),
        (b"te", b"trailers"),
        (b"trailer", b"x"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"h2c"),
        (b"content-length", b"3"),
        (b"authorization", b"Bearer x"),
        (b"x-a", b"b"),
    ]
    assert end_to_end(headers) == headers[-3:]


Script = Callable[[MemoryConnection, int], Awaitable[None]]


class Lab:
    """Workers w1 and w2 and a pool of connections to them."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.pool = Pool(self.network)


@asynccontextmanager
async def lab(script: Script) -> AsyncIterator[Lab]:
    """Each worker runs `script(connection, number)` for each connection it accepts, numbered from 0."""
    made = Lab()

    async def accept(nursery: trio.Nursery, host: str) -> None:
        listener = await made.network.listen(host, 30000)
        number = 0
        while True:
            connection = await listener.accept()
            assert isinstance(connection, MemoryConnection)
            nursery.start_soon(script, connection, number)
            number += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept, nursery, "w1")
        nursery.start_soon(accept, nursery, "w2")
        await wait_all_tasks_blocked()
        yield made
        nursery.cancel_scope.cancel()


async def healthy(connection: MemoryConnection, number: int) -> None:
    """Answers every request with "ok"."""
    try:
        while True:
            await read_until(connection, b"\r\n\r\n")
            await connection.send(OK)
    except (AssertionError, ConnectionBroken):
        connection.close()


def answering(*answers: bytes | None) -> Script:
    """The n-th connection answers its only request with `answers[n]` and closes; None resets without an answer."""

    async def script(connection: MemoryConnection, number: int) -> None:
        await read_until(connection, b"\r\n\r\n")
        answer = answers[number]
        if answer is None:
            connection.abort()
            return
        await connection.send(answer)
        connection.close()

    return script


async def use(upstream: Upstream) -> ResponseReader:
    """One request on it, response read whole."""
    reader = ResponseReader()
    for part in request_parts(upstream.origin, "GET", "/", [], b""):
        await upstream.connection.send(part)
    while not reader.complete:
        reader.feed(await upstream.connection.receive())
    return reader


async def connections(pool: Pool, origin: Origin, count: int) -> list[Connection]:
    """Use and release `count` connections at once; they come back in the order of release, oldest first."""
    upstreams = [await pool.acquire(origin) for _ in range(count)]
    for upstream in upstreams:
        assert not upstream.reused
        upstream.release(await use(upstream))
    return [upstream.connection for upstream in upstreams]


async def test_the_newest_idle_connection_is_reused_and_only_by_its_origin() -> None:
    async with lab(healthy) as made:
        first, second = await connections(made.pool, W1, 2)
        other = await made.pool.acquire(W2)
        assert not other.reused
        one, two, three = [await made.pool.acquire(W1) for _ in range(3)]
        assert (one.connection, one.reused) == (second, True)
        assert (two.connection, two.reused) == (first, True)
        assert not three.reused


async def test_fresh_means_fresh() -> None:
    async with lab(healthy) as made:
        (idle,) = await connections(made.pool, W1, 1)
        upstream = await made.pool.acquire(W1, fresh=True)
        assert upstream.connection is not idle
        assert not upstream.reused
        assert (await made.pool.acquire(W1)).connection is idle


async def test_d1_no_connection_is_reused_that_is_older_than_the_idle_time(autojump_clock: MockClock) -> None:
    async with lab(healthy) as made:
        (old,) = await connections(made.pool, W1, 1)
        await trio.sleep(2.9)
        upstream = await made.pool.acquire(W1)
        assert upstream.connection is old
        upstream.release(await use(upstream))
        await trio.sleep(3.0)
        assert not (await made.pool.acquire(W1)).reused
        assert isinstance(old, MemoryConnection)
        assert old.closed


async def test_old_connections_of_other_origins_are_swept(autojump_clock: MockClock) -> None:
    async with lab(healthy) as made:
        idle = await connections(made.pool, W1, 3)
        await trio.sleep(4)
        (kept,) = await connections(made.pool, W2, 1)
        assert [getattr(connection, "closed", None) for connection in [*idle, kept]] == [True, True, True, False]


async def test_a_connection_that_is_not_quiet_is_not_reused() -> None:
    async with lab(healthy) as made:
        ended, dirty = await connections(made.pool, W1, 2)
        made.network.dialed[0].close()
        await made.network.dialed[1].send(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        upstream = await made.pool.acquire(W1)
        assert not upstream.reused
        assert upstream.connection not in (ended, dirty)


async def test_only_a_complete_response_gives_the_connection_back() -> None:
    async with lab(healthy) as made:
        upstream = await made.pool.acquire(W1)
        upstream.release(ResponseReader())
        assert not (await made.pool.acquire(W1)).reused
        upstream = await made.pool.acquire(W1)
        reader = await use(upstream)
        reader.keep_alive = False
        upstream.release(reader)
        assert not (await made.pool.acquire(W1)).reused


async def test_the_first_of_release_and_discard_counts() -> None:
    async with lab(healthy) as made:
        upstream = await made.pool.acquire(W1)
        reader = await use(upstream)
        upstream.release(reader)
        upstream.release(reader)
        upstream.discard()
        again = await made.pool.acquire(W1)
        assert again.connection is upstream.connection
        assert not (await made.pool.acquire(W1)).reused
        reader = await use(again)
        again.discard()
        again.release(reader)
        assert not (await made.pool.acquire(W1)).reused


async def test_a_closed_pool_keeps_nothing() -> None:
    async with lab(healthy) as made:
        (idle,) = await connections(made.pool, W1, 1)
        busy = await made.pool.acquire(W1, fresh=True)
        reader = await use(busy)
        made.pool.close()
        busy.release(reader)
        for connection in (idle, busy.connection):
            assert isinstance(connection, MemoryConnection)
            assert connection.closed


async def test_a_connect_timeout_says_so(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    started = trio.current_time()
    network.black_holes.add(("w1", 30000))
    with pytest.raises(ConnectFailed, match=r"w1:30000: no connection within 5 s"):
        await Pool(network).acquire(W1)
    assert trio.current_time() - started == pytest.approx(5, abs=1e-6)
    with pytest.raises(ConnectFailed, match="Connection refused"):
        await Pool(network).acquire(W2)


async def test_fetch() -> None:
    async with lab(healthy) as made:
        for _ in range(3):
            response = await fetch(made.pool, W1, "GET", "/health", timeout=5)
            assert (response.status, response.body) == (200, b"ok")
        assert len(made.network.dialed) == 1


async def test_d1_a_stale_reused_connection_is_redialled_once() -> None:
    async def one_request_each(connection: MemoryConnection, number: int) -> None:
        await read_until(connection, b"\r\n\r\n")
        await connection.send(OK)
        await read_until(connection, b"\r\n\r\n")
        connection.abort() if number % 2 else connection.close()

    async with lab(one_request_each) as made:
        for _ in range(5):
            assert (await fetch(made.pool, W1, "GET", "/", timeout=5)).body == b"ok"
        assert len(made.network.dialed) == 5


async def test_d1_the_redial_is_fresh_even_if_another_idle_one_is_there() -> None:
    async def one_request_each(connection: MemoryConnection, number: int) -> None:
        await read_until(connection, b"\r\n\r\n")
        await connection.send(OK)
        await read_until(connection, b"\r\n\r\n")
        connection.close()

    async with lab(one_request_each) as made:
        await connections(made.pool, W1, 2)
        assert (await fetch(made.pool, W1, "GET", "/", timeout=5)).body == b"ok"


async def test_a_fresh_connection_that_breaks_is_not_redialled() -> None:
    for answer in (None, b""):
        async with lab(answering(answer, OK)) as made:
            with pytest.raises(ConnectionBroken):
                await fetch(made.pool, W1, "GET", "/", timeout=5)
            assert len(made.network.dialed) == 1


async def test_a_reused_connection_that_breaks_after_a_byte_is_not_redialled() -> None:
    async def breaks(connection: MemoryConnection, number: int) -> None:
        await read_until(connection, b"\r\n\r\n")
        await connection.send(OK)
        await read_until(connection, b"\r\n\r\n")
        await connection.send(b"H")
        connection.close()

    async with lab(breaks) as made:
        await fetch(made.pool, W1, "GET", "/", timeout=5)
        with pytest.raises(ConnectionBroken, match="before its response was complete"):
            await fetch(made.pool, W1, "GET", "/", timeout=5)
        assert len(made.network.dialed) == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"garbage", BadResponse),
        (OK[:-1], ConnectionBroken),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", ConnectionBroken),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n" + b"x" * 11, BadResponse),
    ],
)
async def test_responses_that_are_none(answer: bytes, error: type[Exception]) -> None:
    async with lab(answering(answer, OK)) as made:
        with pytest.raises(error):
            await fetch(made.pool, W1, "GET", "/", timeout=5, max_body=10)
        # Its connection is gone for good.
        assert (await fetch(made.pool, W1, "GET", "/", timeout=5)).body == b"ok"
        assert len(made.network.dialed) == 2


async def test_a_close_delimited_response_and_one_to_head() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"
    async with lab(answering(b"HTTP/1.1 503 X\r\n\r\nbusy", head)) as made:
        response = await fetch(made.pool, W1, "GET", "/", timeout=5)
        assert (response.status, response.body) == (503, b"busy")
        response = await fetch(made.pool, W1, "HEAD", "/", timeout=5)
        assert (response.status, response.body) == (200, b"")


async def test_a_silent_worker_times_out_and_its_connection_is_closed(autojump_clock: MockClock) -> None:
    async def silent(connection: MemoryConnection, number: int) -> None:
        await read_until(connection, b"\r\n\r\n")

    async with lab(silent) as made:
        with pytest.raises(trio.TooSlowError):
            await fetch(made.pool, W1, "GET", "/", timeout=5)
        assert trio.current_time() == pytest.approx(5, abs=1e-6)
        assert await made.network.dialed[0].receive() == b""
