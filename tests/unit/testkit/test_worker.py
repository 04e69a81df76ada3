"""The mock worker behaves as SGLang does, and its answers are the oracle's."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from dyn_relay.net import Connection
from dyn_relay.sockets import open_network
from dyn_testkit import strategies
from dyn_testkit.client import Response, ask, fetch
from dyn_testkit.engine import Model
from dyn_testkit.oracle import Oracle, differences, fold
from dyn_testkit.simnet import Fragmentation, SimNetwork
from dyn_testkit.worker import Dialect, MockWorker, WorkerOptions

MODEL = Model(vocab_size=300, context_length=2000, eos_rate=0.02)
ORACLE = Oracle(MODEL)
DIALECTS: tuple[Dialect, ...] = ("cumulative", "incremental", "mixed")


def body(count: int = 5, *, stream: bool = False, **more: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    return {"input_ids": [7, 8, 9], "sampling_params": params, "stream": stream} | more


def options(**more: Any) -> WorkerOptions:
    return WorkerOptions(**{"model": MODEL, "tick": 1.0} | more)


def finishes(response: Response) -> list[Any]:
    return [value["meta_info"]["finish_reason"] for value in response.values()]


@settings(max_examples=150, deadline=None)
@given(
    strategies.requests(MODEL),
    st.sampled_from(DIALECTS),
    strategies.fragmentations(),
    st.integers(1, 3),
    st.booleans(),
)
def test_answers_are_the_oracles(
    request: dict[str, Any], dialect: Dialect, fragmentation: Fragmentation, coalesce: int, late: bool
) -> None:
    """Unary and folded streams, in every dialect, coalesced and with a late finish."""
    settings_ = WorkerOptions(model=MODEL, dialect=dialect, tokens_per_tick=coalesce, late_finish=late)
    answers: list[Response] = []

    async def main() -> None:
        network = SimNetwork(1, fragmentation)
        async with MockWorker.serve(network, "worker", 1, settings_) as worker:
            answers.append(await fetch(network, worker.url, "/generate", request | {"stream": False}))
            answers.append(await fetch(network, worker.url, "/generate", request | {"stream": True}))

    trio.run(main)
    unary, stream = answers
    wanted = ORACLE.answer(request)
    assert not differences(unary.json(), wanted)
    assert stream.complete
    assert stream.events()[-1] == b"[DONE]"
    assert not differences(fold(stream.values(), dialect), wanted)


async def test_text_experts_and_defaults_are_the_oracles() -> None:
    preferred = {"max_new_tokens": 9, "temperature": 0.5}
    setup = options(
        tick=0, skip_tokenizer_init=False, routed_experts=True, expert_mark=800, preferred_sampling_params=preferred
    )
    oracle = Oracle(MODEL, tokenizer=True, defaults=preferred, routed_experts=True, expert_mark=800)
    asked = {
        "input_ids": [7, 8],
        "return_routed_experts": True,
        "return_logprob": True,
        "return_text_in_logprobs": True,
    }
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, setup) as worker:
        for stream in (False, True):
            response = await fetch(network, worker.url, "/generate", asked | {"stream": stream})
            value = response.values()[-1] if stream else response.json()
            assert not differences(value, oracle.answer(asked))
        rows = base64.b64decode(value["meta_info"]["routed_experts"])
        assert len(rows) == 4 * (2 + 9 - 1) * MODEL.layers * MODEL.experts_per_token
        info = (await fetch(network, worker.url, "/get_model_info")).json()
        assert info["preferred_sampling_params"] == preferred


def test_the_oracle_and_the_fold_notice_mistakes() -> None:
    wanted = ORACLE.answer(body())
    assert not differences(wanted, wanted)
    assert differences(wanted | {"output_ids": [1]}, wanted)
    assert differences(wanted | {"text": ""}, wanted)
    assert differences(wanted | {"meta_info": wanted["meta_info"] | {"prompt_tokens": 4}}, wanted)
    event = {"output_ids": [1], "meta_info": {"completion_tokens": 2}}
    with pytest.raises(ValueError, match="completion_tokens is 2"):
        fold([event], "incremental")
    with pytest.raises(ValueError, match="no events"):
        fold([], "cumulative")


@pytest.mark.parametrize(
    ("setup", "request_", "expected"),
    [
        ({}, {}, [1, 2, 3, 4, 5, 6, 7]),
        ({"stream_interval": 3}, {}, [1, 4, 7]),
        ({}, {"stream_interval": 5}, [1, 6, 7]),
        ({"tokens_per_tick": 4}, {}, [4, 7]),
        ({"late_finish": True}, {}, [1, 2, 3, 4, 5, 6, 7, 7]),
    ],
)
async def test_events_of_a_stream(
    autojump_clock: trio.testing.MockClock, setup: dict[str, Any], request_: dict[str, Any], expected: list[int]
) -> None:
    """The first token at once, then every interval; a tick's tokens in one event; the finish alone if late."""
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options(**setup)) as worker:
        asked = body(7, stream=True)
        asked["sampling_params"] |= request_
        response = await fetch(network, worker.url, "/generate", asked)
    assert [value["meta_info"]["completion_tokens"] for value in response.values()] == expected
    stamps = ["response_sent_to_client_ts" in value["meta_info"] for value in response.values()]
    assert stamps == [True] + [False] * (len(expected) - 1)


async def test_pace_is_virtual(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options(tick=2.0)) as worker:
        value = (await fetch(network, worker.url, "/generate", body(5))).json()
    assert trio.current_time() == 10.0
    assert value["meta_info"]["e2e_latency"] == 10.0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_live_rid_is_refused_and_free_again_later(autojump_clock: trio.testing.MockClock, stream: bool) -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options()) as worker, trio.open_nursery() as nursery:
        nursery.start_soon(fetch, network, worker.url, "/generate", body(5, rid="r"))
        await worker.reaches(requests=1)
        twice = await fetch(network, worker.url, "/generate", body(5, rid="r", stream=stream))
        message = "Duplicate request ID detected: r"
        if stream:
            assert twice.status == 200
            assert twice.values()[0]["error"]["message"] == message
        else:
            assert (twice.status, twice.json()) == (400, {"error": {"message": message}})
        await trio.sleep(10)
        assert (await fetch(network, worker.url, "/generate", body(5, rid="r"))).status == 200


@pytest.mark.parametrize(("match", "aborted"), [("prefix", ["job-1", "job-10"]), ("exact", ["job-1"])])
async def test_abort_by_rid(autojump_clock: trio.testing.MockClock, match: Any, aborted: list[str]) -> None:
    """C3: the scheduler matches rids by prefix; a live engine was seen to match whole ones."""
    network = SimNetwork()
    answers: dict[str, Response] = {}

    async def generate(rid: str, stream: bool) -> None:
        answers[rid] = await fetch(network, worker.url, "/generate", body(8, rid=rid, stream=stream))

    async with MockWorker.serve(network, "worker", 1, options(abort_match=match)) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate, "job-1", True)
            nursery.start_soon(generate, "job-10", True)
            nursery.start_soon(generate, "other", False)
            await trio.sleep(3.5)
            for rid in ("job-1", "", "unknown"):
                reply = await fetch(network, worker.url, "/abort_request", {"rid": rid})
                assert (reply.status, reply.body) == (200, b"")
        assert [abort["rid"] for abort in worker.aborts] == ["job-1", "", "unknown"]
    ended = {rid: answer.values()[-1] for rid, answer in answers.items() if rid != "other"}
    wish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert [rid for rid, value in sorted(ended.items()) if value["meta_info"]["finish_reason"] == wish] == aborted
    assert len(ended["job-1"]["output_ids"]) == 4
    assert answers["job-1"].events()[-1] == b"[DONE]"
    assert answers["other"].json()["meta_info"]["finish_reason"]["type"] == "length"


async def test_abort_all_reaches_unary_requests(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    answers: list[Response] = []
    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        async with trio.open_nursery() as nursery:

            async def generate() -> None:
                answers.append(await fetch(network, worker.url, "/generate", body(8)))

            nursery.start_soon(generate)
            await trio.sleep(2.5)
            await fetch(network, worker.url, "/abort_request", {"abort_all": True})
        assert worker.live == 0
    value = answers[0].json()
    assert answers[0].status == 200
    assert value["meta_info"]["finish_reason"]["type"] == "abort"
    assert value["output_ids"] == ORACLE.answer(body(8))["output_ids"][:3]


async def test_queue_full_and_order(autojump_clock: trio.testing.MockClock) -> None:
    """A8: 503 with the scheduler's body for unary, a short abort event for streams; the queue is first come."""
    network = SimNetwork()
    ended: list[tuple[str, int]] = []

    async def generate(rid: str) -> None:
        answer = await fetch(network, worker.url, "/generate", body(3, rid=rid))
        ended.append((rid, answer.status))

    setup = options(max_running_requests=1, max_queued_requests=2)
    async with MockWorker.serve(network, "worker", 1, setup) as worker, trio.open_nursery() as nursery:
        for count, rid in enumerate("abc", 1):
            nursery.start_soon(generate, rid)
            await worker.reaches(requests=count)
            await trio.testing.wait_all_tasks_blocked()
        full = await fetch(network, worker.url, "/generate", body(3))
        message = "The request queue is full."
        assert full.status == 503
        assert full.json() == {"object": "error", "message": message, "type": "503", "param": None, "code": 503}
        stream = await fetch(network, worker.url, "/generate", body(3, stream=True))
        assert finishes(stream) == [{"type": "abort", "status_code": 503, "message": message}]
        loads = (await fetch(network, worker.url, "/v1/loads")).json()["loads"][0]
        assert (loads["num_running_reqs"], loads["num_waiting_reqs"]) == (1, 2)
    assert ended == [("a", 200), ("b", 200), ("c", 200)]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_pause(autojump_clock: trio.testing.MockClock, mode: str) -> None:
    """Running requests are dropped or held; new ones wait; `/ready` says 503."""
    network = SimNetwork()
    answers: list[Response] = []

    async def generate() -> None:
        answers.append(await fetch(network, worker.url, "/generate", body(5, stream=True)))

    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await trio.sleep(2.5)
            await fetch(network, worker.url, "/pause_generation", {"mode": mode})
            nursery.start_soon(generate)
            await trio.sleep(100)
            assert len(answers) == (mode == "abort")
            assert (await fetch(network, worker.url, "/ready")).status == 503
            await fetch(network, worker.url, "/continue_generation", {})
        assert (await fetch(network, worker.url, "/ready")).status == 200
    first, second = answers
    last = first.values()[-1]["meta_info"]
    assert last["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
    assert last["num_retractions"] == (mode == "retract")
    assert finishes(second)[-1] == {"type": "length", "length": 5}


async def test_abort_in_the_waiting_queue(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options()) as worker, trio.open_nursery() as nursery:
        await fetch(network, worker.url, "/pause_generation", {"mode": "in_place"})

        async def abort() -> None:
            await worker.reaches(requests=2)
            await fetch(network, worker.url, "/abort_request", {"rid": "r"})

        nursery.start_soon(abort)
        echo = (await fetch(network, worker.url, "/generate", body(5, rid="r", stream=True))).values()
    assert [value["meta_info"]["finish_reason"] for value in echo] == [
        {"type": "abort", "message": "Abort in waiting queue"}
    ]
    assert "prompt_tokens" not in echo[0]["meta_info"]
    assert echo[0]["text"] == ""


async def test_weight_update_in_flight(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    answers: list[Response] = []

    async def generate() -> None:
        answers.append(await fetch(network, worker.url, "/generate", body(5)))

    async with MockWorker.serve(network, "worker", 1, options(weight_version="v1")) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await trio.sleep(2.5)
            update = {"new_version": "v2", "abort_all_requests": False}
            reply = await fetch(network, worker.url, "/update_weight_version", update)
            assert reply.json()["new_version"] == "v2"
        assert (await fetch(network, worker.url, "/model_info")).json()["weight_version"] == "v2"
    meta = answers[0].json()["meta_info"]
    assert meta["weight_version"] == "v2"
    assert meta["weight_versions"] == [
        {"version": "v1", "start": 0, "end": 2},
        {"version": "v2", "start": 2, "end": 5},
    ]


async def test_prefix_cache() -> None:
    network = SimNetwork()
    cached = []
    async with MockWorker.serve(network, "worker", 1, options(tick=0)) as worker:
        for asked in (body(), body(), body(return_logprob=True, logprob_start_len=1), body(input_ids=[7, 8, 9, 1])):
            meta = (await fetch(network, worker.url, "/generate", asked)).json()["meta_info"]
            cached.append((meta["cached_tokens"], meta["cached_tokens_details"]))
        assert (await fetch(network, worker.url, "/flush_cache", {})).body.startswith(b"Cache flushed.")
        meta = (await fetch(network, worker.url, "/generate", body())).json()["meta_info"]
    details = [None, {"device": 2, "host": 0}, {"device": 1, "host": 0}, {"device": 3, "host": 0}]
    assert cached == list(zip([0, 2, 1, 3], details, strict=True))
    assert meta["cached_tokens"] == 0


async def test_batches_and_samples() -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options(tick=0)) as worker:
        batch = body(input_ids=[[7, 8, 9], [5]], rid="b")
        answers = (await fetch(network, worker.url, "/generate", batch)).json()
        events = (await fetch(network, worker.url, "/generate", batch | {"stream": True})).values()
        samples = body()
        samples["sampling_params"]["n"] = 2
        copies = (await fetch(network, worker.url, "/generate", samples | {"rid": "s"})).json()
    assert [value["meta_info"]["id"] for value in answers] == ["b_0", "b_1"]
    assert not differences(answers[0], ORACLE.answer(body(rid="b_0")))
    assert not differences(answers[1], ORACLE.answer(body(rid="b_1", input_ids=[5])))
    for index, answer in enumerate(answers):
        last = [event for event in events if event["index"] == index][-1]
        assert not differences(
            {key: last[key] for key in last if key != "index"},
            ORACLE.answer(body(rid=f"b_{index}", input_ids=batch["input_ids"][index])),
        )
        assert answer["output_ids"] == last["output_ids"]
    assert len(copies) == 2
    assert all(value["meta_info"]["id"] not in ("s", "s_0") for value in copies)


async def test_data_parallel_ranks() -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options(tick=0, dp_size=2)) as worker:
        ranks = [
            (await fetch(network, worker.url, "/generate", body(**more))).json()["meta_info"]["dp_rank"]
            for more in ({}, {}, {"routed_dp_rank": 1}, {"data_parallel_rank": 1})
        ]
        assert ranks == [0, 1, 1, 1]
        assert (await fetch(network, worker.url, "/generate", body(routed_dp_rank=2))).status == 400


async def test_keys() -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options(api_key="k", admin_api_key="a")) as worker:

        async def status(path: str, key: str | None, data: Any = None) -> int:
            headers = {"authorization": f"bearer {key}"} if key else {}
            return (await fetch(network, worker.url, path, data, headers=headers)).status

        assert await status("/health", None) == 200
        assert [await status("/model_info", key) for key in (None, "x", "k")] == [401, 401, 200]
        assert [await status("/abort_request", key, {}) for key in (None, "k", "a")] == [401, 401, 200]
        refused = await fetch(network, worker.url, "/model_info")
        assert refused.json() == {"error": "Unauthorized"}


async def open_to(network: SimNetwork, worker: MockWorker) -> Connection:
    return await network.connect(worker.host, worker.port)


async def test_keep_alive_and_idle_close(autojump_clock: trio.testing.MockClock) -> None:
    """Connections are reused; idle ones are closed after 5 s, but not before the first request."""
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        connection = await open_to(network, worker)
        await trio.sleep(60)
        for _ in range(2):
            answer = await ask(connection, "/generate", body(2, stream=True))
            assert answer.complete
            assert answer.header("connection") is None
            await trio.sleep(4.9)
        assert worker.dialled == 1
        before = trio.current_time()
        await connection.wait_closed()
        assert trio.current_time() - before == pytest.approx(0.1)


async def test_pipelining_chunked_bodies_and_continue() -> None:
    network = SimNetwork(5, Fragmentation(3))
    one = b"GET /ping HTTP/1.1\r\nHost: w\r\n\r\n"
    two = (
        b"POST /abort_request HTTP/1.1\r\nHost: w\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n"
        b"Connection: close\r\n\r\n"
    )
    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        connection = await open_to(network, worker)
        await connection.send(one + two)
        got = b""
        while b"100 Continue" not in got:
            got += await connection.receive()
        await connection.send(b'b\r\n{"rid":"xy"\r\n1\r\n}\r\n0\r\n\r\n')
        while data := await connection.receive():
            got += data
        assert got.count(b"HTTP/1.1 200 OK") == 2
        assert worker.aborts == [{"rid": "xy"}]
        assert [recorded.path for recorded in worker.requests] == ["/ping", "/abort_request"]


async def test_what_is_not_http_gets_400() -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        connection = await open_to(network, worker)
        await connection.send(b"\x00\x01 nonsense\r\n\r\n")
        got = await connection.receive()
        assert got.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "poison",
    [
        {"input_ids": [7, 300]},
        {"input_ids": [7, -1]},
        {"return_logprob": True, "top_logprobs_num": 301},
    ],
)
async def test_poison_kills_the_whole_worker(autojump_clock: trio.testing.MockClock, poison: dict[str, Any]) -> None:
    """The client sees an end without bytes, bystanders are cut, dials are refused; a restarted worker is empty."""
    network = SimNetwork()
    bystander: list[Response] = []

    async def generate() -> None:
        bystander.append(await fetch(network, worker.url, "/generate", body(500, stream=True)))

    async with MockWorker.serve(network, "worker", 1, options(death_delay=5.1)) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await trio.sleep(3.5)
            killed = await fetch(network, worker.url, "/generate", body(**poison))
            assert (killed.status, killed.wire, killed.broken) == (0, b"", "eof")
            assert trio.current_time() == pytest.approx(8.6)
        assert not bystander[0].complete
        assert bystander[0].events()
        assert not worker.alive
        with pytest.raises(Exception, match="refused"):
            await fetch(network, worker.url, "/health")
        await worker.restart()
        assert worker.live == 0
        assert (await fetch(network, worker.url, "/health")).status == 200
        assert worker.deaths == 1


async def test_the_second_negative_logprob_start_kills() -> None:
    network = SimNetwork()
    asked = body(return_logprob=True, logprob_start_len=-7)
    async with MockWorker.serve(network, "worker", 1, options(tick=0)) as worker:
        first = (await fetch(network, worker.url, "/generate", asked)).json()
        assert len(first["meta_info"]["input_token_logprobs"]) == 3
        assert (await fetch(network, worker.url, "/generate", asked)).status == 0
        await worker.dead()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_noticed(autojump_clock: trio.testing.MockClock, stream: bool) -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options()) as worker:
        with trio.move_on_after(3.5):
            await fetch(network, worker.url, "/generate", body(500, stream=stream))
        await worker.reaches(disconnects=1)
        assert worker.live == 0
        assert trio.current_time() == 3.5


async def test_a_slow_reader_holds_the_worker_back() -> None:
    network = SimNetwork(buffer=2000)
    async with MockWorker.serve(network, "worker", 1, options(tick=0, dialect="incremental")) as worker:
        connection = await open_to(network, worker)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, connection, "/generate", body(900, stream=True))
            await worker.reaches(requests=1)
            nursery.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        held = len(next(iter(worker.scheduler.live.values())).ids)
        assert held < 30
        await connection.receive()
        await trio.testing.wait_all_tasks_blocked()
        assert held < len(next(iter(worker.scheduler.live.values())).ids) < 60


async def test_health_can_be_slow_ill_or_hang(autojump_clock: trio.testing.MockClock) -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options(health_delay=1.07)) as worker:
        assert (await fetch(network, worker.url, "/health_generate")).status == 200
        assert trio.current_time() == pytest.approx(1.07)
        worker.health_status = 503
        assert (await fetch(network, worker.url, "/health")).status == 503
        worker.health_status = None
        with trio.move_on_after(60) as scope:
            await fetch(network, worker.url, "/health")
        assert scope.cancelled_caught


async def test_real_sockets_and_an_independent_client() -> None:
    """httpx reads answers and streams, and raises when a worker is killed in the middle of one."""
    async with (
        open_network() as network,
        MockWorker.serve(network, options=options(tick=0)) as worker,
        httpx.AsyncClient(base_url=worker.url, trust_env=False) as client,
    ):
        answer = await client.put("/generate", json=body(stream=False))
        assert not differences(answer.json(), ORACLE.answer(body()))
        async with client.stream("POST", "/generate", json=body(stream=True)) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) == 6

        async def killed_half_way() -> None:
            async with client.stream("POST", "/generate", json=body(1900, stream=True)) as stream:
                async for _ in stream.aiter_raw():
                    worker.kill()

        with pytest.raises(httpx.RemoteProtocolError):
            await killed_half_way()
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        port = worker.port
        await worker.restart()
        assert worker.port == port
        assert (await client.get("/health")).status_code == 200
