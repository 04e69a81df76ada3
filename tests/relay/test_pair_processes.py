"""Several processes of one proxy before pairs: whatever each still has there, all take a word about a worker alike."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from dyn_relay.app import App
from dyn_relay.config import Config
from dyn_relay.control.siblings import Siblings
from dyn_relay.fleet import naming
from dyn_relay.fleet.naming import Namings
from dyn_testkit.background import background
from dyn_testkit.client import fetch
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import Relay, Rows, until
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged

LONG = 400


class Processes:
    """Two of them, or more, before a prefill and two decode workers; spoken of is the first decode worker."""

    def __init__(self, relays, prefill, decodes, start, network):
        self.relays, self.prefill, self.decodes = relays, prefill, decodes
        self.start, self.network = start, network
        self.answers = []
        self.url = decodes[0].url
        self.id = relays[0].app.fleet.get(self.url).id

    def views(self):
        """What the worker is for in each process, or will be; None: it is to be gone there."""
        return [view(relay, self.url) for relay in self.relays]

    async def list(self):
        rows = (await self.relays[0].ask(None, "/workers")).json()["workers"]
        return {row["url"]: row for row in rows}

    async def say(self, how, by=1, **more):
        """A word about it, to process 1, which has none of its requests."""
        method, path = {"post": ("POST", "/workers"), "put": ("PUT", f"/workers/{self.id}")}.get(how, ("PUT", how))
        return await self.relays[by].ask({"url": self.url, **more}, path, method=method)

    async def over(self):
        """The request that holds it has ended, and is whole."""
        await until(lambda: self.answers)
        assert judged(self.answers[0], generate(LONG), ORACLE) == []
        await self.relays[0].quiet()

    async def remove(self):
        assert (await self.relays[0].ask(None, f"/workers/{self.id}", method="DELETE")).status == 202


def view(relay, url):
    worker = relay.app.fleet.get(url)
    if worker is None or not worker.wanted:
        return None
    return str(naming.last_named(worker).role)


@asynccontextmanager
async def processes(directory, count=2):
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet, background() as nursery:
        [prefill] = await fleet(1, options=WorkerOptions(disaggregation="prefill", tick=0.1))
        decodes = await fleet(2, options=WorkerOptions(disaggregation="decode", tick=0.1))
        relays = []

        async def start(number, *, replacement=False):
            config = Config(
                host=f"proxy{number}",
                processes=count,
                seed=number,
                log_level="error",
                policy="round_robin",
                pd_disaggregation=True,
                prefill=(prefill.url, "8998"),
                decode=tuple(one.url for one in decodes),
            )
            siblings = Siblings(network, number, count, directory, replacement=replacement)
            app = App(config, network.host(config.host), trio.current_time, siblings)
            await nursery.start(app.serve, await network.listen(config.host, 30000), Rows())
            return Relay(app, f"http://{config.host}:30000", Rows(), network)

        for number in range(count):
            relays.append(await start(number))
            await relays[-1].ready()
        yield Processes(relays, prefill, decodes, start, network)


@asynccontextmanager
async def leaving(directory, count=2):
    """The worker is leaving where one of its requests still runs, at process 0; the others have forgotten it."""
    async with processes(directory, count) as p, trio.open_nursery() as nursery:

        async def client():
            p.answers.append(await p.relays[0].ask(generate(LONG)))

        nursery.start_soon(client)
        await until(lambda: p.decodes[0].live == 1)
        await p.remove()
        assert [relay.app.fleet.get(p.url) is None for relay in p.relays] == [False] + [True] * (count - 1)
        assert p.views() == [None] * count
        yield p


@pytest.mark.parametrize("by", [0, 1], ids=["where it is leaving", "where it is forgotten"])
@pytest.mark.parametrize("how", ["post", "put", "/workers/http%3A%2F%2Fw2%3A30000"])
async def test_its_url_alone_takes_it_back_everywhere(autojump_clock, tmp_path, how, by):
    """What it was named for is remembered where it has left."""
    async with leaving(tmp_path) as p:
        response = await p.say(how, by)
        assert (response.status, response.json()["worker_type"]) == (202, "decode")
        assert p.views() == ["decode", "decode"]
        await p.over()
        assert p.views() == ["decode", "decode"]
        assert not (await p.list())[p.url]["disputed"]


@pytest.mark.parametrize("by", [0, 1], ids=["where it is leaving", "where it is forgotten"])
async def test_named_for_another_role_it_joins_anew(autojump_clock, tmp_path, by):
    """At once where it has left, else once it has; all say so, and all refuse what contradicts it meanwhile."""
    async with leaving(tmp_path) as p:
        response = await p.say("post", by, worker_type="prefill", bootstrap_port=7777)
        assert response.status == 202
        assert p.views() == ["prefill", "prefill"]
        row = (await p.list())[p.url]
        assert (row["state"], row["worker_type"], row["joins_as"]) == ("draining", "decode", "prefill")
        assert not row["disputed"]
        for number in (0, 1):
            refused = await p.say("post", number, worker_type="decode")
            assert (refused.status, "is for prefill" in refused.json()["message"]) == (400, True)
            assert (await p.say("post", number)).status == 202
        assert p.views() == ["prefill", "prefill"]
        await p.over()
        for relay in p.relays:
            worker = relay.app.fleet.get(p.url)
            assert (worker.role, worker.bootstrap_port, worker.state != "draining") == ("prefill", 7777, True)
            assert worker.named_by == {"hand"}
        assert (await p.list())[p.url]["joins_as"] is None


async def test_who_was_to_join_anew_can_be_removed_again(autojump_clock, tmp_path):
    """And is not back when it has left; what it was last named for is remembered, its first role may be named, too."""
    async with leaving(tmp_path) as p:
        await p.say("post", worker_type="prefill")
        await p.remove()
        assert p.views() == [None, None]
        assert (await p.list())[p.url]["joins_as"] is None
        assert (await p.say("post")).status == 202
        assert p.views() == ["prefill", "prefill"]
        await p.remove()
        assert (await p.say("post", worker_type="decode")).status == 202
        assert p.views() == ["decode", "decode"]
        await p.remove()
        await p.over()
        assert p.views() == [None, None]
        assert [relay.app.fleet.get(p.url) for relay in p.relays] == [None, None]


async def test_one_that_stays_is_refused_another_role_by_all(autojump_clock, tmp_path):
    async with processes(tmp_path) as p:
        for number in (0, 1):
            response = await p.say("post", number, worker_type="prefill")
            assert (response.status, "is for decode" in response.json()["message"]) == (400, True)
        assert p.views() == ["decode", "decode"]


async def test_a_url_that_was_never_named_needs_a_role(autojump_clock, tmp_path):
    async with processes(tmp_path) as p:
        response = await p.relays[0].ask({"url": "http://new:1"}, "/workers")
        assert response.status == 400
        assert response.json()["message"].startswith("worker_type: prefill or decode is needed")


@pytest.mark.parametrize("wanted", [True, False], ids=["to join anew", "gone"])
async def test_a_replacement_knows_what_it_was_named_for(autojump_clock, tmp_path, wanted):
    """Also if it is leaving where that is asked, or has left there. That it is misplaced meanwhile ends no process."""
    async with leaving(tmp_path, count=3) as p:
        if wanted:
            await p.say("post", worker_type="prefill", bootstrap_port=7777)
        p.relays[2].app.draining.set()
        await until(lambda: ("process-2", 1) not in p.network.listening)
        p.relays[2] = await p.start(2, replacement=True)
        assert p.views() == (["prefill"] * 3 if wanted else [None] * 3)
        assert (await p.say("post", 2)).status == 202
        assert p.views() == (["prefill"] * 3 if wanted else ["decode"] * 3)
        if wanted:
            assert p.relays[2].app.fleet.get(p.url).bootstrap_port == 7777


async def amiss(p, **named):
    """Process 1 has its own idea of a URL; nobody else has heard of it."""
    answer = await fetch(p.network, "http://process-1:1", "/workers", {"url": "http://new:1", **named})
    assert answer.status == 202


async def test_processes_that_are_at_odds_say_so(autojump_clock, tmp_path):
    """Never a 202: what one refuses is not done, though another one has done it; the list shows it, and how it ends."""
    async with processes(tmp_path) as p:
        await amiss(p, worker_type="prefill")
        response = await p.relays[0].ask({"url": "http://new:1", "worker_type": "decode"}, "/workers")
        assert response.status == 409
        assert "1 of 2 refuse" in response.json()["message"]
        assert "is for prefill" in response.json()["message"]
        row = (await p.list())["http://new:1"]
        assert row["disputed"]
        shown = (await p.relays[0].ask(None, f"/workers/{row['id']}")).json()
        assert shown["disputed"]
        assert (await p.relays[0].ask(None, f"/workers/{row['id']}", method="DELETE")).status == 202
        again = await p.relays[0].ask({"url": "http://new:1", "worker_type": "decode"}, "/workers")
        assert (again.status, again.json()["worker_type"]) == (202, "decode")
        assert not (await p.list())["http://new:1"]["disputed"]


async def test_roles_that_differ_are_no_agreement(autojump_clock, tmp_path):
    """Nobody refuses the URL alone, and yet they mean two things by it."""
    async with processes(tmp_path) as p:
        await amiss(p, worker_type="prefill")
        own = {"url": "http://new:1", "worker_type": "decode"}
        assert (await fetch(p.network, "http://process-0:1", "/workers", own)).status == 202
        response = await p.relays[0].ask({"url": "http://new:1"}, "/workers")
        assert (response.status, "decode or prefill" in response.json()["message"]) == (409, True)


async def test_one_that_only_some_have_is_disputed(autojump_clock, tmp_path):
    """As after an order that a process was too slow for."""
    async with processes(tmp_path) as p:
        await amiss(p, worker_type="prefill")
        row = (await p.list())["http://new:1"]
        assert row["disputed"]
        assert not any(one["disputed"] for url, one in (await p.list()).items() if url != row["url"])


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(naming, "REMEMBERED", 2)
    config = Config(pd_disaggregation=True)
    namings = Namings(config)
    origins = [naming.Origin.parse(f"http://w{number}:1") for number in range(3)]
    for origin in (origins[0], origins[1], origins[0], origins[2]):
        namings.remember(naming.Naming(origin, naming.Role.DECODE, None))
    assert [one.origin for one in namings.left] == [origins[0], origins[2]]


async def test_who_is_at_odds_is_told_though_another_one_hangs(autojump_clock, tmp_path):
    """To do it again, as after a silence alone, would not help."""
    async with processes(tmp_path, count=3) as p:
        await amiss(p, worker_type="prefill")
        p.network.deafen(("process-2", 1))
        await trio.sleep(30)  # idle connections are closed
        response = await p.relays[0].ask({"url": "http://new:1", "worker_type": "decode"}, "/workers")
        assert (response.status, "is for prefill" in response.json()["message"]) == (409, True)


async def test_a_proxy_of_one_process(autojump_clock, tmp_path):
    """Named for another role while it leaves, and taken back with that one after it has left."""
    async with leaving(tmp_path, count=1) as p:
        response = await p.say("post", 0, worker_type="prefill")
        assert (response.status, response.json()["joins_as"]) == (202, "prefill")
        await p.over()
        await p.relays[0].ask(None, f"/remove_worker?url={p.url}", method="POST")
        assert p.relays[0].app.fleet.get(p.url) is None
        response = await p.say("post", 0)
        assert (response.status, response.json()["worker_type"]) == (202, "prefill")
