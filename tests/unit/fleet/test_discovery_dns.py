"""A name's addresses. The resolver is the test's; time is virtual."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from dyn_relay.fleet.discovery.base import SourceError
from dyn_relay.fleet.discovery.dns import TIMEOUT, ResolvedName

INTERVAL = 5.0


class Resolver(trio.abc.HostnameResolver):
    """Knows one name."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.error: OSError | None = None
        self.hangs = False
        self.asked: list[float] = []

    async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):
        assert (host, port, type) == (b"engines.prod.svc", 30000, socket.SOCK_STREAM)
        self.asked.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        if self.hangs:
            await trio.sleep_forever()
        if self.error:
            raise self.error
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in self.addresses
        ]

    async def getnameinfo(self, sockaddr, flags):
        raise NotImplementedError


@asynccontextmanager
async def following(resolver: Resolver) -> AsyncIterator[list[list[str]]]:
    reports: list[list[str]] = []
    trio.socket.set_custom_hostname_resolver(resolver)
    async with trio.open_nursery() as nursery:
        source = ResolvedName("engines.prod.svc:30000", INTERVAL)
        nursery.start_soon(source.run, lambda origins: reports.append(sorted(map(str, origins))))
        yield reports
        nursery.cancel_scope.cancel()


async def test_the_addresses_of_a_name_are_followed(autojump_clock):
    resolver = Resolver("10.0.0.1", "10.0.0.2")
    async with following(resolver) as reports:
        await trio.sleep(1)
        assert reports == [["http://10.0.0.1:30000", "http://10.0.0.2:30000"]]
        resolver.addresses = ("10.0.0.2", "10.0.0.3")
        await trio.sleep(INTERVAL)
        assert reports[-1] == ["http://10.0.0.2:30000", "http://10.0.0.3:30000"]
        assert resolver.asked == [0, INTERVAL]


async def test_a_pod_with_two_kinds_of_address_is_one_worker(autojump_clock):
    async with following(Resolver("fd00::1", "10.0.0.1", "fd00::2", "10.0.0.2")) as reports:
        await trio.sleep(1)
        assert reports == [["http://10.0.0.1:30000", "http://10.0.0.2:30000"]]


async def test_a_name_with_ipv6_addresses_alone(autojump_clock):
    async with following(Resolver("fd00::1", "fd00::2")) as reports:
        await trio.sleep(1)
        assert reports == [["http://[fd00::1]:30000", "http://[fd00::2]:30000"]]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), "Temporary failure"),
        (None, "has no address"),
    ],
)
async def test_no_answer_is_an_error_and_nothing_is_reported(autojump_clock, error, words):
    """NXDOMAIN, SERVFAIL, an empty answer: the fleet keeps the last one (`test_discovery.py`)."""
    resolver = Resolver()
    resolver.error = error
    trio.socket.set_custom_hostname_resolver(resolver)
    reports: list[object] = []
    with pytest.raises(SourceError, match=f"^engines.prod.svc: {words}"):
        await ResolvedName("engines.prod.svc:30000", INTERVAL).run(reports.append)
    assert reports == []


async def test_a_resolver_that_hangs_is_an_error(autojump_clock):
    resolver = Resolver()
    resolver.hangs = True
    trio.socket.set_custom_hostname_resolver(resolver)
    with pytest.raises(SourceError, match="more than 10 s"):
        await ResolvedName("engines.prod.svc:30000", INTERVAL).run(lambda origins: None)
    assert trio.current_time() == pytest.approx(TIMEOUT)
