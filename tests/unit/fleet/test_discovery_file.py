"""A file of workers: read whole or not at all. In virtual time but for the last test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from dyn_relay.fleet.discovery import file
from dyn_relay.fleet.discovery.base import SourceError
from dyn_relay.fleet.discovery.file import SETTLE, TIMEOUT, WatchedFile, parse

INTERVAL = 5.0
A, B = "http://a:1", "http://b:1"


class Disk:
    """Has one file; None: it is not there."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.hangs = False
        #: Called before each look.
        self.before: Callable[[], None] = lambda: None

    async def read(self, path: str) -> bytes:
        assert path == "workers"
        await trio.lowlevel.checkpoint()
        self.before()
        if self.hangs:
            await trio.sleep_forever()
        if self.content is None:
            raise FileNotFoundError(2, "No such file or directory")
        return self.content


@asynccontextmanager
async def watching(disk: Disk) -> AsyncIterator[list[tuple[float, list[str]]]]:
    """What is reported, and when."""
    reports: list[tuple[float, list[str]]] = []
    async with trio.open_nursery() as nursery:
        source = WatchedFile("workers", INTERVAL, disk.read)
        nursery.start_soon(source.run, lambda origins: reports.append((trio.current_time(), list(map(str, origins)))))
        yield reports
        nursery.cancel_scope.cancel()


async def test_each_change_is_reported_once(autojump_clock):
    disk = Disk(f"{A}\n".encode())
    async with watching(disk) as reports:
        await trio.sleep(100)
        assert [urls for _, urls in reports] == [[A]]
        disk.content = f"{A}\n{B}\n".encode()
        changed = trio.current_time()
        await trio.sleep(100)
        assert [urls for _, urls in reports] == [[A], [A, B]]
        assert reports[-1][0] - changed <= INTERVAL + 2 * SETTLE


async def test_a_file_that_is_being_written_is_read_when_it_is_done(autojump_clock):
    """It grows by a byte with every look; every beginning of it that ends behind a digit would be a fleet."""
    whole = f"{A}\nhttp://b:12345\n".encode()
    disk = Disk(b"")

    def grow() -> None:
        disk.content = whole[: len(disk.content) + 1]

    disk.before = grow
    async with watching(disk) as reports:
        await trio.sleep(100)
        assert [urls for _, urls in reports] == [[A, "http://b:12345"]]


async def test_a_change_that_is_taken_back_at_once_is_none(autojump_clock):
    disk = Disk(A.encode())
    async with watching(disk) as reports:
        await trio.sleep(SETTLE + INTERVAL - 0.1)
        disk.content = B.encode()
        await trio.sleep(0.2)
        disk.content = A.encode()
        await trio.sleep(100)
        assert [urls for _, urls in reports] == [[A]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"", "names no worker"),
        (b"# nobody\n\n", "names no worker"),
        (b"http://a:1\n\nftp://b\n", "line 3: .*scheme"),
        (b"# comment\nhttp://a:1 http://b:1\n", "line 2: .*blanks"),
        (b"http://a:1\n\xff\n", "line 2: is not UTF-8"),
    ],
)
async def test_what_cannot_be_read_is_an_error_that_says_where(autojump_clock, content, words):
    reports: list[object] = []
    with pytest.raises(SourceError, match=f"^workers: {words}"):
        await WatchedFile("workers", INTERVAL, Disk(content).read).run(reports.append)
    assert reports == []


async def test_a_file_system_that_hangs_is_an_error(autojump_clock):
    disk = Disk(A.encode())
    disk.hangs = True
    with pytest.raises(SourceError, match="more than 10 s"):
        await WatchedFile("workers", INTERVAL, disk.read).run(lambda origins: None)
    assert trio.current_time() == pytest.approx(TIMEOUT)


def test_what_a_file_may_hold():
    content = b"\xef\xbb\xbf# engines of rack 3\r\n  http://a:1/ \r\n\r\nhttps://B/base\r\nhttp://[::1]:2"
    assert list(map(str, parse(content, "workers"))) == ["http://a:1", "https://b/base", "http://[::1]:2"]


async def test_a_real_file_is_followed_through_replacement_and_removal(tmp_path: Path, monkeypatch):
    """Real files and a real clock; it waits for what is reported."""
    monkeypatch.setattr(file, "SETTLE", 0.0)
    path, other = tmp_path / "workers", tmp_path / "workers.new"
    path.write_text(f"{A}\n")
    send, reports = trio.open_memory_channel[list[str]](10)

    async def run() -> None:
        with pytest.raises(SourceError, match="No such file"):
            await WatchedFile(str(path), 0.001).run(lambda origins: send.send_nowait(list(map(str, origins))))
        await send.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        assert await reports.receive() == [A]
        other.write_text(f"{B}\n")
        other.replace(path)
        assert await reports.receive() == [B]
        path.unlink()
        assert [report async for report in reports] == []
