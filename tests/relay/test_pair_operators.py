"""What whoever runs a fleet of pairs is told: the log, the metrics, the list of workers, the words of a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from dyn_relay.app import App, _serve_until_told
from dyn_relay.config import Config
from dyn_relay.fleet import contradictions
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import open_relay, until
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged
from tests.relay.pairs import pairs

PREFILL, DECODE = WorkerOptions(disaggregation="prefill"), WorkerOptions(disaggregation="decode")


async def restarted(w, worker, options):
    """The worker is another process, with other options, and the proxy knows it."""
    worker.kill()
    seen = w.app.fleet.get(worker.url)
    await until(lambda: seen.state == "dead")
    await worker.restart(options)
    await until(lambda: seen.state == "ready")


def about(lines, what):
    return [line for line in lines if what in line["event"]]


async def test_one_that_is_misplaced_is_told_once(autojump_clock):
    """A line when it begins, with both roles, and one when it is over, however often its infos are read."""
    async with pairs(decode=[None, None]) as w:
        one = w.decodes[0]
        with capture_logs() as lines:
            await restarted(w, one, PREFILL)
            await trio.sleep(600)
            [said] = about(lines, contradictions.MISPLACED)
            assert (said["log_level"], said["url"]) == ("warning", one.url)
            assert (said["named"], said["says"]) == ("decode", "prefill")
            await restarted(w, one, DECODE)
            await trio.sleep(600)
            [_, over] = about(lines, contradictions.MISPLACED)
            assert (over["log_level"], over["event"].startswith("no longer: ")) == ("info", True)


async def test_one_that_is_misplaced_is_not_counted_as_ready(autojump_clock):
    async with pairs(decode=[None, None]) as w:
        one, name = w.decodes[0], w.app.fleet.get(w.decodes[0].url).id

        def state(of):
            return w.metric(f'dyn_relay_worker_state{{role="decode",state="{of}",worker="{name}"}}')

        assert (state("ready"), state("misplaced")) == (1, 0)
        await restarted(w, one, PREFILL)
        assert (state("ready"), state("misplaced")) == (0, 1)
        one.kill()
        await until(lambda: w.app.fleet.get(one.url).state == "dead")
        assert (state("dead"), state("misplaced")) == (1, 0)


async def test_who_finds_nobody_is_told_what_is_missing(autojump_clock):
    """Which half of the pair, and who was named for it: misplaced, or about to leave."""
    async with pairs(decode=[None]) as w:
        await restarted(w, w.decodes[0], PREFILL)
        response = await w.ask(generate(stream=False))
        assert (response.status, response.json()["reason"]) == (503, "no_worker")
        wanted = f"no decode worker is available (1 misplaced: {w.decodes[0].url} says prefill)"
        assert response.json()["message"] == wanted
        for prefill in w.prefills:
            await w.ask(None, f"/remove_worker?url={prefill.url}", method="POST")
        response = await w.ask(generate(stream=False))
        assert response.json()["message"] == f"no prefill worker is available; {wanted}"
        bridged = await w.ask({"text": "a"}, "/tokenize")
        assert (bridged.status, bridged.json()["message"]) == (503, wanted)


async def test_half_of_a_pair_as_a_worker_of_its_own(autojump_clock):
    """`--worker-urls` of engines that are pairs: why nobody is asked is said there, too."""
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet:
        [prefill] = await fleet(1, options=PREFILL)
        async with open_relay(network, "proxy", 30000, (prefill.url,), log_level="error") as relay:
            await relay.ready()
            response = await relay.ask(generate(4, stream=False))
            assert response.json()["message"] == f"no worker is available (1 misplaced: {prefill.url} says prefill)"


async def test_who_is_leaving_is_told(autojump_clock):
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet:
        [prefill] = await fleet(1, options=PREFILL)
        [leaving] = await fleet(1, options=WorkerOptions(disaggregation="decode", tick=10.0))
        settings: dict[str, Any] = {"prefill": (prefill.url,), "decode": (leaving.url,), "log_level": "error"}
        async with (
            open_relay(network, "proxy", 30000, (), pd_disaggregation=True, **settings) as relay,
            trio.open_nursery() as nursery,
        ):
            await relay.ready()
            nursery.start_soon(relay.ask, generate(4))
            await until(lambda: leaving.live)
            await relay.ask(None, f"/remove_worker?url={leaving.url}", method="POST")
            response = await relay.ask(generate(4, stream=False))
            assert response.json()["message"] == "no decode worker is available (1 draining)"


@pytest.mark.parametrize("named", ["7777", "none"])
async def test_a_port_that_contradicts_the_workers_own_is_told_once(autojump_clock, named):
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet:
        [prefill] = await fleet(1, options=PREFILL)
        [decode] = await fleet(1, options=DECODE)
        settings: dict[str, Any] = {"prefill": (prefill.url, named), "decode": (decode.url,), "log_level": "error"}
        with capture_logs() as lines:
            async with open_relay(network, "proxy", 30000, (), pd_disaggregation=True, **settings) as relay:
                await relay.ready()
                await trio.sleep(600)
        said = [(line["url"], line["named"], line["says"]) for line in about(lines, contradictions.OTHER_PORT)]
        assert said == ([(prefill.url, 7777, prefill.bootstrap_port)] if named == "7777" else [])


async def test_the_line_of_a_request_names_both_workers(autojump_clock):
    """Of each attempt, as the trace does."""
    async with pairs(prefill=[None], decode=[None]) as w:
        with capture_logs() as lines:
            body = generate(4)
            assert judged(await w.ask(body), body, ORACLE) == []
            await w.quiet()
        [line] = about(lines, "request end")
        assert (line["prefills"], line["workers"]) == (["w1"], ["w2"])


async def test_a_bootstrap_port_is_a_prefill_workers(autojump_clock):
    """Every engine tells one, whatever it is for."""
    async with pairs(prefill=[None], decode=[None]) as w:
        rows = (await w.ask(None, "/workers", method="GET")).json()["workers"]
        assert [row["bootstrap_port"] for row in rows] == [w.prefills[0].bootstrap_port, None]


async def test_who_is_deaf_does_not_hold_up_the_start(autojump_clock):
    """It takes connections and says nothing, to neither question about it."""
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet:
        [prefill] = await fleet(1, options=PREFILL)
        one, deaf = await fleet(2, options=DECODE)
        network.deafen(("w3", 30000))
        settings: dict[str, Any] = {"prefill": (prefill.url,), "decode": (one.url, deaf.url), "log_level": "error"}
        begun = trio.current_time()
        async with open_relay(network, "proxy", 30000, (), pd_disaggregation=True, **settings) as relay:
            assert trio.current_time() - begun <= 5
            body = generate(4)
            assert judged(await relay.ask(body), body, ORACLE) == []


class Now:
    """Told to stop at once."""

    async def drain(self) -> None:
        pass

    async def end(self) -> None:
        await trio.sleep_forever()


async def test_who_is_told_to_stop_while_it_starts_does_not_say_that_it_listens(autojump_clock):
    """Its start waits for a deaf worker."""
    network, said = SimNetwork(1), []
    async with open_fleet(network, "w{}", 30000) as fleet:
        [deaf] = await fleet(1, options=DECODE)
        network.deafen(("w1", 30000))
        config = Config(host="proxy", pd_disaggregation=True, decode=(deaf.url,), log_level="error")
        app = App(config, network.host("proxy"))
        listener = await network.listen("proxy", 30000)
        assert await _serve_until_told(app, listener, None, Now(), lambda: said.append("listening")) == 0
    assert said == []
