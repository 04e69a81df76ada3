"""The server's reading side: framing, limits, timeouts (D2, J2)."""

from __future__ import annotations

import tracemalloc

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from server_kit import GET, LAST, answers, echo, refused, serving
from trio.testing import MockClock, wait_all_tasks_blocked
from wire_kit import connection_pair, read_all, read_until

from dyn_relay.http11.server import Handler, Limits, Request, ServerConnection, _converse


@pytest.mark.parametrize("fragment", [1, 7, 1 << 30])
async def test_pipelined_requests_are_answered_in_order(fragment: int) -> None:
    wire = (
        GET
        + b"POST /generate/?a=b HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"
        + b"\r\n\r\nPUT /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX: y\r\n\r\n"
        + LAST
    )
    async with serving(echo, fragment=fragment) as server:
        got = answers(await server.talk(wire), ["GET", "POST", "PUT", "GET"])
    assert [(status, body) for status, _, body in got] == [
        (200, b"GET /x  "),
        (200, b"POST /generate/ a=b hello"),
        (200, b"PUT /c  abc"),
        (200, b"GET /last  "),
    ]
    assert [headers.get(b"connection") for _, headers, _ in got] == [None, None, None, b"close"]


@settings(max_examples=200)
@given(
    bodies=st.lists(st.tuples(st.booleans(), st.binary(max_size=60)), min_size=1, max_size=4),
    fragment=st.integers(1, 90),
)
async def test_any_fragmentation_gives_the_same_requests(bodies: list[tuple[bool, bytes]], fragment: int) -> None:
    wire = b""
    for in_chunks, body in bodies:
        halves = [half for half in (body[: len(body) // 2], body[len(body) // 2 :]) if half]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(half), half) for half in halves) + b"0\r\n\r\n"
        framed = b"Transfer-Encoding: chunked\r\n\r\n" + chunks
        sized = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        wire += b"POST / HTTP/1.1\r\nHost: a\r\n" + (framed if in_chunks else sized)
    client, connection = connection_pair()
    connection.fragment = fragment
    await client.send(wire)
    client.end_sending()
    served = ServerConnection(connection, Limits())
    got = []
    while (request := await served.receive()) is not None:
        got.append(request.body)
    assert got == [body for _, body in bodies]


async def test_broken_rules_are_answered_and_the_connection_closed() -> None:
    async with serving(echo) as server:
        assert "CR or LF" in refused(await server.talk(b"GET / HTTP/1.1\r\nA: b\nHost: a\r\n\r\n" + GET), 400)
        refused(await server.talk(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 400)
        refused(await server.talk(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n"), 501)
        refused(await server.talk(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: more\r\nContent-Length: 1\r\n\r\nx"), 417)
        chunks = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello0\r\n\r\n"
        refused(await server.talk(chunks + GET), 400)
        # A request before the broken one is answered first.
        ok, bad = answers(await server.talk(GET + b"garbage\r\n\r\n"), ["GET", "GET"])
    assert (ok[0], bad[0]) == (200, 400)
    assert server.errors == []


async def test_a_head_of_bare_line_feeds_is_refused_without_waiting_for_its_end(autojump_clock: MockClock) -> None:
    async with serving(echo, fragment=3) as server:
        client = await server.connect()
        await client.send(b"GET / HTTP/1.1\nHost: a\n\n")
        refused(await read_all(client), 400)
        assert trio.current_time() < 1  # client and server were never idle: nobody timed out


async def test_a_head_over_the_limit(autojump_clock: MockClock) -> None:
    limits = Limits(max_head=200)
    padding = b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"x" * (200 - 32)
    async with serving(echo, limits) as server:
        exact = padding + b"\r\n\r\n"
        assert len(exact) == 200
        client = await server.connect()
        await client.send(exact)
        assert (await read_until(client, b"GET /  ")).startswith(b"HTTP/1.1 200")
        assert "200 bytes" in refused(await server.talk(padding + b"x\r\n\r\n"), 431)
        assert "200 bytes" in refused(await server.talk(padding + b"x" * 100), 431)


async def test_j2_a_body_over_the_limit_is_refused_before_it_is_read(autojump_clock: MockClock) -> None:
    limits = Limits(max_body=1000)
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\n"
    async with serving(echo, limits) as server:
        client = await server.connect()
        await client.send(head + b"Content-Length: 1001\r\n\r\n")
        answer = await read_all(client)
        assert "1000 bytes" in refused(answer, 413)
        client.close()
        # One at the limit passes.
        client = await server.connect()
        await client.send(head + b"Connection: close\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000)
        ((status, _, body),) = answers(await read_all(client), ["POST"])
        assert (status, len(body)) == (200, len("POST /generate  ") + 1000)
        # A chunked body is refused when it crosses the limit.
        client = await server.connect()
        await client.send(head + b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n" + b"x" * 1000 + b"\r\n")
        await wait_all_tasks_blocked()
        await client.send(b"ffffff\r\nx")
        assert "1000 bytes" in refused(await read_all(client), 413)


async def test_j2_a_client_that_reads_only_after_sending_gets_the_413(autojump_clock: MockClock) -> None:
    async with serving(echo, Limits(max_body=1000)) as server:
        server.network.capacity = 4096
        client = await server.connect()
        await client.send(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100000)
        refused(await read_all(client), 413)


async def test_expect_continue_is_answered_after_the_check_of_the_limit(autojump_clock: MockClock) -> None:
    head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nExpect: 100-continue\r\n"
    async with serving(echo, Limits(max_body=10)) as server:
        client = await server.connect()
        await client.send(head + b"Content-Length: 5\r\n\r\n")
        assert await client.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"hello")
        assert answers(await read_all(client), ["POST"])[0][2] == b"POST /  hello"
        # Too large: no invitation to send it.
        client = await server.connect()
        await client.send(head + b"Content-Length: 11\r\n\r\n")
        answer = await read_all(client)
        assert b"100 Continue" not in answer
        refused(answer, 413)
        # Already sent: no need.
        assert b"100 Continue" not in await server.talk(head + b"Content-Length: 5\r\n\r\nhello")
        client = await server.connect()
        await client.send(head + b"Transfer-Encoding: chunked\r\n\r\n")
        assert await client.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.close()


async def test_a_head_must_arrive_in_time_from_its_first_byte(autojump_clock: MockClock) -> None:
    async with serving(echo, Limits(head_timeout=30, idle_timeout=90)) as server:
        client = await server.connect()
        await trio.sleep(80)
        await client.send(b"GET /")
        started = trio.current_time()
        refused(await read_all(client), 408)
        assert trio.current_time() - started == pytest.approx(30)


@pytest.mark.parametrize("before", [0, 80])
async def test_blank_lines_before_a_head_change_nothing_of_its_time(before: float, autojump_clock: MockClock) -> None:
    async with serving(echo, Limits(head_timeout=30, idle_timeout=90)) as server:
        client = await server.connect()
        await trio.sleep(before)
        await client.send(b"\r\n\r\nGET /")
        await trio.sleep(29)
        await client.send(b"x HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await read_until(client, b"GET /x  ")).startswith(b"HTTP/1.1 200")
        await client.send(b"\r\n\r\nGET /")
        started = trio.current_time()
        refused(await read_all(client), 408)
        assert trio.current_time() - started == pytest.approx(30)


async def works_first(served: ServerConnection, request: Request) -> None:
    await trio.lowlevel.checkpoint()
    await echo(served, request)


@pytest.mark.parametrize("handler", [echo, works_first])
@pytest.mark.parametrize("pieces", [1, 2], ids=["in one piece", "its body apart"])
async def test_a_request_that_was_there_when_its_wait_was_cancelled_is_answered_once_and_is_the_last(
    handler: Handler, pieces: int
) -> None:
    """A drain, or a deadline that is over, may find the task woken already, with the bytes of a request to read."""
    client, connection = connection_pair()
    served = ServerConnection(connection, Limits())
    receive, left = connection.receive, [pieces]

    async def late(max_bytes: int) -> bytes:
        data = await receive(max_bytes)
        left[0] -= 1
        if not left[0]:
            served.waiting.cancel()
        return data

    connection.receive = late  # type: ignore[method-assign]
    head = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n"
    if pieces == 2:
        connection.fragment = len(head)
    await client.send(head + b"hello" + GET)
    await _converse(served, handler, None)
    ((status, headers, body),) = answers(await read_all(client), ["POST"])
    assert (status, headers[b"connection"], body) == (200, b"close", b"POST /x  hello")


async def test_d2_an_idle_connection_lives_for_the_idle_time_and_ends_silently(autojump_clock: MockClock) -> None:
    assert Limits().idle_timeout >= 75
    async with serving(echo) as server:
        client = await server.connect()
        for _ in range(3):
            await trio.sleep(80)
            await client.send(GET)
            assert (await read_until(client, b"GET /x  ")).startswith(b"HTTP/1.1 200")
        started = trio.current_time()
        assert await read_all(client) == b""
        assert trio.current_time() - started == pytest.approx(Limits().idle_timeout)


@pytest.mark.parametrize("framing", [b"Content-Length: 100\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n64\r\n"])
async def test_a_body_may_be_slow_but_not_silent(framing: bytes, autojump_clock: MockClock) -> None:
    async with serving(echo, Limits(body_idle_timeout=60)) as server:
        client = await server.connect()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\n" + framing)
        for _ in range(10):
            await trio.sleep(50)
            await client.send(b"x")
        started = trio.current_time()
        refused(await read_all(client), 408)
        assert trio.current_time() - started == pytest.approx(60)


async def test_a_client_that_leaves_in_the_middle_is_nobody_s_request() -> None:
    called = []

    async def handler(served: ServerConnection, request: Request) -> None:
        called.append(request)

    async with serving(handler) as server:
        for part in (b"", b"GET", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhel"):
            client = await server.connect()
            await client.send(part)
            client.end_sending()
            assert await read_all(client) == b""
            client = await server.connect()
            await client.send(part)
            client.abort()
    assert called == []
    assert server.errors == []


async def test_a_large_body_is_held_once() -> None:
    size, part = 32 << 20, b"x" * 65536
    bodies = []

    async def handler(served: ServerConnection, request: Request) -> None:
        bodies.append(len(request.body))
        await served.respond(200, [], b"")

    async with serving(handler) as server:
        server.network.capacity = 65536
        client = await server.connect()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size)
        await wait_all_tasks_blocked()
        tracemalloc.start()
        for _ in range(size // len(part)):
            await client.send(part)
        await client.receive()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert bodies == [size]
    assert peak < 1.4 * size


async def test_nothing_is_allocated_on_a_client_s_word() -> None:
    async with serving(echo) as server:
        client = await server.connect()
        tracemalloc.start()
        await client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (512 << 20))
        await wait_all_tasks_blocked()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        client.close()
    assert peak < 1 << 20
