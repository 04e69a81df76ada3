"""The whole proxy in direct mode: what it is told on the command line, what it learns, who dies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio

from dyn_relay.app import Misplaced
from dyn_relay.config import Config, ConfigError
from dyn_relay.direct.gateways import IDLE
from dyn_relay.fleet.worker import State
from dyn_relay.grpc.messages import MAX_MESSAGE
from dyn_relay.grpc.stream import Stream
from dyn_relay.http11.origin import Origin
from dyn_testkit import faults
from dyn_testkit.engine import Model
from dyn_testkit.faults import Fault, FaultPlan, nth
from dyn_testkit.fleet import open_fleet
from dyn_testkit.oracle import Oracle
from dyn_testkit.relay import open_relay, until
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import WorkerOptions
from tests.direct.kit import direct
from tests.relay.harness import judged

ORACLE = Oracle(Model())


def body(number: int = 0, stream: bool = True) -> dict[str, Any]:
    sampling = {"max_new_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    return {"rid": f"r-{number}", "input_ids": [number, 7, 11], "sampling_params": sampling, "stream": stream}


@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
async def test_both_engines_die_and_the_answer_is_exact(autojump_clock, stream):
    plans = [FaultPlan.of(Fault(faults.at_token(8), faults.KILL_WORKER, nth(0))) for _ in range(2)]
    async with direct(options=WorkerOptions(tick=0.1), plans=[*plans, None]) as w:
        answer = await w.ask(body(stream=stream))
        assert judged(answer, body(stream=stream), ORACLE) == []
        await w.quiet()
        [row] = w.rows
        assert len(row["attempts"]) == 1 + sum(worker.deaths for worker in w.workers)


async def test_one_of_two_dies_under_twenty_streams(autojump_clock):
    async with direct(options=WorkerOptions(tick=0.1), policy="round_robin") as w:
        answers = {}

        async def client(number: int) -> None:
            answers[number] = await w.ask(body(number, stream=number % 2 == 0))

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(client, number)
            await trio.sleep(1.05)
            assert [worker.live for worker in w.workers] == [10, 10]
            w.workers[0].kill()
        for number, answer in answers.items():
            assert judged(answer, body(number, stream=number % 2 == 0), ORACLE) == []
        await w.quiet()
        assert sorted(len(row["attempts"]) for row in w.rows) == [1] * 10 + [2] * 10


async def test_a_goaway_moves_only_the_calls_of_its_connection(autojump_clock):
    """Of five hundred calls over few connections, eight share one."""
    plan = FaultPlan.of(Fault(faults.at_token(5), faults.goaway(0), nth(200)))
    async with direct(options=WorkerOptions(tick=0.1), plans=[plan, None], policy="round_robin") as w:
        answers = {}

        async def client(number: int) -> None:
            answers[number] = await w.ask(body(number))

        async with trio.open_nursery() as nursery:
            for number in range(500):
                nursery.start_soon(client, number)
        assert all(judged(answer, body(number), ORACLE) == [] for number, answer in answers.items())
        await w.quiet()
        plan.verify()
        moved = [row for row in w.rows if len(row["attempts"]) > 1]
        assert 0 < len(moved) <= 8
        assert len(w.rows) == 500


async def test_a_mixed_fleet(autojump_clock):
    """What began over gRPC goes on over HTTP, and the other way round."""
    network = SimNetwork(1)
    plans = [FaultPlan.of(Fault(faults.at_token(5), faults.KILL_WORKER, nth(0))), None]
    for order in (0, 1):
        async with open_fleet(network, f"m{order}-{{}}", 30000) as fleet:
            first, second = await fleet(2, options=WorkerOptions(grpc_port=30001), faults=plans)
            urls = [first.grpc_url, second.url] if order else [first.url, second.grpc_url]
            async with open_relay(network, f"proxy{order}", 30000, urls, seed=1, log_level="error") as relay:
                await relay.ready()
                answer = await relay.ask(body())
                assert judged(answer, body(), ORACLE) == []
                assert first.deaths == 1


# -- what is learnt ------------------------------------------------------------------------------------------------


async def test_what_engines_say_is_shown_and_parsers_can_be_named(autojump_clock):
    options = WorkerOptions(dp_size=2, preferred_sampling_params={"top_k": 5}, dialect="incremental")
    async with direct(options=options, dyn_tool_call_parser="hermes") as w:
        rows = (await w.ask(None, "/workers", method="GET")).json()["workers"]
        traits = rows[0]["traits"]
        assert rows[0]["url"] == "grpc://w1:30001"
        assert (traits["role"], traits["dp_size"], traits["incremental"]) == ("regular", 2, True)
        assert traits["sampling_defaults"] == {"top_k": 5}
        assert traits["max_input"] == options.model.max_input
        assert (traits["tool_call_parser"], traits["reasoning_parser"]) == ("hermes", None)


async def test_an_engine_that_leaves_has_no_gateway_any_more(autojump_clock):
    async with direct() as w:
        gateways = w.app._gateways
        assert gateways.open == 2
        assert (await w.ask(None, "/workers/w1", method="DELETE")).status == 202
        assert gateways.open == 1


async def test_an_engine_that_is_told_something_after_it_has_left_has_none_either(autojump_clock):
    """Its last client goes away: the abort makes a gateway once more."""
    async with direct(options=WorkerOptions(tick=1.0)) as w:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(w.ask, body(number))
            await trio.sleep(3.5)
            await w.ask(None, "/workers/w1", method="DELETE")
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        await until(lambda: bool(w.workers[0].aborts))
        await trio.sleep(3 * IDLE)
        assert w.app._gateways.open == len(w.app.fleet.workers) == 1


async def test_a_text_that_grpc_cannot_carry_is_the_clients_fault(autojump_clock):
    """Not the engines', which have seen nothing of it."""
    async with direct(options=WorkerOptions(skip_tokenizer_init=False)) as w:
        sampling = {"max_new_tokens": 5, "temperature": 0.0, "ignore_eos": True}
        answer = await w.ask({"text": "x" * (MAX_MESSAGE + 10), "sampling_params": sampling})
        assert answer.status == 400
        assert b"body: the request has" in answer.body
        await w.quiet()
        assert [worker.state for worker in w.app.fleet.workers] == [State.READY] * 2
        [row] = w.rows
        assert len(row["attempts"]) == 1


@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
async def test_an_abort_reaches_what_went_over_http(autojump_clock, stream):
    async with direct(options=WorkerOptions(tick=1.0), plans=[None], http_fallback=True) as w:
        asked = body(stream=stream) | {"extra_key": "adapter:v1"}
        asked["sampling_params"]["max_new_tokens"] = 300
        answers = []

        async def ask() -> None:
            answers.append(await w.ask(asked))

        with trio.fail_after(12):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await trio.sleep(10)
                await w.ask({"rid": asked["rid"]}, "/abort_request")
        value = answers[0].values()[-1] if stream else answers[0].json()
        assert value["meta_info"]["finish_reason"]["type"] == "abort"
        assert value["meta_info"]["completion_tokens"] >= 9


async def test_an_abort_reaches_the_engine(autojump_clock):
    async with direct(options=WorkerOptions(tick=1.0), plans=[None]) as w:
        with trio.move_on_after(3.5):
            await w.ask(body())
        with trio.fail_after(1):
            await w.workers[0].reaches(aborts=1)
            await until(lambda: not w.workers[0].live)
        assert w.workers[0].aborts[0]["rid"] == "r-0"


# -- pairs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_pairs_over_grpc(autojump_clock, side):
    """Either leg's engine dies; the room, 63 bits of it, is the same for both."""
    network = SimNetwork(1)
    options = WorkerOptions(grpc_port=30001, tick=0.1)
    where = faults.IN_TRANSFER if side == "prefill" else faults.at_token(5)
    plan = [FaultPlan.of(Fault(where, faults.KILL_WORKER, nth(0))), None]
    async with open_fleet(network, "p{}", 30000) as fleet, open_fleet(network, "d{}", 30000) as others:
        plans = {"prefill": [None, None], "decode": [None, None], side: plan}
        prefills = await fleet(2, options=replace(options, disaggregation="prefill"), faults=plans["prefill"])
        decodes = await others(2, options=replace(options, disaggregation="decode"), faults=plans["decode"])
        settings = {"prefill_engine_url": tuple(one.grpc_url for one in prefills)}
        settings["engine_url"] = tuple(one.grpc_url for one in decodes)
        async with open_relay(network, "proxy", 30000, (), seed=1, log_level="error", **settings) as relay:
            await relay.ready()
            request = {**body(), "return_logprob": True, "logprob_start_len": 0}
            answer = await relay.ask(request)
            assert judged(answer, request, ORACLE) == []
            await relay.quiet()
            assert sum(one.deaths for one in (*prefills, *decodes)) == 1
            assert len(relay.rows[0]["attempts"]) == 2
            rooms = [room for one in decodes for room in one.rooms]
            assert len(rooms) == 2
            assert all(0 < room < 2**63 for room in rooms)
            assert max(rooms) > 2**53


async def test_another_role_than_the_lists_is_an_error_at_the_start(autojump_clock):
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet:
        [worker] = await fleet(1, options=WorkerOptions(grpc_port=30001, disaggregation="decode"))
        settings = {"prefill_engine_url": (worker.grpc_url,), "engine_url": ("grpc://nobody:2",)}
        with pytest.raises(ExceptionGroup) as caught:
            async with open_relay(network, "proxy", 30000, (), log_level="error", **settings):
                raise AssertionError
        assert caught.group_contains(Misplaced, match="grpc://w1:30001.*prefill.*decode", depth=None)


# -- how engines are named -----------------------------------------------------------------------------------------


def test_the_other_names_of_workers():
    grpc = ("grpc://a:1", "grpcs://b:2")
    assert Config(engine_url=grpc, worker_urls=("http://c",)).worker_urls == ("http://c", *grpc)
    assert Config(engine_url=grpc, direct=True).worker_urls == grpc
    paired = Config(engine_url=grpc[:1], prefill_engine_url=("grpc://b:2", "8998"))
    assert (paired.pd_disaggregation, paired.prefill, paired.decode) == (True, ("grpc://b:2", "8998"), grpc[:1])
    assert replace(paired, port=5) == replace(Config(**_fields(paired)), port=5)
    with pytest.raises(ConfigError, match=r"direct: http://c is no gRPC"):
        Config(engine_url=("http://c",), direct=True)


def _fields(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("pd_disaggregation", "prefill", "decode")}


@pytest.mark.parametrize("url", ["grpc://a:1", "grpcs://[::1]:443", "grpc://a:80"])
def test_the_url_of_a_grpc_server(url):
    assert str(Origin.parse(url)) == url
    assert Origin.parse(url).grpc
    assert Origin.parse(url) != Origin.parse(url.replace("grpc", "http"))


@pytest.mark.parametrize("url", ["grpc://a", "grpc://a:1/path", "grpc+tls://a:1"])
def test_what_is_none(url):
    with pytest.raises(ValueError, match=r"gRPC needs a port|scheme"):
        Origin.parse(url)


@pytest.mark.parametrize("how", ["refuse", "hang"])
async def test_an_http_port_that_nobody_can_dial_is_no_fault_of_the_engine(autojump_clock, how):
    """What gRPC cannot carry is refused by name, at once, and the workers stay as well as they are."""
    async with direct(http_fallback=True) as w:
        for number in (1, 2):
            getattr(w.network, how)((f"w{number}", 30000))
        for _ in range(3):
            began = trio.current_time()
            answer = await w.ask({**body(stream=False), "extra_key": "k"})
            assert answer.status == 400
            assert "extra_key" in answer.json()["error"]
            assert "30000" in answer.json()["error"]
            assert trio.current_time() - began <= 5
        answer = await w.ask(None, "/v1/nothing")
        assert (answer.status, ":30000: " in answer.json()["message"]) == (501, True)
        assert [(one.state, one.failures) for one in w.app.fleet.workers] == [(State.READY, 0)] * 2


async def test_an_engine_that_dies_before_its_http_port_is_dialled_is_dead(autojump_clock):
    """Nothing listens there any more, and that is no refusal: another one is asked."""
    async with direct(http_fallback=True) as w:
        answers = []
        w.network.hang(("w1", 30000))

        async def ask():
            answers.append(await w.ask({**body(stream=False), "extra_key": "k"}))

        w.nursery.start_soon(ask)
        await trio.sleep(1)
        w.workers[0].kill()
        await until(lambda: answers)
        assert (answers[0].status, len(w.workers[1].generates)) == (200, 1)


async def test_a_defect_ends_what_runs_at_one_engine_only(autojump_clock, monkeypatch):
    """Its calls are cut, and go on elsewhere; then the engine has another gateway."""
    async with direct(options=WorkerOptions(tick=0.1), policy="round_robin") as w:
        broken, feed = [], Stream.feed

        def fails(self, data, size):
            if broken:
                return feed(self, data, size)
            broken.append(self)
            raise RuntimeError("a defect")

        monkeypatch.setattr(Stream, "feed", fails)
        for number in range(4):
            assert judged(await w.ask(body(number)), body(number), ORACLE) == []
        assert broken
        await w.quiet()
        assert {worker.live for worker in w.workers} == {0}
        assert all(worker.generates for worker in w.workers)
