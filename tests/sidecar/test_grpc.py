"""Sidecars before gRPC engines: to the proxy, and to its client, they are what sidecars before HTTP engines are."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from dyn_relay.config import ConfigError
from dyn_relay.sidecar.settings import Settings
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import open_relay, until
from dyn_testkit.sidecar import open_sidecar
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import WorkerOptions
from dyn_testkit.worker.grpc import service
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged
from tests.sidecar.harness import states

OPTIONS = WorkerOptions(grpc_port=30001, tick=0.5)


@asynccontextmanager
async def sided(count=2, *, both=False, **config):
    """Engines with both servers, sidecars that use gRPC (`both`: and HTTP for the rest), and a proxy."""
    network = SimNetwork(1)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(open_fleet(network, "w{}", 30000))
        workers = await fleet(count, options=OPTIONS)
        relay = await stack.enter_async_context(open_relay(network, "proxy", 30000, log_level="error", **config))
        sidecars = []
        for number, worker in enumerate(workers, 1):
            engine = worker.url if both else None
            at = {"listen": f"side{number}:31000", "engine_grpc": f"w{number}:{worker.grpc_port}"}
            sidecars.append(await stack.enter_async_context(open_sidecar(network, engine, [relay.url], **at)))
        await until(lambda: states(relay) == {one.url: "ready" for one in sidecars}, lambda: str(states(relay)))
        yield network, workers, sidecars, relay


@pytest.mark.parametrize("both", [False, True], ids=["grpc", "both"])
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_the_client_s_answer_is_exact(autojump_clock, both, stream):
    async with sided(1, both=both) as (network, _, _, relay):
        network.refuse(("w1", 30000))  # so it goes over gRPC, or nowhere
        body = generate(4, stream=stream)
        assert judged(await relay.ask(body), body, ORACLE) == []


@pytest.mark.parametrize("both", [False, True], ids=["grpc", "both"])
async def test_an_engine_s_death_is_a_cut_within_a_second(autojump_clock, both):
    async with sided(2, both=both) as (_, workers, sidecars, relay), trio.open_nursery() as nursery:
        body, answers = generate(20), []

        async def ask():
            answers.append(await relay.ask(body))

        nursery.start_soon(ask)
        await until(lambda: any(worker.live for worker in workers))
        await trio.sleep(3)
        one, two = sorted(workers, key=lambda worker: -worker.live)
        one.kill()
        began = trio.current_time()
        await until(lambda: two.live)
        assert trio.current_time() - began < 1
        await until(lambda: answers)
        assert judged(answers[0], body, ORACLE) == []
        await relay.quiet()
        assert [attempt["cause"] for attempt in relay.rows[0]["attempts"]] == ["cut", None]
        await until(lambda: len(states(relay)) == 1)
        await one.restart()
        await until(lambda: states(relay) == {side.url: "ready" for side in sidecars})


async def test_what_only_http_has_goes_over_http(autojump_clock):
    async with sided(1, both=True) as (_, workers, [side], _):
        got = await side.ask(None, "/v1/models")
        assert got.status == 200
        assert [one.path for one in workers[0].requests][-1] == "/v1/models"


async def test_what_grpc_cannot_carry_goes_where_the_sidecar_was_told(autojump_clock, monkeypatch):
    """Behind a mapped port, the engine itself tells another one."""
    told = service.server_info
    monkeypatch.setattr(service, "server_info", lambda worker: told(worker) | {"port": 9})
    async with sided(1, both=True) as (_, [worker], [side], relay):
        body = generate(4, logit_bias={"5": 0.5})
        got = await relay.ask(body)
        assert (got.status, got.complete) == (200, True)
        assert [one.path for one in worker.requests].count("/generate") == 1
        assert (await side.ask(None, "/v1/models")).status == 200


async def test_what_grpc_does_not_have_is_refused_by_name(autojump_clock):
    async with sided(1) as (_, _, [side], _):
        got = await side.ask({}, "/configure_logging")
        assert got.status == 501
        assert b"/configure_logging" in got.body
        assert (await side.ask(None, "/nope")).status == 404


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "engine"),
        ({"engine_grpc": "http://a:1"}, "engine_grpc"),
        ({"engine_grpc": "a"}, "engine_grpc"),
        ({"engine": "grpc://a:1"}, "engine"),
        ({"engine": "http://a:1", "listen": "a"}, "listen"),
        ({"engine": "http://a:1", "listen": "a:99999"}, "listen"),
        ({"engine": "http://a:1", "listen": "a:x"}, "listen"),
        ({"engine": "http://a:1", "listen": "0.0.0.0:1", "relay": ("http://b:1",)}, "advertise"),
        ({"engine": "http://a:1", "listen": "[::]:1", "relay": ("http://b:1",)}, "advertise"),
        ({"engine": "http://a:1", "relay": ("b:1",)}, "relay"),
        ({"engine": "http://a:1", "lease_secs": 0.0}, "lease_secs"),
        ({"engine": "ftp://a:1"}, "engine"),
        ({"engine": "http://a:1", "relay": ("grpc://b:1",)}, "relay"),
        ({"engine": "http://a:1", "advertise": "grpc://b:1"}, "advertise"),
        ({"engine": "http://a:1", "relay": ("http://127.0.0.1:1", "http://b:1")}, "advertise"),
        ({"engine": "http://a:1", "relay": ("http://b:1",), "listen": "localhost:1"}, "advertise"),
    ],
)
def test_bad_settings_name_the_option(settings, field):
    with pytest.raises(ConfigError, match=f"^{field}"):
        Settings(**settings)


def test_addresses():
    Settings(engine="http://a:1", relay=("http://localhost:1", "http://[::1]:2", "http://127.0.0.2:3"))
    Settings(engine="http://a:1", relay=("http://b:1",), listen="127.0.0.1:1", advertise="http://c:1")
    Settings(engine="http://a:1", relay=("http://b:1",), listen="c:1")
    assert Settings(engine="http://a:1", listen="[::1]:0").address == ("::1", 0)
    assert str(Settings(engine_grpc="a:1").origin) == "grpc://a:1"
    assert str(Settings(engine_grpc="grpcs://a:1", engine="http://a:2").origin) == "http://a:2"
