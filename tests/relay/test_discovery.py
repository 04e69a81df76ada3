"""A whole proxy whose workers stand in a file that changes. In virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

import pytest
import trio

from dyn_relay.fleet.discovery import file
from dyn_testkit.client import fetch
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import World, judged, world

#: Longer than the proxy takes to hear of a change.
HEARD = 20.0


class File:
    """The file; None: it is gone."""

    def __init__(self) -> None:
        self.urls: list[str] | None = []

    async def read(self, path: str) -> bytes:
        await trio.lowlevel.checkpoint()
        if self.urls is None:
            raise FileNotFoundError(2, "No such file or directory")
        return "\n".join(self.urls).encode()


@asynccontextmanager
async def discovered(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[World, File]]:
    """Two workers that take a second a token; the file names both."""
    listed = File()
    monkeypatch.setattr(file, "_in_thread", lambda: listed.read)
    slow = WorkerOptions(tick=1.0)
    async with world(options=[slow, slow], worker_urls=(), discovery_file="workers") as w:
        listed.urls = [worker.url for worker in w.workers]
        await trio.sleep(2 * HEARD)
        await w.ready()
        yield w, listed


async def states(w: World) -> dict[str, tuple[str, list[str]]]:
    answer = await fetch(w.network, w.url, "/workers")
    return {worker["url"]: (worker["state"], worker["named_by"]) for worker in answer.json()["workers"]}


async def test_a_worker_that_leaves_the_file_ends_its_streams_and_gets_no_new_ones(autojump_clock, monkeypatch):
    """A17: no new attempts; live streams go on; nobody sees an error."""
    async with discovered(monkeypatch) as (w, listed):
        one, two = w.workers
        assert await states(w) == {one.url: ("ready", ["file"]), two.url: ("ready", ["file"])}
        body = generate(100)
        answers = []

        async def ask() -> None:
            answers.append(await w.ask(body))

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask)
                await trio.sleep(5)
            assert [len(worker.generates) for worker in w.workers] == [1, 1]
            listed.urls = [two.url]
            await trio.sleep(HEARD)
            assert await states(w) == {one.url: ("draining", []), two.url: ("ready", ["file"])}
            for _ in range(3):
                nursery.start_soon(ask)
        await w.quiet()
        assert [len(worker.generates) for worker in w.workers] == [1, 4]
        assert [judged(answer, body, ORACLE) for answer in answers] == [[]] * 5
        assert [len(row["attempts"]) for row in w.rows] == [1] * 5
        assert list(await states(w)) == [two.url]


async def test_a_file_that_is_gone_or_bad_takes_nobody_away(autojump_clock, monkeypatch):
    async with discovered(monkeypatch) as (w, listed):
        before = await states(w)
        for urls in (None, [], ["http://", "nonsense"]):
            listed.urls = urls
            await trio.sleep(2 * HEARD)
            assert await states(w) == before
            assert w.metric('dyn_relay_discovery_up{source="file"}') == 0
            assert w.metric('dyn_relay_discovery_workers{source="file"}') == 2
            body = generate(stream=False)
            assert judged(await w.ask(body), body, ORACLE) == []
        listed.urls = [w.workers[1].url]
        await trio.sleep(2 * HEARD)
        assert list(await states(w)) == [w.workers[1].url]
        assert w.metric('dyn_relay_discovery_up{source="file"}') == 1
        assert w.metric('dyn_relay_discovery_workers{source="file"}') == 1


async def test_operators_and_the_file_do_not_undo_each_other(autojump_clock, monkeypatch):
    """What is added over `POST /workers` outlives the file's line; what is deleted stays away while the line stands."""
    async with discovered(monkeypatch) as (w, listed):
        one, two = w.workers
        assert (await fetch(w.network, w.url, "/workers", {"url": one.url})).status == 202
        assert (await fetch(w.network, w.url, f"/workers/{quote(two.url, safe='')}", method="DELETE")).status == 202
        listed.urls = [two.url, "http://w3:30000"]
        await trio.sleep(HEARD)
        assert await states(w) == {one.url: ("ready", ["hand"]), "http://w3:30000": ("starting", ["file"])}
