"""TLS towards workers: https origins, and plain words about certificates that are not accepted."""

from __future__ import annotations

import datetime
import errno
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio
import trustme
from trio.testing import wait_all_tasks_blocked
from wire_kit import read_until

from dyn_relay.http11.client import Origin, Pool, fetch
from dyn_relay.net import ConnectFailed, ConnectionBroken, Ended
from dyn_relay.sockets import SocketNetwork, open_network

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
AUTHORITY = trustme.CA()
PAST = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)


def client_context(*authorities: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for authority in authorities:
        authority.configure_trust(context)
    return context


def server_context(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return context


Behaviour = Callable[[trio.SSLStream[trio.SocketStream]], Awaitable[None]]


async def healthy(stream: trio.SSLStream[trio.SocketStream]) -> None:
    """Answers every request with "ok"."""
    data = b""
    while more := await stream.receive_some():
        data += more
        while b"\r\n\r\n" in data:
            data = data.partition(b"\r\n\r\n")[2]
            await stream.send_all(OK)


@asynccontextmanager
async def worker(certificate: trustme.LeafCert, behaviour: Behaviour = healthy) -> AsyncIterator[int]:
    """An https worker on 127.0.0.1; gives its port."""

    async def handler(stream: trio.SSLStream[trio.SocketStream]) -> None:
        try:
            await behaviour(stream)
        except (trio.BrokenResourceError, ssl.SSLError):
            pass  # a client that did not like us

    context = server_context(certificate)
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_ssl_over_tcp, handler, 0, context, host="127.0.0.1", https_compatible=True)
        listeners = await nursery.start(serve)
        yield listeners[0].transport_listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@pytest.fixture
async def network() -> AsyncIterator[SocketNetwork]:
    async with open_network() as made:
        yield made


async def test_an_https_worker_is_asked_twice_over_one_connection(network: SocketNetwork) -> None:
    async with worker(AUTHORITY.issue_cert("127.0.0.1")) as port:
        pool = Pool(network, tls=client_context(AUTHORITY))
        origin = Origin.parse(f"https://127.0.0.1:{port}")
        assert (await fetch(pool, origin, "GET", "/", timeout=20)).body == b"ok"
        upstream = await pool.acquire(origin)
        assert upstream.reused
        await upstream.connection.send(b"GET / HTTP/1.1\r\n\r\n")
        assert await read_until(upstream.connection, b"ok") == OK
        upstream.discard()
        assert not upstream.connection.quiet()
        with pytest.raises(ConnectionBroken):
            await upstream.connection.receive()
        pool.close()


@pytest.mark.parametrize(
    ("certificate", "trusted", "words"),
    [
        (AUTHORITY.issue_cert("127.0.0.1"), [], "unable to get local issuer certificate"),
        (AUTHORITY.issue_cert("127.0.0.1"), [trustme.CA()], "certificate verify failed"),
        (AUTHORITY.issue_cert("127.0.0.1", not_before=PAST, not_after=PAST), [AUTHORITY], "certificate has expired"),
        (AUTHORITY.issue_cert("127.0.0.2"), [AUTHORITY], "127.0.0.1"),
    ],
    ids=["unknown authority", "another authority", "expired", "another host"],
)
async def test_a_certificate_that_is_not_accepted(
    network: SocketNetwork, certificate: trustme.LeafCert, trusted: list[trustme.CA], words: str
) -> None:
    async with worker(certificate) as port:
        pool = Pool(network, tls=client_context(*trusted))
        with pytest.raises(ConnectFailed, match=rf"^127.0.0.1:{port}: TLS handshake failed: .*{words}"):
            await pool.acquire(Origin("127.0.0.1", port, tls=True))


async def test_a_worker_that_speaks_no_tls(network: SocketNetwork) -> None:
    listener = await network.listen("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:

        async def plain() -> None:
            connection = await listener.accept()
            await connection.receive()
            await connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        nursery.start_soon(plain)
        with pytest.raises(ConnectFailed, match=r"TLS handshake failed: .+"):
            await network.connect("127.0.0.1", listener.port, client_context(AUTHORITY))
        listener.close()


class Copy:
    """Passes bytes through until it sees a "!"."""

    done = False
    rest = 0.0

    def feed(self, data: bytes) -> bytes:
        self.done = b"!" in data
        return data


async def test_a_tls_source_does_not_rest(network: SocketNetwork) -> None:
    """A read gives one record of the many that may have gathered."""

    async def behaviour(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.receive_some()
        for number in range(5):
            await stream.send_all(b"%d" % number)
        await stream.send_all(b"!")
        await stream.receive_some()

    async with worker(AUTHORITY.issue_cert("127.0.0.1"), behaviour) as port:
        source = await network.connect("127.0.0.1", port, client_context(AUTHORITY))
        listener = await network.listen("127.0.0.1", 0)
        client, sink = await network.connect("127.0.0.1", listener.port), await listener.accept()
        listener.close()
        copy = Copy()
        copy.rest = 1000
        await source.send(b"go")
        with trio.fail_after(20):
            assert await network.relay(source, sink, copy) is Ended.DONE
        assert await read_until(client, b"!") == b"01234!"
        for connection in (source, client, sink):
            connection.close()


async def test_a_tls_source_is_relayed_and_a_client_that_leaves_is_seen(network: SocketNetwork) -> None:
    async def behaviour(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.send_all(b"one!")
        await stream.receive_some()
        await stream.send_all(b"two")
        await stream.receive_some()
        await stream.aclose()

    async with worker(AUTHORITY.issue_cert("127.0.0.1"), behaviour) as port:
        source = await network.connect("127.0.0.1", port, client_context(AUTHORITY))
        listener = await network.listen("127.0.0.1", 0)
        client, sink = await network.connect("127.0.0.1", listener.port), await listener.accept()
        listener.close()
        assert await network.relay(source, sink, Copy()) is Ended.DONE
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                assert await network.relay(source, sink, Copy()) is Ended.SINK_GONE

            nursery.start_soon(run)
            await source.send(b"more")
            assert await read_until(client, b"two") == b"one!two"
            client.close()
        await source.send(b"enough")
        sink.close()
        await source.wait_closed()
        with pytest.raises(ConnectionBroken):  # it left without TLS's goodbye
            await source.receive()
        source.close()


async def test_without_descriptors_an_idle_connection_is_not_reused(
    network: SocketNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at it takes one; and one that is closed is one more for those who need it."""

    async def silent(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.do_handshake()
        await trio.sleep_forever()

    async with worker(AUTHORITY.issue_cert("127.0.0.1"), silent) as port:
        connection = await network.connect("127.0.0.1", port, client_context(AUTHORITY))

        def none_left(fd: int) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr("os.dup", none_left)
        assert not connection.quiet()
        connection.close()


async def test_a_cancelled_tls_send_breaks_the_connection(network: SocketNetwork) -> None:
    async def deaf(stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.do_handshake()
        await trio.sleep_forever()

    async with worker(AUTHORITY.issue_cert("127.0.0.1"), deaf) as port:
        connection = await network.connect("127.0.0.1", port, client_context(AUTHORITY))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.send, b"x" * (16 << 20))
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        with pytest.raises(ConnectionBroken):
            await connection.send(b"y")
        await connection.wait_closed()
