"""Which paths a sidecar shows, and that each goes where it is registered."""

from __future__ import annotations

import json

import pytest
import trio

from dyn_relay.control.admin import ADMIN
from dyn_relay.relay.queue import GENERATING
from dyn_relay.sidecar.paths import SGLANG, shown
from dyn_testkit.client import fetch
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged
from tests.sidecar.harness import alone

PLAIN = {"GET": None, "POST": {}}


async def test_the_answer_is_the_engine_s_byte_by_byte(autojump_clock):
    async with alone() as (side, worker, network):
        body = generate(8, rid="a" * 32)
        got = await side.ask(body)
        assert judged(got, body, ORACLE) == []
        direct = await fetch(network, worker.url, "/generate", generate(8, rid="a" * 32))
        assert [line for line in got.headers if line[0] != b"connection"] == [
            line for line in direct.headers if line[0] != b"connection"
        ]
        assert len(got.events()) == len(direct.events())


@pytest.mark.parametrize("path", ["/model_info", "/server_info", "/v1/models", "/get_model_info", "/v1/loads", "/"])
async def test_infos_are_the_engine_s(autojump_clock, path):
    async with alone() as (side, worker, network):
        got, direct = await side.ask(None, path), await fetch(network, worker.url, path)
        assert (got.status, got.header("content-type")) == (direct.status, direct.header("content-type")) != (404, None)
        if path != "/v1/loads":  # has the time in it
            assert got.body == direct.body


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(("path", "says"), [("/start_profile", b"Start"), ("/stop_profile", b"Stop")])
async def test_profiling_answers_in_plain_text(autojump_clock, path, says, method):
    async with alone() as (side, worker, _):
        got = await side.ask(PLAIN[method], path, method=method)
        assert (got.status, got.header("content-type")) == (200, "text/plain; charset=utf-8")
        assert got.body.startswith(says)
        assert [one.request.method for one in worker.requests if one.path == path] == [method]


@pytest.mark.parametrize(
    "path", ["/nope", "/generate/more", "/v1", "/%67enerate", "/v1/models/", "/mock/take", "/admin"]
)
async def test_what_is_not_registered_is_a_404_that_names_it(autojump_clock, path):
    async with alone() as (side, worker, _):
        seen = len(worker.requests)
        got = await side.ask(None, path)
        if path == "/v1/models/":  # a slash at the end does not count
            assert got.status != 404
            return
        assert got.status == 404
        assert path in got.json()["message"]
        assert [one.path for one in worker.requests[seen:] if one.path not in ("/health", "/model_info")] == []


def test_the_table_has_all_that_the_proxy_knows_of():
    assert ADMIN <= SGLANG
    assert GENERATING <= SGLANG
    assert {"/generate", "/health", "/health_generate", "/model_info", "/server_info", "/abort_request"} <= SGLANG
    assert {"/start_profile", "/stop_profile", "/flush_cache", "/pause_generation", "/load_lora_adapter"} <= SGLANG
    assert shown("/v1/models/some/model", SGLANG)
    assert shown("/generate/", SGLANG)
    assert not shown("/v1/modelsx", SGLANG)
    assert shown("/dumper/one", SGLANG)
    assert not shown("/dumper/", SGLANG)


async def test_generate_can_be_switched_off(autojump_clock):
    async with alone(enable_generate=False) as (side, worker, _):
        got = await side.ask(generate())
        assert got.status == 404
        assert "DYN_SGLANG_ENABLE_GENERATE" in got.json()["message"]
        assert not worker.generates
        assert (await side.ask(None, "/model_info")).status == 200


async def test_it_says_of_itself_what_it_has_found(autojump_clock):
    options = WorkerOptions(disaggregation="null", preferred_sampling_params={"top_k": 3})
    async with alone(options=options) as (side, worker, _):
        got = (await side.ask(None, "/sidecar")).json()
        assert got["engine"]["url"] == worker.url
        assert got["engine"]["state"] == "ready"
        assert (got["traits"]["role"], got["traits"]["sampling_defaults"]) == ("regular", {"top_k": 3})
        assert (got["in_flight"], got["relays"], got["draining"]) == (0, [], False)
        assert (await side.ask({}, "/sidecar")).status == 404


async def test_a_body_beyond_the_limit_does_not_reach_the_engine(autojump_clock):
    async with alone(max_payload_size=1000) as (side, worker, _):
        assert (await side.ask(b"x" * 1001)).status == 413
        assert not worker.generates


async def test_a_reservation_lasts_as_long_as_its_answer(autojump_clock):
    """One a request, also of a batch, and for as long as the client has not taken the last byte."""
    async with alone(options=WorkerOptions(tick=1.0), buffer=2000) as (side, worker, network):
        connection = await network.connect("side", 31000)
        data = json.dumps({**generate(20), "input_ids": [[5, 6], [7, 8]], "rid": ["a" * 32, "b" * 32]}).encode()
        head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        await connection.send(head % len(data) + data)
        held = side.sidecar.reservations
        await until(lambda: worker.generates)
        assert held.held == 1
        await trio.sleep(3600)  # the client takes nothing
        assert held.held == 1
        wire = b""
        while not wire.endswith(b"0\r\n\r\n"):
            wire += await connection.receive()
        await until(lambda: held.held == 0)
