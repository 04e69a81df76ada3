"""The server's answers: whole, streamed, broken off; failing handlers; draining (C5)."""

from __future__ import annotations

import h11
import pytest
import trio
from server_kit import GET, LAST, answers, echo, refused, serving, streaming
from trio.testing import MockClock, wait_all_tasks_blocked
from wire_kit import read_all, read_until

from dyn_relay.http11.server import Request, ServerConnection
from dyn_relay.net import ConnectionBroken

JSON_TYPE = [(b"content-type", b"application/json")]


async def test_answers_without_a_body() -> None:
    async def handler(served: ServerConnection, request: Request) -> None:
        await served.respond(int(request.query), JSON_TYPE, b"{}" if request.query == "200" else b"")

    wire = b"".join(
        b"%b /health?%d HTTP/1.1\r\nHost: a\r\n\r\n" % (method, status)
        for method, status in [(b"HEAD", 200), (b"GET", 204), (b"GET", 304), (b"OPTIONS", 200)]
    )
    async with serving(handler) as server:
        client = await server.connect()
        await client.send(wire + LAST.replace(b"/last", b"/?200"))
        got = answers(await read_all(client), ["HEAD", "GET", "GET", "OPTIONS", "GET"])
    assert [(status, body) for status, _, body in got] == [
        (200, b""),
        (204, b""),
        (304, b""),
        (200, b"{}"),
        (200, b"{}"),
    ]
    assert got[0][1][b"content-length"] == b"2"
    assert b"content-length" not in got[1][1]


async def test_a_stream_is_chunked_for_1_1_and_the_connection_stays() -> None:
    async with serving(streaming([b"data: 1\n\n", b"", b"data: 2\n\n"])) as server:
        (first, second) = answers(await server.talk(GET + LAST), ["GET", "GET"])
    assert first[1] == {b"transfer-encoding": b"chunked"}
    assert first[2] == second[2] == b"data: 1\n\ndata: 2\n\n"


async def test_a_stream_for_1_0_ends_with_the_connection() -> None:
    request = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    async with serving(streaming([b"data: 1\n\n"])) as server:
        ((_, headers, body),) = answers(await server.talk(request), ["GET"])
    assert (headers, body) == ({b"connection": b"close"}, b"data: 1\n\n")


async def test_1_0_keep_alive() -> None:
    request = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    async with serving(echo) as server:
        first, second = answers(await server.talk(request + b"GET / HTTP/1.0\r\n\r\n"), ["GET", "GET"])
    assert (first[1][b"connection"], second[1][b"connection"]) == (b"keep-alive", b"close")


async def test_a_sized_stream_keeps_its_length_and_stays_in_it() -> None:
    async with serving(streaming([b"abc", b"defgh"], [(b"content-length", b"5")])) as server:
        first, second = answers(await server.talk(GET + LAST), ["GET", "GET"])
    assert (first[1][b"content-length"], first[2], second[2]) == (b"5", b"abcde", b"abcde")
    assert b"transfer-encoding" not in first[1]


async def test_hop_by_hop_headers_of_an_answer_are_ours() -> None:
    theirs = [(b"connection", b"close"), (b"transfer-encoding", b"gzip"), (b"keep-alive", b"timeout=5"), (b"x-a", b"b")]
    async with serving(streaming([b"x"], theirs)) as server:
        first, _ = answers(await server.talk(GET + LAST), ["GET", "GET"])
    assert first[1] == {b"x-a": b"b", b"transfer-encoding": b"chunked"}


async def test_a_line_end_in_a_header_is_not_sent() -> None:
    async def handler(served: ServerConnection, request: Request) -> None:
        await served.respond(200, [(b"x", b"a\r\nset-cookie: b")], b"")

    async with serving(handler) as server:
        assert await server.talk(GET) == b""
    assert [type(exc) for exc in server.errors] == [ValueError]


class Oops(Exception):
    """A bug of a handler."""


async def test_an_exception_before_the_answer_is_a_500_and_hurts_nobody_else() -> None:
    ready = trio.Event()

    async def handler(served: ServerConnection, request: Request) -> None:
        if request.path == "/x":
            raise Oops
        await ready.wait()
        await echo(served, request)

    async with serving(handler) as server:
        other = await server.connect()
        await other.send(LAST)
        assert refused(await server.talk(GET), 500) == "internal error"
        ready.set()
        assert answers(await read_all(other), ["GET"])[0][2] == b"GET /last  "
    assert [type(exc) for exc in server.errors] == [Oops]


BREAKS = ["returns", "raises", "breaks off"]


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("headers", [[], [(b"content-length", b"50")]])
async def test_c5_an_unfinished_stream_reads_as_broken(how: str, headers: list[tuple[bytes, bytes]]) -> None:
    async def handler(served: ServerConnection, request: Request) -> None:
        await streaming([b"data: 1\n\n"], headers, end=False)(served, request)
        if how == "raises":
            raise Oops
        if how == "breaks off":
            served.break_off()

    async with serving(handler) as server:
        wire = await server.talk(GET)
    assert b"data: 1\n\n" in wire  # what was written still arrives
    with pytest.raises(h11.RemoteProtocolError, match=r"peer closed connection|received \d+ bytes"):
        answers(wire, ["GET"])
    assert [type(exc) for exc in server.errors] == ([Oops] if how == "raises" else [])


@pytest.mark.parametrize("how", BREAKS)
async def test_c5_an_unfinished_stream_for_1_0_is_reset(how: str) -> None:
    written = trio.Event()

    async def handler(served: ServerConnection, request: Request) -> None:
        await streaming([b"data: 1\n\n"], end=False)(served, request)
        await written.wait()
        if how == "raises":
            raise Oops
        if how == "breaks off":
            served.break_off()

    async with serving(handler) as server:
        client = await server.connect()
        await client.send(b"GET / HTTP/1.0\r\n\r\n")
        await read_until(client, b"data: 1\n\n")
        written.set()
        with pytest.raises(ConnectionBroken):
            await client.receive()


async def test_a_sized_stream_that_lacks_bytes_is_broken_off_though_it_was_ended() -> None:
    async with serving(streaming([b"abc"], [(b"content-length", b"5")])) as server:
        wire = await server.talk(GET + GET)
    assert wire.endswith(b"\r\n\r\nabc")


async def test_a_client_that_left_is_no_error_of_the_handler() -> None:
    left = trio.Event()

    async def handler(served: ServerConnection, request: Request) -> None:
        await left.wait()
        await served.respond(200, [], b"x")

    async with serving(handler) as server:
        client = await server.connect()
        await client.send(GET)
        await wait_all_tasks_blocked()
        client.close()
        left.set()
        await wait_all_tasks_blocked()
    assert server.errors == []


async def test_draining_answers_what_is_live_and_closes_what_is_idle() -> None:
    ready = trio.Event()

    async def handler(served: ServerConnection, request: Request) -> None:
        if request.path == "/slow":
            await ready.wait()
        await echo(served, request)

    async with serving(handler) as server:
        fresh = await server.connect()
        idle = await server.connect()
        await idle.send(GET)
        await read_until(idle, b"GET /x  ")
        live = await server.connect()
        await live.send(GET.replace(b"/x", b"/slow") + GET)
        half = await server.connect()
        await half.send(GET[:10])
        await wait_all_tasks_blocked()
        server.draining.set()
        assert await read_all(fresh) == await read_all(idle) == b""
        await wait_all_tasks_blocked()
        assert not server.returned.is_set()
        # A request whose head has begun is still served.
        await half.send(GET[10:])
        ((status, headers, _),) = answers(await read_all(half), ["GET"])
        assert (status, headers[b"connection"]) == (200, b"close")
        assert not server.returned.is_set()
        ready.set()
        ((_, headers, body),) = answers(await read_all(live), ["GET"])
        assert (headers[b"connection"], body) == (b"close", b"GET /slow  ")
        await server.returned.wait()


async def test_the_last_answer_is_not_reset_by_what_the_client_had_sent_beyond(autojump_clock: MockClock) -> None:
    ready = trio.Event()

    async def handler(served: ServerConnection, request: Request) -> None:
        await ready.wait()
        await echo(served, request)

    async with serving(handler) as server:
        client = await server.connect()
        await client.send(GET)
        await wait_all_tasks_blocked()
        await client.send(GET)
        server.draining.set()
        await wait_all_tasks_blocked()
        ready.set()
        assert answers(await read_all(client), ["GET"])[0][1][b"connection"] == b"close"
        assert server.network.dialed[0].inbound.data == b""
        assert not server.network.dialed[0].closed
        client.close()


async def test_pipelined_requests_leave_room_for_others() -> None:
    order = []

    async def handler(served: ServerConnection, request: Request) -> None:
        order.append(request.path)
        await served.respond(200, [], b"")

    async with serving(handler) as server:
        greedy, modest = await server.connect(), await server.connect()
        await greedy.send(GET * 50)
        await modest.send(LAST)
        await read_all(modest)
        greedy.close()
    assert "/last" in order[:40]


async def test_a_cancelled_server_breaks_its_streams_off() -> None:
    async def handler(served: ServerConnection, request: Request) -> None:
        await streaming([b"data: 1\n\n"], end=False)(served, request)
        await trio.sleep_forever()

    with trio.CancelScope() as scope:
        async with serving(handler) as server:
            client = await server.connect()
            await client.send(GET)
            await read_until(client, b"data: 1\n\n\r\n")
            scope.cancel()
            await trio.sleep_forever()
    assert await read_all(client) == b""
