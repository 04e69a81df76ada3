"""The bridge alone: what comes in goes out, byte by byte, and neither side's end is lost on the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from dyn_relay.http11.client import Origin, Pool
from dyn_relay.http11.client import fetch as probe
from dyn_relay.http11.server import Limits, serve
from dyn_relay.net import Connection, ConnectionBroken
from dyn_relay.sidecar.bridge import Bridge
from dyn_testkit.background import background
from dyn_testkit.client import fetch
from dyn_testkit.relay import until
from dyn_testkit.simnet import Link, SimNetwork

URL, ORIGIN = "http://front:1", Origin.parse("http://origin:2/base")
PIECE = b"x" * 1000


class Peer:
    """The origin: a script a connection, and what it has read of it."""

    def __init__(self, script: Callable[[Peer, Connection], Awaitable[None]]) -> None:
        self.script = script
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.dialled = 0
        #: Bytes of an answer that its connection has taken.
        self.sent = 0
        self.left = trio.Event()
        #: The bridge's.
        self.pool: Pool

    async def read(self, connection: Connection) -> None:
        """One request."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += await connection.receive()
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        while len(body) < length:
            body += await connection.receive()
        self.heads.append(head)
        self.bodies.append(body)

    async def send(self, connection: Connection, data: bytes) -> None:
        await connection.send(data)
        self.sent += len(data)


@asynccontextmanager
async def bridged(script, *, buffer: int = 65536):
    """A bridge before the scripted origin; gives the network and the peer."""
    network = SimNetwork(1, Link(buffer=buffer))
    peer = Peer(script)
    async with background() as nursery:
        listener = await network.listen("origin", 2)

        async def accept() -> None:
            while True:
                connection = await listener.accept()
                peer.dialled += 1
                nursery.start_soon(one, connection)

        async def one(connection: Connection) -> None:
            try:
                await peer.script(peer, connection)
            except ConnectionBroken:
                peer.left.set()

        nursery.start_soon(accept)
        host = network.host("front")
        peer.pool = Pool(host)
        bridge = Bridge(host, peer.pool, ORIGIN)
        front = await network.listen("front", 1)
        nursery.start_soon(lambda: serve(front, bridge, Limits(), draining=trio.Event()))
        yield network, peer


def answering(wire: bytes, *, then: Callable[[Connection], None] = lambda connection: None):
    """A script: read, send, do."""

    async def script(peer: Peer, connection: Connection) -> None:
        await peer.read(connection)
        await peer.send(connection, wire)
        then(connection)

    return script


async def test_a_request_goes_as_it_came_but_for_what_is_one_hop_s(autojump_clock):
    script = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    async with bridged(script) as (network, peer):
        headers = {
            "x-own": "1",
            "authorization": "Bearer k",
            "keep-alive": "3",
            "connection": "close, x-hop",
            "x-hop": "1",
        }
        got = await fetch(network, URL, "/a%20b?q=%2F&r", b"\x00\xffbody", method="PATCH", headers=headers)
        assert (got.status, got.body, got.complete) == (200, b"ok", True)
        [head], [body] = peer.heads, peer.bodies
        lines = head.split(b"\r\n")
        assert lines[0] == b"PATCH /base/a%20b?q=%2F&r HTTP/1.1"
        assert body == b"\x00\xffbody"
        names = [line.split(b":")[0].lower() for line in lines[1:]]
        assert b"host: origin:2" in lines
        assert {b"x-own", b"authorization"} <= {*names}
        assert not {b"x-hop", b"keep-alive"} & {*names}
        assert names.count(b"content-length") == 1


async def test_an_empty_query_stays(autojump_clock):
    async with bridged(answering(b"HTTP/1.1 204 No Content\r\n\r\n")) as (network, peer):
        assert (await fetch(network, URL, "/a?")).status == 204
        assert peer.heads[0].startswith(b"GET /base/a? HTTP/1.1")


async def test_an_answer_comes_as_it_goes_but_for_what_is_one_hop_s(autojump_clock):
    wire = (
        b"HTTP/1.1 418 Teapot\r\nContent-Type: text/plain\r\nx-one: a\r\nX-One: b\r\nkeep-alive: timeout=5\r\n"
        b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    )
    async with bridged(answering(wire)) as (network, _):
        got = await fetch(network, URL, "/")
        assert (got.status, got.body, got.complete) == (418, b"abcdefg", True)
        assert [value for name, value in got.headers if name == b"x-one"] == [b"a", b"b"]
        assert got.header("content-type") == "text/plain"
        assert got.header("keep-alive") is None
        assert got.header("transfer-encoding") == "chunked"


async def test_a_length_that_was_told_is_told(autojump_clock):
    async with bridged(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")) as (network, _):
        got = await fetch(network, URL, "/")
        assert (got.header("content-length"), got.header("transfer-encoding"), got.body) == ("5", None, b"hello")


async def test_a_head_has_no_body(autojump_clock):
    async with bridged(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")) as (network, peer):
        got = await fetch(network, URL, "/", method="HEAD")
        assert (got.status, got.body, got.complete) == (200, b"", True)
        assert peer.heads[0].startswith(b"HEAD ")
        connection = await network.connect("front", 1)
        for _ in range(2):  # it is complete: the next one may follow
            await connection.send(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
            with trio.fail_after(1):
                assert b"content-length: 5\r\n" in await connection.receive()


async def test_an_answer_that_ends_with_its_connection_ends_so_here(autojump_clock):
    script = answering(b"HTTP/1.1 200 OK\r\n\r\nall of it", then=lambda connection: connection.close())
    async with bridged(script) as (network, _):
        got = await fetch(network, URL, "/")
        assert (got.status, got.body, got.complete) == (200, b"all of it", True)
        assert got.header("transfer-encoding") is None


async def test_frames_come_when_they_are_sent(autojump_clock):
    """Nothing waits for the rest of an answer."""
    go_on = trio.Event()

    async def script(peer: Peer, connection: Connection) -> None:
        await peer.read(connection)
        await peer.send(connection, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await go_on.wait()
        await peer.send(connection, b"1\r\nb\r\n0\r\n\r\n")

    async with bridged(script) as (network, _):
        connection = await network.connect("front", 1)
        await connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        data = b""
        while b"1\r\na\r\n" not in data:
            data += await connection.receive()
        go_on.set()
        while not data.endswith(b"0\r\n\r\n"):
            data += await connection.receive()
        assert data.endswith(b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n")


CUTS = {
    "before a head": b"",
    "in a head": b"HTTP/1.1 200 OK\r\nconte",
    "in a chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
    "between chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n",
    "before the last chunk's end": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n",
    "in a sized body": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab",
}


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("wire", CUTS.values(), ids=CUTS)
async def test_what_is_broken_off_there_is_broken_off_here(autojump_clock, wire, reset):
    """Never a clean end; before the head, no answer at all; what came before the cut is delivered."""
    end = (lambda connection: connection.abort()) if reset else (lambda connection: connection.close())
    async with bridged(answering(wire, then=end)) as (network, _):
        began = trio.current_time()
        got = await fetch(network, URL, "/")
        assert not got.complete
        assert trio.current_time() - began < 1
        if b"\r\n\r\n" not in wire:
            assert (got.status, got.wire) == (0, b"")
        elif not reset:  # RST may overtake what was sent before it
            assert (got.status, got.body) == (200, b"ab")


async def test_an_answer_that_makes_no_sense_is_a_502(autojump_clock):
    async with bridged(answering(b"SSH-2.0-server\r\n")) as (network, _):
        got = await fetch(network, URL, "/")
        assert (got.status, got.complete) == (502, True)
        assert b"no sense" in got.body


async def test_one_that_stops_making_sense_is_broken_off(autojump_clock):
    async def script(peer: Peer, connection: Connection) -> None:
        await peer.read(connection)
        await peer.send(connection, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
        await trio.sleep(1)
        await peer.send(connection, b"zz\r\n")
        await trio.sleep_forever()

    async with bridged(script) as (network, _):
        got = await fetch(network, URL, "/")
        assert (got.status, got.body, got.complete) == (200, b"ab", False)


async def test_nobody_there_is_no_answer(autojump_clock):
    async with bridged(answering(b"")) as (network, _):
        network.refuse(("origin", 2))
        got = await fetch(network, URL, "/")
        assert (got.status, got.wire) == (0, b"")


@pytest.mark.parametrize("begun", [False, True])
async def test_who_leaves_ends_the_request_there(autojump_clock, begun):
    async def script(peer: Peer, connection: Connection) -> None:
        await peer.read(connection)
        if begun:
            await peer.send(connection, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await connection.wait_closed()
        peer.left.set()

    async with bridged(script) as (network, peer):
        connection = await network.connect("front", 1)
        await connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: peer.heads)
        connection.close()
        with trio.fail_after(1):
            await peer.left.wait()


async def test_who_leaves_while_nobody_answers_the_dial_is_not_waited_for(autojump_clock):
    async with bridged(answering(b"")) as (network, peer):
        network.hang(("origin", 2))
        connection = await network.connect("front", 1)
        await connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await trio.sleep(1)
        connection.close()
        await trio.sleep(1)
        network.accept(("origin", 2))
        await trio.sleep(1)
        assert not peer.heads


async def test_who_does_not_read_stops_the_reading(autojump_clock):
    """What is held for a client that takes nothing is bounded, however much the origin would send."""
    buffer, pieces = 4096, 2000

    async def script(peer: Peer, connection: Connection) -> None:
        await peer.read(connection)
        await peer.send(connection, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(pieces):
            await peer.send(connection, b"3e8\r\n" + PIECE + b"\r\n")
        await peer.send(connection, b"0\r\n\r\n")

    async with bridged(script, buffer=buffer) as (network, peer):
        connection = await network.connect("front", 1)
        await connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await trio.sleep(3600)
        held = peer.sent
        # Two links' buffers, what one read gives, and a write that waits.
        assert 0 < held < 6 * buffer
        taken = 0
        while taken < pieces * len(PIECE):
            taken += len(await connection.receive())
        assert peer.sent > pieces * len(PIECE)


async def test_an_answer_that_comes_before_the_body_was_taken_is_given(autojump_clock):
    """413 and the like: the origin answers, and reads no further."""

    async def script(peer: Peer, connection: Connection) -> None:
        await connection.receive(100)
        await peer.send(connection, b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")

    async with bridged(script, buffer=1000) as (network, _):
        with trio.fail_after(5):
            got = await fetch(network, URL, "/", b"b" * 100_000)
        assert (got.status, got.body, got.complete) == (413, b"no", True)


async def test_each_request_has_a_connection_of_its_own(autojump_clock):
    """A kept one may be stale, and then nobody knows whether the request was served. Also not one that probes left."""

    async def script(peer: Peer, connection: Connection) -> None:
        while True:
            await peer.read(connection)
            await peer.send(connection, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async with bridged(script) as (network, peer):
        assert (await probe(peer.pool, ORIGIN, "GET", "/health", timeout=1)).status == 200
        connection = await network.connect("front", 1)
        for number in range(2, 5):
            await connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            data = b""
            while not data.endswith(b"ok"):
                data += await connection.receive()
            assert peer.dialled == number
