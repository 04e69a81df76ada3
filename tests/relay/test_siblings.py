"""Several processes of one proxy, in memory: what one is asked and all must know."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from dyn_relay.app import App
from dyn_relay.config import Config
from dyn_relay.control.siblings import Siblings
from dyn_relay.control.totals import Pages, summed
from dyn_testkit.background import background
from dyn_testkit.client import fetch
from dyn_testkit.faults import RESET, STALL, Fault, FaultPlan, at_token, every
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import Relay, Rows, until
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged


@asynccontextmanager
async def processes(directory, count=3, plans=(None, None), options=None, **config):
    """So many of them before these workers, each with an address of its own, and all they have between them."""
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet, background() as nursery:
        workers = await fleet(len(plans), faults=list(plans), options=options)
        urls = tuple(worker.url for worker in workers)
        relays = []

        async def start(number, *, replacement=False):
            host = f"proxy{number}"
            settings = Config(host=host, worker_urls=urls, processes=count, seed=number, log_level="error", **config)
            siblings = Siblings(network, number, count, directory, replacement=replacement)
            app = App(settings, network.host(host), trio.current_time, siblings)
            rows = Rows()
            await nursery.start(app.serve, await network.listen(host, 30000), rows)
            return Relay(app, f"http://{host}:30000", rows, network)

        for number in range(count):
            relays.append(await start(number))
            await relays[-1].ready()
        yield relays, workers, start, network


def values(page):
    pairs = (line.rpartition(" ") for line in page.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def test_all_names_agree_whoever_came_first(autojump_clock, tmp_path):
    """One that joins is known to all under the same id, also if two join at once, at two processes."""
    async with processes(tmp_path) as (relays, _, _, _):
        async with trio.open_nursery() as nursery:
            for number, relay in enumerate(relays):
                nursery.start_soon(relay.ask, {"url": f"http://new{number}:1"}, "/workers")
        fleets = [{worker.url: worker.id for worker in relay.app.fleet.workers} for relay in relays]
        assert fleets[0] == fleets[1] == fleets[2]
        assert len(set(fleets[0].values())) == 5
        name = fleets[0]["http://new1:1"]
        assert (await relays[2].ask(None, f"/workers/{name}", method="DELETE")).status == 202
        assert (await relays[0].ask(None, f"/workers/{name}")).status == 404
        assert (await relays[1].ask(None, "/remove_worker?url=http://new2:1", method="POST")).status == 202
        for relay in relays:
            assert len(relay.app.fleet.workers) == 3
        assert (await relays[1].ask({"url": 5}, "/workers")).status == 400


async def test_load_is_that_of_all(autojump_clock, tmp_path):
    plan = FaultPlan.of(Fault(at_token(2), STALL, every))
    async with (
        processes(tmp_path, plans=[plan], stall_timeout_secs=0) as (relays, _, _, _),
        trio.open_nursery() as nursery,
    ):
        for number, relay in enumerate(relays * 2):
            nursery.start_soon(relay.ask, generate(rid=f"{number}" + "0" * 32))
        await plan.fired(times=6)
        for relay in relays:
            [listed] = (await relay.ask(None, "/workers")).json()["workers"]
            shown = (await relay.ask(None, f"/workers/{listed['id']}")).json()
            assert (listed["load"], shown["load"], shown["is_healthy"]) == (6, 6, True)
            page = values((await relay.ask(None, "/metrics")).body)
            assert page["dyn_relay_requests_in_flight"] == 6
            assert page[f'dyn_relay_worker_in_flight{{role="regular",worker="{listed["id"]}"}}'] == 6
            assert page['dyn_relay_process_up{process="2"}'] == 1
        plan.release()


async def test_an_abort_finds_its_request_at_another_process(autojump_clock, tmp_path):
    """N4: by prefix; the worker is told by the one that has it, and by nobody else."""
    plan = FaultPlan.of(Fault(at_token(2), STALL, every))
    rid = "job-" + "a" * 32
    async with processes(tmp_path, plans=[plan, None], policy="round_robin") as (relays, workers, _, _):
        answers = []

        async def client():
            answers.append(await relays[0].ask(generate(rid=rid)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client)
            await plan.fired()
            response = await relays[1].ask({"rid": "job-"}, "/abort_request")
            assert (response.status, response.body) == (200, b"")
            plan.release()
        assert answers[0].values()[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert {order["rid"] for order in workers[0].aborts} == {rid}
        assert workers[1].aborts == []


async def test_what_no_process_has_is_aborted_by_one(autojump_clock, tmp_path):
    """Workers may know it; each is told once, though three processes were asked."""
    async with processes(tmp_path) as (relays, workers, _, _):
        await relays[1].ask({"rid": "chat"}, "/abort_request")
        await until(lambda: all(worker.aborts for worker in workers))
        await trio.sleep(10)
        assert [[order["rid"] for order in worker.aborts] for worker in workers] == [["chat"], ["chat"]]
        await relays[1].ask({"abort_all": True}, "/abort_request")
        await trio.sleep(10)
        assert [worker.aborts[1:] for worker in workers] == [[{"abort_all": True}]] * 2
        await relays[1].ask({}, "/abort_request")
        await trio.sleep(10)
        assert [len(worker.aborts) for worker in workers] == [2, 2]


async def test_one_that_hangs_is_not_passed_over_in_silence(autojump_clock, tmp_path):
    """What is to be done fails loudly, within a second or so; what is read says who is missing."""
    async with processes(tmp_path) as (relays, _, _, network):
        await relays[0].ask(None, "/metrics")
        network.deafen(("process-2", 1))
        await trio.sleep(30)  # idle connections are closed
        asked = trio.current_time()
        response = await relays[0].ask({"url": "http://new:1"}, "/workers")
        assert trio.current_time() - asked < 1.5
        assert response.status == 504
        assert "process 2" in response.json()["message"]
        assert [len(relay.app.fleet.workers) for relay in relays] == [3, 3, 2]
        response = await relays[0].ask(None, "/workers")
        assert (response.status, response.header("x-dyn-relay-silent")) == (200, "2")
        page = values((await relays[0].ask(None, "/metrics")).body)
        up = {name[-3]: value for name, value in page.items() if name.startswith("dyn_relay_process_up")}
        assert up == {"0": 1, "1": 1, "2": 0}
        network.hear(("process-2", 1))
        assert (await relays[0].ask({"url": "http://new:1"}, "/workers")).status == 202
        assert [len(relay.app.fleet.workers) for relay in relays] == [3, 3, 3]


async def test_one_that_hangs_keeps_what_it_has_told(autojump_clock, tmp_path):
    """Its counters count on, its gauges do not."""
    async with processes(tmp_path, count=2) as (relays, _, _, network):
        for relay in (relays[0], relays[1], relays[1]):
            assert (await relay.ask(generate(rid="r" + "0" * 32))).status == 200
            await relay.quiet()
        done = 'dyn_relay_requests_total{outcome="done"}'
        before = values((await relays[0].ask(None, "/metrics")).body)
        state = next(name for name in before if name.startswith("dyn_relay_worker_state"))
        assert (before[done], before[state], before["dyn_relay_ttft_seconds_count"]) == (3, 2, 3)
        network.deafen(("process-1", 1))
        await trio.sleep(30)
        after = values((await relays[0].ask(None, "/metrics")).body)
        assert (after[done], after[state], after["dyn_relay_ttft_seconds_count"]) == (3, 1, 3)


async def test_a_replacement_asks_what_it_was_never_told(autojump_clock, tmp_path):
    """Workers that joined and left since the start; not those that the configuration had."""
    async with processes(tmp_path, count=4) as (relays, workers, start, network):
        await relays[0].ask({"url": "http://new:1"}, "/workers")
        gone = relays[0].app.fleet.get(workers[0].url).id
        await relays[0].ask(None, f"/workers/{gone}", method="DELETE")
        known = {worker.url for worker in relays[0].app.fleet.workers}
        assert known == {workers[1].url, "http://new:1"}
        relays[3].app.draining.set()
        await until(lambda: ("process-3", 1) not in network.listening)
        replaced = await start(3, replacement=True)
        assert {worker.url for worker in replaced.app.fleet.workers} == known


async def test_a_replacement_waits_for_those_that_are_slow(autojump_clock, tmp_path):
    """What it begins with is what they use, not what the configuration said; a change meanwhile is not missed."""
    async with processes(tmp_path) as (relays, workers, start, network):
        gone, stays = (relays[0].app.fleet.get(worker.url).id for worker in workers)
        await relays[0].ask(None, f"/workers/{gone}", method="DELETE")
        relays[2].app.draining.set()
        await until(lambda: ("process-2", 1) not in network.listening)
        await trio.sleep(30)
        for number in (0, 1):
            network.deafen((f"process-{number}", 1))
        async with trio.open_nursery() as nursery:
            replaced = []

            async def replace():
                replaced.append(await start(2, replacement=True))

            nursery.start_soon(replace)
            await until(lambda: ("process-2", 1) in network.listening)
            await trio.sleep(2.5)
            assert not replaced
            # It is not settled: it does not answer in time, which is told, and does it in time of its own.
            response = await relays[0].ask({"url": "http://new:1"}, "/workers")
            assert response.status == 504
            for number in (0, 1):
                network.hear((f"process-{number}", 1))
        urls = {worker.url for worker in replaced[0].app.fleet.workers}
        assert urls == {"http://new:1", workers[1].url}
        assert stays in {worker.id for worker in replaced[0].app.fleet.workers}


async def test_what_a_replacement_is_told_on_its_way_is_not_lost(autojump_clock, tmp_path):
    """A worker leaves after one process has told of it, and before the other one, which is slow, has been heard."""
    async with processes(tmp_path) as (relays, workers, start, network):
        gone = relays[0].app.fleet.get(workers[0].url).id
        relays[2].app.draining.set()
        await until(lambda: ("process-2", 1) not in network.listening)
        await trio.sleep(30)
        network.deafen(("process-1", 1))
        replaced = []

        async def replace():
            replaced.append(await start(2, replacement=True))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(replace)
            await until(lambda: ("process-2", 1) in network.listening)
            await trio.sleep(0.5)
            assert not replaced
            await relays[0].ask(None, f"/workers/{gone}", method="DELETE")
        assert [worker.url for worker in replaced[0].app.fleet.workers] == [workers[1].url]


async def test_if_all_are_new_the_configuration_holds(autojump_clock, tmp_path):
    """Two replacements ask each other, and neither knows."""
    async with processes(tmp_path, count=2) as (relays, workers, start, network):
        await relays[0].ask({"url": "http://new:1"}, "/workers")
        for relay in relays:
            relay.app.draining.set()
        await until(lambda: not any(host.startswith("process") for host, _ in network.listening))
        replaced = []

        async def replace(number):
            replaced.append(await start(number, replacement=True))

        asked = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(replace, 0)
            nursery.start_soon(replace, 1)
        assert trio.current_time() - asked < 2
        for relay in replaced:
            assert [worker.url for worker in relay.app.fleet.workers] == [worker.url for worker in workers]


async def test_rids_that_could_be_related_across_processes_get_names_of_their_own(autojump_clock, tmp_path):
    """C3: `job-1` is lost at one process, and aborted at its worker, where `job-10` of another one lives."""
    plan = FaultPlan.of(Fault(at_token(5), RESET, lambda seen: seen.index == 1))
    options = WorkerOptions(tick=0.05)
    async with processes(tmp_path, count=2, plans=[plan], options=options) as (relays, workers, _, _):
        answers = {}

        async def client(relay, rid):
            answers[rid] = await relay.ask(generate(60, rid=rid))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client, relays[0], "job-10")
            await until(lambda: len(workers[0].generates) == 1)
            nursery.start_soon(client, relays[1], "job-1")
        for rid, response in answers.items():
            assert judged(response, generate(60, rid=rid), ORACLE) == []
        assert workers[0].aborts
        assert not {order["rid"] for order in workers[0].aborts} & {"job-1", "job-10"}


@pytest.mark.parametrize(
    ("rid", "kept"),
    [
        ("job-1", False),
        ("0123456789abcdef0123456789abcdef", True),
        ("adapter-0123456789abcdef0123456789abcdef", True),
        ("f81d4fae-7dec-11d0-a765-00a0c91e6bf6", True),
        ("f81d4fae-7dec-11d0-a765-00a0c91e6bf6-1", False),
    ],
)
async def test_rids_that_end_in_chance_are_kept(autojump_clock, tmp_path, rid, kept):
    """They cannot begin another one's; and what keeps its name passes through byte for byte."""
    async with processes(tmp_path, count=2, plans=[None]) as (relays, workers, _, _):
        response = await relays[0].ask(generate(rid=rid))
        assert {value["meta_info"]["id"] for value in response.values()} == {rid}
        assert (workers[0].generates[0].json()["rid"] == rid) is kept


def told(worker, path):
    return sum(recorded.path == path for recorded in worker.requests)


async def test_a_pause_holds_at_all(autojump_clock, tmp_path):
    """The workers are told once; one that takes another's place meanwhile waits as well."""
    async with processes(tmp_path) as (relays, workers, start, network):
        answers = []

        async def client(relay):
            answers.append(judged(await relay.ask(generate()), generate(), ORACLE))

        async with trio.open_nursery() as nursery:
            assert (await relays[0].ask({}, "/pause_generation")).status == 200
            relays[2].app.draining.set()
            await until(lambda: ("process-2", 1) not in network.listening)
            relays[2] = await start(2, replacement=True)
            for relay in relays:
                assert (await relay.ask(None, "/ready")).status == 503
                assert (await relay.ask(None, "/workers")).json()["paused"] is True
                nursery.start_soon(client, relay)
            await trio.sleep(30)
            assert answers == []
            assert (await relays[1].ask({}, "/continue_generation")).status == 200
            assert (await relays[2].ask(None, "/workers")).json()["paused"] is False
        assert answers == [[]] * 3
        for worker in workers:
            assert (told(worker, "/pause_generation"), told(worker, "/continue_generation")) == (1, 1)


async def test_a_pause_that_no_worker_obeys_holds_nobody(autojump_clock, tmp_path):
    async with processes(tmp_path) as (relays, workers, _, _):
        for worker in workers:
            worker.kill()
        assert (await relays[0].ask({}, "/pause_generation")).status == 502
        assert [relay.app.fleet.paused for relay in relays] == [False] * 3


async def test_a_pause_that_one_process_did_not_hear_of_is_told(autojump_clock, tmp_path):
    async with processes(tmp_path) as (relays, workers, _, network):
        network.deafen(("process-1", 1))
        await trio.sleep(30)
        response = await relays[0].ask({}, "/pause_generation")
        assert response.status == 504
        assert b"not by the process 1 of this proxy" in response.body
        assert [told(worker, "/pause_generation") for worker in workers] == [1, 1]
        assert relays[2].app.fleet.paused


async def test_a_drain_moves_the_requests_of_all(autojump_clock, tmp_path):
    options = WorkerOptions(tick=1.0)
    async with processes(tmp_path, plans=[None], options=options) as (relays, [worker], _, network):
        answers = []

        async def client(relay):
            answers.append(judged(await relay.ask(generate(30)), generate(30), ORACLE))

        async with open_fleet(network, "new{}", 30000) as fleet, trio.open_nursery() as nursery:
            for relay in relays:
                nursery.start_soon(client, relay)
            await until(lambda: worker.live == 3)
            [other] = await fleet(1, options=options)
            await relays[0].ask({"url": other.url}, "/workers")
            for relay in relays:
                await relay.ready()
            name = relays[0].app.fleet.get(worker.url).id
            assert (await relays[1].ask({}, f"/workers/{name}/drain?after=3")).status == 202
            await until(lambda: other.live == 3)
            await until(lambda: all(len(relay.app.fleet.workers) == 1 for relay in relays))
        assert answers == [[]] * 3


async def test_a_worker_is_taken_back_by_all(autojump_clock, tmp_path):
    """By its name, also where it had been forgotten at once, since none of its requests was there."""
    async with processes(tmp_path, options=WorkerOptions(tick=1.0), policy="round_robin") as (relays, workers, _, _):
        url = workers[0].url
        name = relays[0].app.fleet.get(url).id
        answers = []

        async def client():
            answers.append(judged(await relays[0].ask(generate(30)), generate(30), ORACLE))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client)
            await until(lambda: workers[0].live)
            assert (await relays[1].ask(None, f"/workers/{name}", method="DELETE")).status == 202
            assert [relay.app.fleet.get(url) is None for relay in relays] == [False, True, True]
            answer = await relays[2].ask({"url": url}, f"/workers/{name}", method="PUT")
            assert (answer.status, answer.json()["id"]) == (202, name)
            for relay in relays:
                await relay.ready()
                assert relay.app.fleet.get(name).url == url
            other = await relays[2].ask({"url": workers[1].url}, "/workers/w0123456789", method="PUT")
            assert other.status == 404
        assert answers == [[]]


async def test_new_weights_are_known_to_all_soon(autojump_clock, tmp_path):
    """H: one has told the workers; each list says what they have now."""
    async with processes(tmp_path) as (relays, workers, _, _):
        order = {"new_version": "9", "abort_all_requests": False}
        assert (await relays[0].ask(order, "/update_weight_version")).status == 200
        await trio.sleep(2)
        for relay in relays:
            found = (await relay.ask(None, "/workers")).json()["workers"]
            assert [worker["weight_version"] for worker in found] == ["9"] * len(workers)


async def test_strangers_find_no_inner_door(autojump_clock, tmp_path):
    """What is private answers for one process, without a key; the public port asks for it."""
    async with processes(tmp_path, count=2, admin_api_key="k") as (relays, _, _, network):
        assert (await relays[0].ask(None, "/workers")).status == 401
        answer = await fetch(network, "http://process-0:1", "/workers")
        assert len(answer.json()["workers"]) == 2
        assert (await fetch(network, "http://process-0:1", "/generate", generate())).status == 405
        assert (await relays[0].ask(None, "/paused", method="PUT")).status == 404
        assert not relays[0].app.fleet.paused
        key = {"authorization": "Bearer k"}
        assert (await relays[0].ask({"url": "http://new:1"}, "/workers", headers=key)).status == 202
        assert len(relays[1].app.fleet.workers) == 3


def test_pages_are_added_family_by_family():
    """Whatever one page lacks; of the departed only what counts up; some gauges are no sums."""
    one = b"""# HELP a_total A.
# TYPE a_total counter
a_total{x="1"} 1.0
# HELP dyn_relay_loop_lag_seconds L.
# TYPE dyn_relay_loop_lag_seconds gauge
dyn_relay_loop_lag_seconds 0.5
# HELP h H.
# TYPE h histogram
h_bucket{le="1.0"} 1.0
h_bucket{le="+Inf"} 2.0
h_count 2.0
h_sum 7.0
# HELP g G.
# TYPE g gauge
g{y="a b"} 2.0
"""
    two = one.replace(b'x="1"', b'x="2"').replace(b" 0.5", b" 0.25").replace(b'y="a b"', b'y="c"')
    assert values(summed([one, two, one], [two])) == {
        'a_total{x="1"}': 2,
        'a_total{x="2"}': 2,
        "dyn_relay_loop_lag_seconds": 0.5,
        'h_bucket{le="1.0"}': 4,
        'h_bucket{le="+Inf"}': 8,
        "h_count": 8,
        "h_sum": 28,
        'g{y="a b"}': 4,
        'g{y="c"}': 2,
    }


def test_a_page_that_cannot_be_kept_is_told_all_the_same(tmp_path):
    """The disk is full, say: nobody's scrape fails for it."""
    pages = Pages(tmp_path / "gone", 0, 1)
    pages.keep(b"a 1\n")
    assert b"process_up" in pages.total({pages.name: b"a 1\n"})
