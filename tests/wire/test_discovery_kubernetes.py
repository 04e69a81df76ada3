"""Pods of a cluster, through a server that plays the API over real sockets.

Time is real; each step waits for what it did.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from api_server import TOKEN, ApiServer, Watch, api_server, bookmark, kubeconfig, line, pod, pods, status

from dyn_relay.fleet.discovery import kubernetes
from dyn_relay.fleet.discovery.base import SourceError
from dyn_relay.fleet.discovery.kubernetes import Pods

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(kubernetes, "BETWEEN", 0.0)


class Reports:
    """What the source reports, as addresses, without repetitions."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[set[str]](1000)
        self._last: set[str] | None = None

    def take(self, origins) -> None:
        found = {str(origin).removeprefix("http://").removesuffix(":30000") for origin in origins}
        if found != self._last:
            self._last = found
            self._send.send_nowait(found)

    async def next(self) -> set[str]:
        return await self._receive.receive()

    @property
    def none(self) -> bool:
        return self._receive.statistics().current_buffer_used == 0


@asynccontextmanager
async def following(
    monkeypatch, tmp_path, namespace: str | None = "prod", user: str = TOKEN
) -> AsyncIterator[tuple[ApiServer, Reports]]:
    async with api_server() as server, trio.open_nursery() as nursery:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", server.url, user)))
        reports = Reports()
        nursery.start_soon(Pods(("app=sglang", "role=engine"), namespace, 30000).run, reports.take)
        yield server, reports
        nursery.cancel_scope.cancel()


async def begun(server: ApiServer, *items) -> Watch:
    """The first list, and the watch that follows it."""
    await server.answer(pods(*items, version=10))
    return (await server.watch())[1]


async def failure(monkeypatch, tmp_path, *answers: tuple[object, int]) -> str:
    """What the source says when it has got these answers."""
    async with api_server() as server, trio.open_nursery() as nursery:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", server.url)))

        async def play() -> None:
            for body, code in answers:
                await server.answer(body, code)

        nursery.start_soon(play)
        with pytest.raises(SourceError) as caught:
            await Pods(("app=sglang",), None, 30000).run(lambda origins: None)
        nursery.cancel_scope.cancel()
    return str(caught.value)


async def test_a_list_then_a_watch_from_its_version(monkeypatch, tmp_path):
    async with following(monkeypatch, tmp_path) as (server, reports):
        asked = await server.answer(pods(pod("a", A), pod("b", B), version=10))
        assert asked.path == "/api/v1/namespaces/prod/pods"
        assert asked.query["labelSelector"] == "app=sglang,role=engine"
        assert asked.headers["authorization"] == "Bearer secret"
        assert asked.headers["connection"] == "close"
        assert await reports.next() == {A, B}
        asked, watch = await server.watch()
        assert asked.path == "/api/v1/namespaces/prod/pods"
        assert asked.query["labelSelector"] == "app=sglang,role=engine"
        assert (asked.query["resourceVersion"], asked.query["allowWatchBookmarks"]) == ("10", "true")
        await watch.send(("ADDED", pod("c", C, 11)))
        assert await reports.next() == {A, B, C}
        await watch.send(("DELETED", pod("a", A, 12)))
        assert await reports.next() == {B, C}


async def test_without_a_namespace_all_are_asked(monkeypatch, tmp_path):
    async with following(monkeypatch, tmp_path, namespace=None) as (server, reports):
        assert (await server.answer(pods(pod("a", "fd00::1")))).path == "/api/v1/pods"
        assert await reports.next() == {"[fd00::1]"}


async def test_a_long_list_comes_in_pages(monkeypatch, tmp_path):
    async with following(monkeypatch, tmp_path) as (server, reports):
        assert "continue" not in (await server.answer(pods(pod("a", A), more="token"))).query
        asked = await server.answer(pods(pod("b", B), version=20))
        assert asked.query["continue"] == "token"
        assert await reports.next() == {A, B}
        assert (await server.watch())[0].query["resourceVersion"] == "20"


async def test_only_ready_pods_are_workers(monkeypatch, tmp_path):
    """A17: pods whose engine does not listen yet get nothing, nor do those that are being terminated."""
    async with following(monkeypatch, tmp_path) as (server, reports):
        watch = await begun(
            server,
            pod("a", A),
            pod("b", B, ready=False),
            pod("c", C, ending=True),
            pod("pending", phase="Pending", ready=False),
            pod("done", "10.0.0.9", phase="Succeeded"),
        )
        assert await reports.next() == {A}
        await watch.send(("MODIFIED", pod("b", B, 11)))
        assert await reports.next() == {A, B}
        await watch.send(("MODIFIED", pod("a", A, 12, ending=True)))
        assert await reports.next() == {B}
        await watch.send(("MODIFIED", pod("c", C, 13)), ("MODIFIED", pod("b", B, 14, ready=False)))
        assert await reports.next() == {C}


async def test_if_none_is_ready_those_in_use_stay(monkeypatch, tmp_path):
    """B1: busy engines fail their probes, maybe all at once. Those that are ended leave all the same."""
    async with following(monkeypatch, tmp_path) as (server, reports):
        watch = await begun(server, pod("a", A), pod("b", B), pod("c", C, ready=False))
        assert await reports.next() == {A, B}
        await watch.send(("MODIFIED", pod("a", A, 11, ready=False)))
        assert await reports.next() == {B}
        await watch.send(("MODIFIED", pod("b", B, 12, ready=False)), ("MODIFIED", pod("c", C, 13, ready=False)))
        await watch.send(("MODIFIED", pod("a", A, 14)))
        assert await reports.next() == {A}, "the pod that became unready last has stayed until another is ready"
        await watch.send(("MODIFIED", pod("a", A, 15, ready=False)), ("MODIFIED", pod("a", A, 16, ending=True)))
        assert await reports.next() == set()


async def test_a_watch_that_ends_is_taken_up_where_it_ended(monkeypatch, tmp_path):
    async with following(monkeypatch, tmp_path) as (server, reports):
        watch = await begun(server, pod("a", A))
        await watch.send(("ADDED", pod("b", B, 12)))
        await watch.end()
        asked, watch = await server.watch()
        assert asked.query["resourceVersion"] == "12"
        await watch.send(bookmark(40))
        await watch.end()
        asked, watch = await server.watch()
        assert asked.query["resourceVersion"] == "40"
        await watch.send(("DELETED", pod("a", A, 41)))
        assert [await reports.next() for _ in range(3)] == [{A}, {A, B}, {B}]


async def test_a_watch_that_is_cut_within_an_event_is_taken_up_before_it(monkeypatch, tmp_path):
    async with following(monkeypatch, tmp_path) as (server, reports):
        watch = await begun(server, pod("a", A))
        event = line("DELETED", pod("a", A, 12))
        await watch.send_bytes(line("ADDED", pod("b", B, 11)) + event[:-1])
        assert [await reports.next() for _ in range(2)] == [{A}, {A, B}]
        watch.cut()
        asked, watch = await server.watch()
        assert asked.query["resourceVersion"] == "11"
        assert reports.none
        await watch.send_bytes(event)
        assert await reports.next() == {B}


async def test_events_may_come_in_any_pieces(monkeypatch, tmp_path):
    async with following(monkeypatch, tmp_path) as (server, reports):
        watch = await begun(server, pod("a", A))
        assert await reports.next() == {A}
        wire = line("ADDED", pod("b", B, 11)) + line("DELETED", pod("a", A, 12))
        for at in range(0, len(wire), 7):
            await watch.send_bytes(wire[at : at + 7])
        assert [await reports.next() for _ in range(2)] == [{A, B}, {B}]


@pytest.mark.parametrize("as_event", [True, False])
async def test_a_version_that_is_forgotten_begins_with_a_new_list(monkeypatch, tmp_path, as_event):
    """410 Gone, as the answer to a watch or within it. A pod that went meanwhile is known from the new list."""
    gone = status(410, "too old resource version: 10 (99)")
    async with following(monkeypatch, tmp_path) as (server, reports):
        watch = await begun(server, pod("a", A), pod("b", B))
        assert await reports.next() == {A, B}
        if as_event:
            await watch.send(("ERROR", gone))
        else:
            await watch.end()
            await server.answer(gone, 410)
        asked = await server.answer(pods(pod("b", B), version=100))
        assert not {"watch", "resourceVersion"} & asked.query.keys()
        assert await reports.next() == {B}
        assert (await server.watch())[0].query["resourceVersion"] == "100"


async def test_a_watch_that_says_nothing_is_given_up(monkeypatch, tmp_path):
    """A peer that is gone without a word looks like a fleet that does not change."""
    monkeypatch.setattr(kubernetes, "SILENCE", 0.05)
    async with following(monkeypatch, tmp_path) as (server, reports):
        await begun(server, pod("a", A))
        asked, watch = await server.watch()
        assert asked.query["resourceVersion"] == "10"
        await watch.send(("DELETED", pod("a", A, 11)))
        assert [await reports.next() for _ in range(2)] == [{A}, set()]


async def test_a_token_that_is_rotated_is_read_again(monkeypatch, tmp_path):
    """A service account's token lives an hour or so."""
    token = tmp_path / "token"
    token.write_text("old")
    async with following(monkeypatch, tmp_path, user=f"{{tokenFile: {token}}}") as (server, reports):
        await server.answer(pods(pod("a", A)))
        assert await reports.next() == {A}
        token.write_text("new")
        assert (await server.answer(status(401, "Unauthorized"), 401)).headers["authorization"] == "Bearer old"
        asked, _ = await server.watch()
        assert asked.headers["authorization"] == "Bearer new"


FORBIDDEN = 'pods is forbidden: User "system:serviceaccount:prod:default" cannot list resource "pods"'


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([(status(403, FORBIDDEN), 403)], f"the API server answers 403: {FORBIDDEN}"),
        ([(pods(), 200), (status(403, "cannot watch"), 403)], "the API server answers 403: cannot watch"),
        ([(b"<html>upstream is gone</html>", 502)], "the API server answers 502: b'<html>upstream is gone</html>'"),
        ([(b"<html>welcome</html>", 200)], "an answer makes no sense"),
        ([(status(200, "no list at all"), 200)], "an answer makes no sense"),
    ],
)
async def test_what_the_server_refuses_is_an_error_in_its_words(monkeypatch, tmp_path, answers, words):
    """Above all: no answer but a list is taken for an empty list."""
    assert words in await failure(monkeypatch, tmp_path, *answers)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (line("ERROR", status(500, "etcd leader changed")), "500: etcd leader changed"),
        (b"no json\n", "an answer makes no sense"),
    ],
)
async def test_what_breaks_a_watch_is_an_error(monkeypatch, tmp_path, event, words):
    async with api_server() as server, trio.open_nursery() as nursery:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", server.url)))

        async def play() -> None:
            await (await begun(server, pod("a", A))).send_bytes(event)

        nursery.start_soon(play)
        with pytest.raises(SourceError, match=words):
            await Pods(("app=sglang",), None, 30000).run(lambda origins: None)
        nursery.cancel_scope.cancel()


async def test_a_server_that_does_not_listen_is_an_error(monkeypatch, tmp_path):
    async with api_server() as server:
        pass
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", server.url)))
    with pytest.raises(SourceError, match=server.url):
        await Pods(("app=sglang",), None, 30000).run(lambda origins: None)


async def test_no_configuration_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(SourceError, match="no way to the API server is configured"):
        await Pods(("app=sglang",), None, 30000).run(lambda origins: None)


async def test_a_user_that_is_made_by_a_program_is_refused(monkeypatch, tmp_path):
    """The library would run it on asyncio."""
    user = "{exec: {apiVersion: client.authentication.k8s.io/v1beta1, command: cloud}}"
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", "http://127.0.0.1:1", user)))
    with pytest.raises(SourceError, match="give it a token"):
        await Pods(("app=sglang",), None, 30000).run(lambda origins: None)
