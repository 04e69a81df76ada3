"""Workers that name themselves, for as long as they say so again: `POST /workers` with `lease_secs`."""

from __future__ import annotations

from urllib.parse import quote

import pytest
import trio

from dyn_relay.fleet.discovery.leased import Leased
from dyn_relay.fleet.stage import Named
from dyn_relay.http11.origin import Origin
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import generate
from tests.relay.harness import world
from tests.relay.test_replacements import replaced, states
from tests.relay.test_siblings import processes

SLOW = WorkerOptions(tick=1.0)


async def lease(w, worker, secs=10.0, **more):
    url = worker if isinstance(worker, str) else worker.url
    return await w.ask({"url": url, "lease_secs": secs, **more}, "/workers")


async def listed(w):
    return {one["url"]: one["state"] for one in (await w.ask(None, "/workers")).json()["workers"]}


async def test_it_is_there_for_as_long_as_it_says_so(autojump_clock):
    async with world(plans=[None], worker_urls=()) as w:
        [worker] = w.workers
        got = await lease(w, worker)
        assert (got.status, got.json()["url"], got.json()["named_by"]) == (202, worker.url, ["lease"])
        await w.ready()
        for _ in range(5):
            await trio.sleep(9)
            assert (await lease(w, worker)).status == 202
        assert await listed(w) == {worker.url: "ready"}
        assert w.app.fleet.workers[0].number == 1, "the same one all the time"
        await trio.sleep(9.9)
        assert await listed(w) == {worker.url: "ready"}
        await trio.sleep(0.2)
        assert await listed(w) == {}
        assert w.metric('dyn_relay_discovery_workers{source="lease"}') == 0


async def test_the_shortest_of_several_lapses_first(autojump_clock):
    async with world(plans=[None, None], worker_urls=()) as w:
        one, two = w.workers
        await lease(w, one, 60)
        await lease(w, two, 10)
        await trio.sleep(10.1)
        assert [*await listed(w)] == [one.url]
        await lease(w, one, 5)
        await trio.sleep(5.1)
        assert await listed(w) == {}


async def test_a_proxy_that_was_stopped_itself_drops_nobody_for_that(autojump_clock):
    """SIGSTOP, a machine that sleeps, a loop that is kept busy: it has heard nobody, and that says nothing of them."""
    async with world(plans=[None, None], worker_urls=()) as w:
        one, two = w.workers
        await lease(w, one, 10)
        await lease(w, two, 20)
        await w.ready()
        before = w.app.fleet.workers
        autojump_clock.jump(60)
        await trio.sleep(9.9)
        assert w.app.fleet.workers == before
        await trio.sleep(0.2)
        assert [*await listed(w)] == [two.url], "now it has listened for as long as the lease lasts"
        await trio.sleep(10)
        assert await listed(w) == {}


async def test_who_lapses_ends_its_streams_in_peace(autojump_clock):
    async with world(plans=[None], worker_urls=(), options=SLOW) as w, trio.open_nursery() as nursery:
        [worker] = w.workers
        await lease(w, worker, 5)
        await w.ready()
        answers = []

        async def ask():
            answers.append(await w.ask(generate(30)))

        nursery.start_soon(ask)
        await until(lambda: worker.generates)
        await trio.sleep(6)
        assert await listed(w) == {worker.url: "draining"}
        await until(lambda: answers)
        assert answers[0].complete
        assert await listed(w) == {}


async def test_it_is_given_back(autojump_clock):
    async with world(plans=[None], worker_urls=()) as w:
        [worker] = w.workers
        assert (await lease(w, worker, 0)).status == 404
        await lease(w, worker)
        assert (await lease(w, worker, 0)).status == 202
        assert await listed(w) == {}
        assert (await lease(w, worker, 0)).status == 404
        assert (await lease(w, worker)).status == 202
        await w.ready()
        assert [*await listed(w)] == [worker.url]


@pytest.mark.parametrize(("after", "seconds"), [(None, 29), (5, 5)])
async def test_what_still_runs_there_goes_on_elsewhere_after_that_time(autojump_clock, after, seconds):
    async with world(plans=[None, None], worker_urls=(), options=SLOW) as w, trio.open_nursery() as nursery:
        one, two = w.workers
        await lease(w, one, 3600)
        await w.ready()
        nursery.start_soon(w.ask, generate(30))
        await until(lambda: one.generates)
        await lease(w, two, 3600)
        await w.ready()
        began = trio.current_time()
        got = await lease(w, one, 0, **({} if after is None else {"after": after}))
        assert got.json()["state"] == "draining"
        await until(lambda: len(w.app.fleet.workers) == 1)
        assert trio.current_time() - began == pytest.approx(seconds, abs=2)
        await w.quiet()
        assert len(two.generates) == (after is not None)


async def test_who_was_told_to_leave_stays_away_while_it_renews(autojump_clock):
    """An operator's word counts, as with every source; it is over once the lease is."""
    async with world(plans=[None], worker_urls=()) as w:
        [worker] = w.workers
        await lease(w, worker)
        await w.ready()
        assert (await w.ask(None, f"/workers/{quote(worker.url, safe='')}", method="DELETE")).status == 202
        for _ in range(4):
            await trio.sleep(5)
            got = await lease(w, worker)
            assert got.status == 409
            assert worker.url in got.json()["message"]
            assert await listed(w) == {}
        assert (await w.ask({"url": worker.url}, "/workers")).status == 202, "or it is added again"
        assert (await lease(w, worker)).status == 409, "by hand, and not by its lease"
        await w.ask(None, f"/workers/{quote(worker.url, safe='')}", method="DELETE")
        assert (await lease(w, worker, 0)).status == 404
        assert (await lease(w, worker)).status == 202


async def test_who_is_named_by_others_too_stays_without_its_lease(autojump_clock):
    async with world(plans=[None]) as w:
        [worker] = w.workers
        got = await lease(w, worker)
        assert got.json()["named_by"] == ["lease", "static"]
        await trio.sleep(11)
        assert await listed(w) == {worker.url: "ready"}
        assert w.app.fleet.workers[0].named_by == {"static"}


async def test_who_was_told_to_leave_is_that_instance(autojump_clock):
    """The next process at its URL has a lease of its own, though that of the one before would not be over yet."""
    async with world(plans=[None], worker_urls=()) as w:
        [worker] = w.workers
        assert (await lease(w, worker, 100, instance="one")).status == 202
        assert (await w.ask(None, "/workers/w1", method="DELETE")).status == 202
        assert (await lease(w, worker, 100, instance="one")).status == 409
        assert (await lease(w, worker, 0, instance="two")).status == 404
        assert (await lease(w, worker, 100, instance="two")).status == 202
        assert list(await listed(w)) == [worker.url]
        # The one before is not quite dead: what it gives back is not the other's.
        assert (await lease(w, worker, 0, instance="one")).status == 404
        assert list(await listed(w)) == [worker.url]
        assert (await lease(w, worker, 0, instance="two")).status == 202
        assert await listed(w) == {}


async def test_a_replaced_process_knows_whose_leases_they_are(autojump_clock):
    origin = Origin.parse("http://w1:1")
    first, second = Leased(), Leased()
    first.renew(Named(origin, instance="one"), 10)
    second.recall(first.tell())
    second.renew(Named(origin, instance="one"), 10)
    assert second.tell().ended == []
    second.renew(Named(origin, instance="two"), 10)
    assert second.tell().ended == [str(origin)]


BAD = {
    "lease_secs": [-1, 3601, "10", True, [1], None],
    "after": [-1, "x", False],
    "worker_type": ["prefill", "nobody"],
    "bootstrap_port": [0, 65536],
    "url": ["ftp://x:1", "http://:1"],
    "priority": [1],
    "instance": [1, "", "x" * 129],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
async def test_bad_input_names_the_field(autojump_clock, field, value):
    async with world(plans=[None], worker_urls=()) as w:
        body = {"url": w.workers[0].url, "lease_secs": 5, field: value}
        got = await w.ask(body, "/workers")
        assert got.status == 400
        assert field in got.json()["message"]
        assert await listed(w) == {}


async def test_it_may_be_in_the_query(autojump_clock):
    async with world(plans=[None], worker_urls=()) as w:
        path = f"/workers?url={quote(w.workers[0].url, safe='')}&lease_secs=5"
        assert (await w.ask(None, path, method="POST")).json()["named_by"] == ["lease"]
        await trio.sleep(5.1)
        assert await listed(w) == {}


async def test_it_is_named_for_another_part_at_once(autojump_clock):
    async with world(plans=[None], worker_urls=(), pd_disaggregation=True) as w:
        [worker] = w.workers
        assert "worker_type" in (await lease(w, worker)).json()["message"]
        await lease(w, worker, worker_type="prefill", bootstrap_port=9000)
        first = (await w.ask(None, "/workers")).json()["workers"][0]
        assert (first["worker_type"], first["bootstrap_port"]) == ("prefill", 9000)
        await lease(w, worker, worker_type="decode")
        [after] = (await w.ask(None, "/workers")).json()["workers"]
        assert after["worker_type"] == "decode"


@pytest.mark.parametrize(
    ("rejoin", "state"), [("always", "ready"), ("weight-version-match", "stale"), ("manual", "stale")]
)
async def test_who_comes_back_is_judged_as_one_that_was_away(autojump_clock, rejoin, state):
    """A15: an engine that was started again has the weights that it was started with."""
    new, old = WorkerOptions(weight_version="7"), WorkerOptions(weight_version="5")
    async with world(plans=[None, None], worker_urls=(), options=[old, new], rejoin=rejoin) as w:
        back, good = w.workers
        await lease(w, back, 3600)
        await lease(w, good, 3600)
        await w.ready()
        await lease(w, back, 0)
        await lease(w, back, 3600)
        await until(lambda: w.app.fleet.get(back.url).state.value == state)
        await trio.sleep(60)
        assert await listed(w) == {good.url: "ready", back.url: state}


async def test_all_processes_know_it_and_drop_it(autojump_clock, tmp_path):
    async with processes(tmp_path, plans=[None]) as (relays, _workers, _, _):
        url = "http://new:1"
        assert (await lease(relays[0], url)).status == 202
        assert all(url in states(relay) for relay in relays)
        await trio.sleep(9)
        assert (await lease(relays[2], url)).status == 202
        await trio.sleep(9)
        assert all(url in states(relay) for relay in relays)
        await trio.sleep(1.2)
        assert not any(url in states(relay) for relay in relays)
        await lease(relays[1], url)
        assert (await lease(relays[0], url, 0)).status == 202
        assert not any(url in states(relay) for relay in relays)


@pytest.mark.parametrize("renewed", [True, False])
async def test_a_process_that_takes_a_dead_one_s_place_knows_the_leases(autojump_clock, tmp_path, renewed):
    async with processes(tmp_path, count=2, plans=[None]) as (relays, _, start, network):
        url = "http://new:1"
        await lease(relays[0], url, 60)
        await trio.sleep(30)
        relay = await replaced(relays, start, network)
        assert url in states(relay)
        if renewed:
            await lease(relays[0], url, 60)
        await trio.sleep(31)
        assert [url in states(one) for one in relays] == [renewed, renewed]


async def test_it_also_knows_who_had_one(autojump_clock, tmp_path):
    """Who comes back is judged there, too."""
    options = WorkerOptions(weight_version="7")
    async with processes(tmp_path, count=2, options=options, rejoin="weight-version-match") as (
        relays,
        workers,
        start,
        network,
    ):
        url = workers[0].url
        for relay in relays:
            relay.app.fleet.withdraw(url, "static")
        await lease(relays[0], url, 60)
        await lease(relays[0], url, 0)
        workers[0].kill()
        relay = await replaced(relays, start, network)
        await workers[0].restart(WorkerOptions(weight_version="5"))
        await lease(relay, url, 600)
        await until(lambda: all(states(one)[url] == "stale" for one in relays))


async def test_it_wants_the_admin_s_key(autojump_clock):
    async with world(plans=[None], worker_urls=(), admin_api_key="secret") as w:
        assert (await lease(w, w.workers[0])).status == 401
        body = {"url": w.workers[0].url, "lease_secs": 5}
        got = await w.ask(body, "/workers", headers={"authorization": "Bearer secret"})
        assert got.status == 202
