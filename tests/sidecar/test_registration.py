"""When the proxies know an engine, and when they do not: leases, deaths, restarts, orders to end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from dyn_relay.sidecar import process
from dyn_relay.sidecar.settings import Settings
from dyn_relay.sidecar.sidecar import Sidecar
from dyn_testkit.background import background
from dyn_testkit.client import fetch
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import open_relay, until
from dyn_testkit.sidecar import SidecarHost, open_sidecar
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged
from tests.sidecar.harness import LEASE, sided, states

SLOW = WorkerOptions(tick=1.0)


async def test_a_request_goes_through_proxy_and_sidecar(autojump_clock):
    async with sided(1) as w:
        body = generate()
        assert judged(await w.relay.ask(body), body, ORACLE) == []
        [worker] = w.relay.app.fleet.workers
        assert (worker.url, worker.named_by) == (w.sidecars[0].url, {"lease"})


async def test_it_is_renewed_for_as_long_as_it_lives(autojump_clock):
    async with sided(1, relays=2) as w:
        workers = [relay.app.fleet.workers[0] for relay in w.relays]
        await trio.sleep(50 * LEASE)
        assert [relay.app.fleet.workers for relay in w.relays] == [(one,) for one in workers]
        posts = w.sidecars[0].sidecar.registrations
        assert [one.state for one in posts] == ["registered", "registered"]


async def test_a_dead_sidecar_is_dropped_when_its_lease_lapses(autojump_clock):
    async with sided(2) as w:
        dead, other = w.sidecars
        began = trio.current_time()
        dead.kill()
        await until(lambda: dead.url not in w.listed())
        assert trio.current_time() - began <= LEASE
        assert trio.current_time() - began > LEASE / 2
        assert w.listed() == {other.url: "ready"}
        dead.restart()
        await w.settled(dead.url, other.url)


async def test_the_engine_s_death_withdraws_at_once_and_its_return_registers(autojump_clock):
    async with sided(2, relays=2) as w:
        [worker, _], [side, other] = w.workers, w.sidecars
        worker.kill()
        began = trio.current_time()
        for relay in (0, 1):
            await until(lambda relay=relay: w.listed(relay) == {other.url: "ready"})
        assert trio.current_time() - began < 0.5
        assert (side.url.removeprefix("http://").split(":")[0], 31000) not in w.network.listening
        await trio.sleep(600)
        assert w.listed() == {other.url: "ready"}
        await worker.restart()
        for relay in (0, 1):
            await w.settled(side.url, other.url, relay=relay)
        assert len(side.sidecar.registrations) == 2


async def test_a_new_process_that_was_there_at_once_is_another_one(autojump_clock):
    """The connection that stands open ends, and dials are not refused: the infos tell."""
    async with sided(1) as w:
        [worker], [side] = w.workers, w.sidecars
        before = w.relay.app.fleet.workers[0]
        worker.kill()
        await worker.restart()
        began = trio.current_time()
        await until(lambda: w.relay.app.fleet.workers and w.relay.app.fleet.workers[0] is not before)
        assert trio.current_time() - began < 3
        await w.settled(side.url)
        body = generate()
        assert judged(await w.relay.ask(body), body, ORACLE) == []


async def test_connections_that_end_are_no_death(autojump_clock):
    """An engine may close what is idle."""
    async with sided(1) as w:
        [worker] = w.relay.app.fleet.workers
        for _ in range(5):
            assert w.network.reset("client", "w1") > 0  # the sidecar dials from the network itself
            await trio.sleep(5)
        assert w.relay.app.fleet.workers == (worker,)
        assert w.listed() == {w.sidecars[0].url: "ready"}


async def test_silence_is_no_death(autojump_clock):
    """An engine that hangs stays registered: the proxy judges it, by what comes through."""
    async with sided(1) as w:
        [worker], [side] = w.workers, w.sidecars
        worker.freeze()
        w.network.deafen(("w1", 30000))
        await until(lambda: w.listed() == {side.url: "unready"})
        await trio.sleep(600)
        assert w.listed() == {side.url: "unready"}
        worker.thaw()
        w.network.hear(("w1", 30000))
        await w.settled(side.url)


async def test_an_engine_that_starts_slowly_is_waited_for(autojump_clock):
    """Nobody listens for an hour; then it listens and is not well; then it is."""
    network = SimNetwork(1)
    async with (
        background() as nursery,
        open_relay(network, "proxy", 30000, log_level="error") as relay,
        open_sidecar(network, "http://w1:30000", [relay.url], "side:31000") as side,
    ):
        await trio.sleep(3600)
        assert states(relay) == {}
        worker = MockWorker(network, "w1", 30000)
        worker.health_status = 503
        await nursery.start(worker.run)
        await trio.sleep(600)
        assert states(relay) == {}, "it must not be registered while its engine is not well"
        assert not side.sidecar.open.is_set()
        worker.health_status = 200
        await until(lambda: states(relay) == {side.url: "ready"})


async def test_a_proxy_that_was_started_again_gets_to_know_it(autojump_clock):
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet:
        [worker] = await fleet(1)
        urls = ["http://proxy:30000"]
        async with open_sidecar(network, worker.url, urls, "side:31000", lease_secs=LEASE) as side:
            for _ in range(3):
                async with open_relay(network, "proxy", 30000, log_level="error") as relay:
                    began = trio.current_time()
                    await until(lambda relay=relay: states(relay) == {side.url: "ready"})
                    assert trio.current_time() - began < LEASE / 3 + 1
                await trio.sleep(7)


async def test_a_proxy_that_is_not_there_does_not_keep_the_other_from_knowing(autojump_clock):
    network = SimNetwork(1)
    async with (
        open_fleet(network, "w{}", 30000) as fleet,
        open_relay(network, "there", 30000, log_level="error") as one,
    ):
        [worker] = await fleet(1)
        relays = ["http://gone:30000", one.url]
        async with open_sidecar(network, worker.url, relays, "side:31000", lease_secs=LEASE) as side:
            await until(lambda: states(one) == {side.url: "ready"})
            assert "refused" in side.sidecar.registrations[0].state
            side.sidecar.drain()
            began = trio.current_time()
            await side.ended.wait()
            assert trio.current_time() - began < 1, "it was never told of it"
            assert states(one) == {}


async def test_a_proxy_that_hangs_is_asked_again(autojump_clock):
    async with sided(1, relays=2) as w:
        w.network.deafen(("proxy0", 30000))
        await trio.sleep(5 * LEASE)
        assert w.listed(1) == {w.sidecars[0].url: "ready"}
        assert w.sidecars[0].sidecar.registrations[0].state == "it does not answer"
        w.network.hear(("proxy0", 30000))
        await w.settled(w.sidecars[0].url)


@pytest.mark.parametrize(("mode", "role"), [("prefill", "prefill"), ("decode", "decode")])
async def test_the_engine_s_own_role_is_what_it_is_registered_for(autojump_clock, mode, role):
    options = WorkerOptions(disaggregation=mode)
    network = SimNetwork(1)
    async with (
        open_fleet(network, "w{}", 30000) as fleet,
        open_relay(network, "proxy", 30000, log_level="error", pd_disaggregation=True) as relay,
    ):
        [worker] = await fleet(1, options=options)
        async with open_sidecar(network, worker.url, [relay.url], "side:31000") as side:
            await until(lambda: states(relay) == {side.url: "ready"})
            [known] = relay.app.fleet.workers
            assert (known.role, known.misplaced) == (role, False)
            assert side.sidecar.engine.described["part"] == role
            if mode == "prefill":
                assert known.traits.bootstrap_port == worker.bootstrap_port


async def test_another_role_can_be_said(autojump_clock):
    network = SimNetwork(1)
    async with (
        open_fleet(network, "w{}", 30000) as fleet,
        open_relay(network, "proxy", 30000, log_level="error", pd_disaggregation=True, decode_fallback=True) as relay,
    ):
        [worker] = await fleet(1)
        async with open_sidecar(network, worker.url, [relay.url], "side:31000") as side:
            await until(lambda: "400" in side.sidecar.registrations[0].state)
            assert "worker_type" in side.sidecar.registrations[0].state
        async with open_sidecar(network, worker.url, [relay.url], "side2:31000", worker_type="decode") as side:
            await until(lambda: states(relay) == {side.url: "ready"})


async def test_the_keys_of_the_engine_and_of_the_proxy(autojump_clock):
    network = SimNetwork(1)
    keys = {"admin_api_key": "admin", "worker_api_key": "engine"}
    async with (
        open_fleet(network, "w{}", 30000) as fleet,
        open_relay(network, "proxy", 30000, log_level="error", **keys) as relay,
    ):
        [worker] = await fleet(1, options=WorkerOptions(api_key="engine"))
        settings = {"relay_api_key": "admin", "engine_api_key": "engine"}
        async with open_sidecar(network, worker.url, [relay.url], "side:31000", **settings) as side:
            await until(lambda: states(relay) == {side.url: "ready"})
            assert side.sidecar.engine.traits.role == "regular"
            body = generate()
            assert judged(await relay.ask(body), body, ORACLE) == []
            assert (await side.ask(body)).status == 401, "the engine asks for its key here, too"


async def test_a_proxy_that_has_refused_it_has_nothing_to_give_back(autojump_clock):
    """A wrong key, say: nobody waits for a lease that there never was."""
    network = SimNetwork(1)
    async with (
        open_fleet(network, "w{}", 30000) as fleet,
        open_relay(network, "proxy", 30000, log_level="error", admin_api_key="admin") as relay,
    ):
        [worker] = await fleet(1)
        async with open_sidecar(network, worker.url, [relay.url], "side:31000", relay_api_key="wrong") as side:
            await until(lambda: "401" in side.sidecar.registrations[0].state)
            side.sidecar.drain()
            began = trio.current_time()
            await side.ended.wait()
            assert trio.current_time() - began < 1


async def test_a_lease_that_does_not_count_is_given_back_too(autojump_clock):
    """Somebody has removed it, and it has been told so."""
    network = SimNetwork(1)
    async with (
        open_fleet(network, "w{}", 30000) as fleet,
        open_relay(network, "proxy", 30000, log_level="error") as relay,
    ):
        [worker] = await fleet(1)
        async with open_sidecar(network, worker.url, [relay.url], "side:31000") as side:
            await until(lambda: states(relay) == {side.url: "ready"})
            relay.app.fleet.remove(side.url)
            await until(lambda: "409" in side.sidecar.registrations[0].state)
            assert [held.url for held in relay.app._leased.tell().held] == [side.url]
            side.sidecar.drain()
            await side.ended.wait()
            assert relay.app._leased.tell().held == []


async def test_an_order_to_end_withdraws_first_then_answers_what_is_live(autojump_clock):
    async with sided(2, options=SLOW, sidecar={"shutdown_grace_period_secs": 3600.0}, policy="round_robin") as w:
        [leaving, _], answers = w.sidecars, []

        async def ask(body):
            answers.append((await w.relay.ask(body), body))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, generate(40))
            nursery.start_soon(ask, generate(41))
            await until(lambda: all(worker.generates for worker in w.workers))
            leaving.sidecar.drain()
            await until(lambda: w.listed()[leaving.url] == "draining")
            assert ("side1", 31000) in w.network.listening or not answers
            for number in range(4):
                nursery.start_soon(ask, generate(5 + number))
            await until(lambda: ("side1", 31000) not in w.network.listening)
            assert not leaving.ended.is_set(), "it serves what is live"
            await leaving.ended.wait()
        assert len(w.workers[0].generates) == 1, "nothing new came"
        assert len(answers) == 6
        for got, body in answers:
            assert judged(got, body, ORACLE) == []
        assert {len(row["attempts"]) for row in w.relay.rows} == {1}


async def test_the_port_closes_only_once_it_is_withdrawn(autojump_clock):
    """Else a proxy would still send, and be refused."""
    async with sided(2, options=SLOW, relays=2) as w:
        leaving = w.sidecars[0]
        w.network.deafen(("proxy1", 30000))
        leaving.sidecar.drain()
        await until(lambda: leaving.url not in w.listed(0))
        await trio.sleep(LEASE / 3)
        assert ("side1", 31000) in w.network.listening
        assert (await fetch(w.network, leaving.url, "/model_info")).status == 200
        w.network.hear(("proxy1", 30000))
        await leaving.ended.wait()
        assert ("side1", 31000) not in w.network.listening
        assert leaving.url not in w.listed(1)


async def test_what_outlives_the_grace_goes_on_elsewhere(autojump_clock):
    async with sided(2, options=SLOW, sidecar={"shutdown_grace_period_secs": 20.0}) as w:
        answers = []
        body = generate(60)

        async def ask():
            answers.append(await w.relay.ask(body))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: any(worker.generates for worker in w.workers))
            first = next(n for n, worker in enumerate(w.workers) if worker.generates)
            began = trio.current_time()
            w.sidecars[first].sidecar.drain()
            await w.sidecars[first].ended.wait()
            assert trio.current_time() - began < 20
        assert judged(answers[0], body, ORACLE) == []
        await w.relay.quiet()
        [row] = w.relay.rows
        assert next(attempt["cause"] for attempt in row["attempts"]) == "moved"


async def test_an_order_to_end_while_there_is_no_engine(autojump_clock):
    network = SimNetwork(1)
    async with open_sidecar(network, "http://w1:30000", (), "side:31000") as side:
        await trio.sleep(100)
        side.sidecar.drain()
        with trio.fail_after(1):
            await side.ended.wait()


async def test_a_port_that_somebody_has_taken_meanwhile_is_waited_for(autojump_clock):
    async with sided(1) as w:
        [worker], [side] = w.workers, w.sidecars
        worker.kill()
        await until(lambda: not w.listed())
        thief = await w.network.listen("side1", 31000)
        await worker.restart()
        await trio.sleep(100)
        assert w.listed() == {}
        thief.close()
        await w.settled(side.url)


async def test_a_proxy_that_has_died_is_not_waited_for_longer_than_the_lease_lasts(autojump_clock):
    async with sided(1) as w:
        side = w.sidecars[0]
        w.network.hang(("proxy0", 30000))
        side.sidecar.drain()
        began = trio.current_time()
        await side.ended.wait()
        assert LEASE <= trio.current_time() - began <= LEASE + 5


async def test_a_proxy_that_does_not_know_it_has_nothing_to_give_back(autojump_clock):
    """It was started again since: 404, and nobody waits for more."""
    async with sided(1) as w:
        side = w.sidecars[0]
        w.relay.app._leased.end(w.relay.app.fleet.workers[0].origin)
        side.sidecar.drain()
        began = trio.current_time()
        await side.ended.wait()
        assert trio.current_time() - began < 1
        assert side.sidecar.registrations[0].state == "not known there"


@pytest.mark.parametrize("live", [False, True])
async def test_the_exit_code_tells_whether_something_was_cut(autojump_clock, live):
    """A proxy that hangs takes all of the grace period: that alone has cut nothing."""

    class Orders:
        async def drain(self):
            await told.wait()

        async def end(self):
            await trio.sleep_forever()

    told, codes = trio.Event(), []
    async with sided(1, options=SLOW) as w:
        settings = Settings(
            engine=w.workers[0].url, relay=(w.relay.url,), listen="more:31000", shutdown_grace_period_secs=2.0
        )
        sidecar = Sidecar(settings, w.network)

        async def run():
            codes.append(await process._run_until_told(sidecar, Orders()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await until(lambda: "http://more:31000" in w.listed())
            if live:
                nursery.start_soon(fetch, w.network, sidecar.url, "/generate", generate(100))
                await until(lambda: sidecar.reservations.held)
            w.network.deafen(("proxy0", 30000))
            told.set()
    assert codes == [int(live)]


async def test_one_that_died_is_not_kept_out_by_what_was_said_to_it(autojump_clock):
    """An operator has removed it; then it is killed, and back before its lease is over."""
    async with sided(1) as w:
        assert w.listed()
        assert (await w.relay.ask(None, "/workers/w1", method="DELETE")).status == 202
        await trio.sleep(20)
        assert not w.listed()
        w.sidecars[0].kill()
        await trio.sleep(2)
        w.sidecars[0].restart()
        with trio.fail_after(30):
            await until(lambda: bool(w.listed()))


@asynccontextmanager
async def robbed(listen: str) -> AsyncIterator[tuple[SidecarHost, int]]:
    """A sidecar whose port, this one, was taken while it waited for its engine, which is there now."""
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet:
        [worker] = await fleet(1)
        worker.kill()
        async with open_sidecar(network, worker.url, (), listen) as host:
            await trio.sleep(5)
            thief = await network.listen("side", host.sidecar.port)
            await worker.restart()
            yield host, thief.port
            thief.close()


async def test_a_drain_ends_one_that_waits_for_its_port(autojump_clock):
    async with robbed("side:31000") as (host, _):
        await trio.sleep(60)
        assert not host.sidecar.open.is_set()
        host.sidecar.drain()
        with trio.fail_after(1):
            await host.ended.wait()


async def test_a_port_that_nobody_knows_yet_may_be_another_one(autojump_clock):
    async with robbed("side:0") as (host, taken):
        with trio.fail_after(60):
            await host.sidecar.open.wait()
        assert host.sidecar.port not in (0, taken)
        assert str(host.sidecar.port) in host.sidecar.url
