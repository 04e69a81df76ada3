"""The gateway before one gRPC engine, and what dials it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from dyn_relay.direct.gateways import IDLE, Gateways
from dyn_relay.grpc.status import Code
from dyn_relay.http11.client import Origin, Pool, Response, fetch
from dyn_relay.net import ConnectFailed, ConnectionBroken
from dyn_testkit import faults
from dyn_testkit.background import background
from dyn_testkit.faults import Fault, FaultPlan
from dyn_testkit.relay import until
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions

IDS = {"input_ids": [1, 2, 3], "rid": "r", "sampling_params": {"max_new_tokens": 6, "temperature": 0.0}}
STOCK = WorkerOptions()


class World:
    def __init__(self, worker: MockWorker, gateways: Gateways, pool: Pool) -> None:
        self.worker, self.gateways, self.pool = worker, gateways, pool
        self.origin = Origin.parse(worker.grpc_url)

    async def ask(self, path: str, body: Any = None, method: str = "", timeout: float = 60.0, **more: Any) -> Response:
        data = b"" if body is None else json.dumps(body).encode()
        how = method or ("GET" if body is None else "POST")
        return await fetch(self.pool, self.origin, how, path, body=data, timeout=timeout, **more)


@asynccontextmanager
async def world(options: WorkerOptions = STOCK, plan: FaultPlan | None = None, **more: Any) -> AsyncIterator[World]:
    network = SimNetwork(1)
    options = replace(options, grpc_port=30001)
    async with MockWorker.serve(network, "w", 30000, options, plan) as worker, background() as nursery:
        gateways = Gateways(network, **more)
        await nursery.start(gateways.run)
        yield World(worker, gateways, Pool(network, grpc=gateways.dial))


def struck(where: faults.Where, what: faults.What) -> FaultPlan:
    return FaultPlan.of(Fault(where, what))


#: (what ends the call before its first message, the status of a unary answer, the same of a stream)
BEFORE = [
    (faults.grpc_status(Code.INVALID_ARGUMENT), 400, 200),
    (faults.grpc_status(Code.OUT_OF_RANGE), 400, 200),
    (faults.grpc_status(Code.INTERNAL), 400, 200),
    (faults.grpc_status(Code.UNAUTHENTICATED), 401, 401),
    (faults.grpc_status(Code.PERMISSION_DENIED), 403, 403),
    (faults.grpc_status(Code.NOT_FOUND), 404, 404),
    (faults.grpc_status(Code.RESOURCE_EXHAUSTED), 429, 429),
    (faults.UNPROCESSED, 429, 429),
    (faults.grpc_status(Code.UNKNOWN), 500, 500),
    (faults.grpc_status(Code.UNIMPLEMENTED), 501, 501),
    (faults.grpc_status(Code.CANCELLED), 200, 200),
    (faults.grpc_status(Code.UNAVAILABLE), None, None),
    (faults.grpc_status(Code.DEADLINE_EXCEEDED), None, None),
    (faults.grpc_status(Code.DATA_LOSS), None, None),
    (faults.rst_stream(2), None, None),
    (faults.goaway(0), None, None),
    (faults.CLOSE, None, None),
    (faults.EMPTY_200, None, None),
]


@pytest.mark.parametrize(("what", "unary", "stream"), BEFORE, ids=lambda one: str(getattr(one, "kind", one)))
async def test_a_call_that_fails_before_its_first_message(autojump_clock, what, unary, stream):
    async with world(plan=struck(faults.AT_HEAD, what)) as w:
        for streaming, status in ((False, unary), (True, stream)):
            assert (await w.ask("/ping")).status == 200  # an earlier call of the same connection
            if status is None:
                with pytest.raises(ConnectionBroken):
                    await w.ask("/generate", {**IDS, "stream": streaming})
                continue
            answer = await w.ask("/generate", {**IDS, "stream": streaming})
            assert answer.status == status
            assert (b"data: [DONE]\n\n" in answer.body) is (streaming and status == 200)


@pytest.mark.parametrize(
    "what",
    [
        *(faults.grpc_status(code) for code in Code if code not in (Code.OK, Code.CANCELLED)),
        faults.rst_stream(8),
        faults.UNPROCESSED,
        faults.goaway(0),
        faults.KILL_WORKER,
        faults.NO_TRAILERS,
        faults.NOT_PROTOBUF,
        faults.TRUNCATED,
    ],
    ids=str,
)
async def test_a_call_that_fails_later_breaks_the_answer(autojump_clock, what):
    async with world(plan=struck(faults.at_token(3), what)) as w:
        with pytest.raises(ConnectionBroken):
            await w.ask("/generate", {**IDS, "stream": True})


@pytest.mark.parametrize(("health", "status"), [(200, 400), (503, 500)])
async def test_internal_is_the_clients_mistake_if_the_engine_is_well(autojump_clock, health, status):
    async with world(plan=struck(faults.AT_HEAD, faults.grpc_status(Code.INTERNAL))) as w:
        w.worker.health_status = health
        assert (await w.ask("/generate", IDS)).status == status


async def test_internal_that_begins_with_a_status_has_it(autojump_clock):
    async with world(WorkerOptions(max_queued_requests=0, max_running_requests=0)) as w:
        answer = await w.ask("/generate", IDS)
        assert (answer.status, json.loads(answer.body)["message"]) == (503, "The request queue is full.")


# -- who leaves ----------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_ends_the_call(autojump_clock):
    async with world(WorkerOptions(tick=1.0)) as w:
        with trio.move_on_after(3.5):
            await w.ask("/generate", {**IDS, "stream": True})
        with trio.fail_after(1):
            await w.worker.reaches(disconnects=1)
        assert not w.worker.live


async def test_a_client_that_does_not_read_stops_the_engine(autojump_clock):
    """Nothing but windows is kept, however long the answer."""
    async with world(WorkerOptions(dialect="incremental", tick=0.001, grpc_backpressure_timeout=1e9)) as w:
        upstream = await w.pool.acquire(w.origin, fresh=True)
        body = json.dumps({**IDS, "stream": True, "sampling_params": {"max_new_tokens": 20_000, "ignore_eos": True}})
        await upstream.connection.send(
            b"POST /generate HTTP/1.1\r\nhost: w\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body.encode())
        )
        await trio.sleep(30)
        [live] = w.worker.scheduler.live.values()
        held = len(live.ids)
        assert held < 2000
        await trio.sleep(100)
        assert len(live.ids) == held
        upstream.discard()
        await w.worker.reaches(disconnects=1)


async def test_an_engine_that_is_not_there_cannot_be_dialled(autojump_clock):
    async with world() as w:
        assert (await w.ask("/model_info")).status == 200
        w.worker.kill()
        with pytest.raises(ConnectFailed):
            await w.ask("/model_info")
        await w.worker.restart()
        assert (await w.ask("/model_info")).status == 200


async def test_one_that_is_forgotten_keeps_its_answers_and_loses_its_gateway(autojump_clock):
    async with world(WorkerOptions(tick=1.0)) as w:
        answers: list[Response] = []

        async def client() -> None:
            answers.append(await w.ask("/generate", IDS))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client)
            await trio.sleep(2.5)
            w.gateways.forget(w.origin)
            assert not w.gateways.open
        assert answers[0].status == 200
        with trio.fail_after(1):  # an idle connection would be kept for a minute
            await until(lambda: not w.worker._connections)
        assert (await w.ask("/model_info")).status == 200
        assert w.gateways.open == 1


async def test_what_was_dialled_when_it_was_forgotten_ends(autojump_clock):
    """Served, refused or broken: nobody waits for an answer for ever."""
    async with world(WorkerOptions(tick=1.0)) as w:
        assert (await w.ask("/model_info")).status == 200
        ends: list[str] = []

        async def client() -> None:
            try:
                connection = await w.gateways.dial(w.origin)
            except ConnectFailed:
                ends.append("refused")
                return
            try:
                await connection.send(b"GET /model_info HTTP/1.1\r\nhost: x\r\n\r\n")
                while await connection.receive():
                    pass
                ends.append("served")
            except ConnectionBroken:
                ends.append("broken")

        for ticks in range(12):
            ends.clear()
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    for _ in range(50):
                        nursery.start_soon(client)
                    for _ in range(ticks):
                        await trio.lowlevel.checkpoint()
                    w.gateways.forget(w.origin)
            assert len(ends) == 50


async def test_one_that_nobody_asks_any_more_is_closed(autojump_clock):
    async with world(WorkerOptions(tick=1.0)) as w:
        assert (await w.ask("/model_info")).status == 200
        await trio.sleep(0.9 * IDLE)
        assert w.gateways.open == 1
        place = w.gateways._places[w.origin]
        for _ in range(5):
            assert (await w.ask("/model_info")).status == 200
            await trio.sleep(0.9 * IDLE)
        assert w.gateways._places[w.origin] is place, "somebody has asked it all the time"
        await trio.sleep(2 * IDLE)
        assert w.gateways.open == 0
        assert (await w.ask("/model_info")).status == 200


async def test_one_that_is_at_work_for_long_is_not(autojump_clock):
    async with world(WorkerOptions(tick=100.0)) as w, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: w.ask("/generate", IDS, timeout=3 * IDLE))
        await trio.sleep(1.9 * IDLE)
        assert w.gateways.open == 1


async def test_one_that_is_forgotten_while_several_dial_it(autojump_clock):
    """Its server is silent: all of them hear that there is no connection, and nobody of a defect."""
    network = SimNetwork(1)
    await network.listen("w", 30001)
    gateways, origin, failures = Gateways(network), Origin.parse("grpc://w:30001"), list[ConnectFailed]()

    async def dial() -> None:
        try:
            await gateways.dial(origin)
        except ConnectFailed as exc:
            failures.append(exc)

    async with background() as nursery:
        await nursery.start(gateways.run)
        async with trio.open_nursery() as dialling:
            for _ in range(5):
                dialling.start_soon(dial)
            await trio.sleep(1)
            gateways.forget(origin)
    assert len(failures) == 5


async def test_what_was_dialled_when_a_defect_ended_it_is_broken(autojump_clock, monkeypatch):
    """Else it would wait for ever for an answer; the next dial makes another gateway."""
    broken = trio.Event()

    async def serve(*args: Any, **more: Any) -> None:
        await broken.wait()
        raise RuntimeError("a defect")

    async with world() as w:
        with monkeypatch.context() as patched, capture_logs() as lines:
            patched.setattr("dyn_relay.direct.gateways.serve", serve)
            connection = await w.gateways.dial(w.origin)
            await connection.send(b"GET /model_info HTTP/1.1\r\nhost: x\r\n\r\n")
            broken.set()
            with trio.fail_after(1), pytest.raises(ConnectionBroken):
                await connection.receive()
        assert ["defect" in line["event"] for line in lines] == [True]
        assert (await w.ask("/model_info")).status == 200


# -- other paths ---------------------------------------------------------------------------------------------------


async def test_health_wants_a_token(autojump_clock):
    """The flag of a frozen engine stays well."""
    async with world() as w:
        assert (await w.ask("/health")).status == 200
        w.worker.freeze()
        assert (await w.ask("/ping")).status == 200
        w.worker.scheduler.resume()  # not paused, but nothing comes
        assert (await w.ask("/health")).status == 503
        w.worker.thaw()
        w.worker.health_status = 503
        assert (await w.ask("/health")).status == 503
    assert not w.worker.generates


async def test_health_of_an_engine_that_is_busy_with_the_requests_of_others(autojump_clock):
    """It leaves health checks unanswered, and what others get is not seen here; its load tells, until it hangs."""
    body = IDS | {"sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    async with world(WorkerOptions(tick=1.0)) as w, background() as nursery:
        nursery.start_soon(w.worker.ask, body)
        await trio.sleep(3)
        assert (await w.ask("/health")).status == 200
        w.worker.freeze()
        w.worker.scheduler.resume()  # not paused, but nothing comes
        assert (await w.ask("/health")).status == 503


async def test_a_health_check_that_came_too_early_is_sent_again(autojump_clock):
    async with world(WorkerOptions(tick=0.2)) as w, background() as nursery:
        nursery.start_soon(w.worker.ask, IDS)
        await trio.sleep(1)
        with trio.fail_after(10):
            assert (await w.ask("/health")).status == 200


async def test_a_pause_is_seen_and_is_no_illness(autojump_clock):
    async with world() as w:
        assert (await w.ask("/ready")).status == 200
        assert json.loads((await w.ask("/pause_generation", {"mode": "in_place"})).body)["status"] == "ok"
        assert (await w.ask("/ready")).status == 503
        assert (await w.ask("/health")).status == 200
        await w.ask("/continue_generation", {})
        assert (await w.ask("/ready")).status == 200


@pytest.mark.parametrize("mode", ["never", "", 3, ["abort"]])
async def test_a_pause_that_would_end_the_engine_is_refused(autojump_clock, mode):
    """It says OK to any mode, and dies of another than these (SGLang 0.5.23)."""
    async with world() as w:
        answer = await w.ask("/pause_generation", {"mode": mode})
        assert (answer.status, b"mode" in answer.body) == (400, True)
        assert not any("Pause" in str(each) for each in w.worker.requests)


async def test_a_flush_of_a_busy_engine(autojump_clock):
    async with world(WorkerOptions(tick=1.0)) as w, background() as nursery:
        nursery.start_soon(w.ask, "/generate", IDS | {"sampling_params": {"max_new_tokens": 50}})
        await trio.sleep(3)
        over, beside = await w.ask("/flush_cache", {}), await w.worker.ask({}, "/flush_cache")
        assert (over.status, over.body) == (beside.status, beside.body) == (400, b"Flush cache failed.\n")


SAME = [
    ("/model_info", None, ("preferred_sampling_params", "has_image_understanding", "has_audio_understanding")),
    ("/tokenize", {"prompt": "a bc"}, ()),
    ("/tokenize", {"prompt": ["a", "bc"], "add_special_tokens": False}, ()),
    ("/detokenize", {"tokens": [104, 105]}, ()),
    ("/detokenize", {"tokens": [[104], [], [104]], "skip_special_tokens": True}, ()),
    ("/pause_generation", {"mode": "retract"}, ()),
    ("/start_profile", {}, ()),
    ("/flush_cache", {}, ()),
    ("/update_weights_from_disk", {"model_path": "other", "abort_all_requests": False}, ("num_paused_requests",)),
    ("/abort_request", {"rid": "nobody"}, ()),
    ("/abort_request", {"abort_all": True}, ()),
]


@pytest.mark.parametrize(("path", "body", "without"), SAME, ids=str)
async def test_what_an_engine_says_is_what_it_says_over_http(autojump_clock, path, body, without):
    async with world(WorkerOptions(skip_tokenizer_init=False)) as w:
        grpc, http = await w.ask(path, body), await w.worker.ask(body, path, method="GET" if body is None else "POST")
    assert grpc.status == http.status == 200
    try:
        said = json.loads(http.body)
    except ValueError:
        assert grpc.body == http.body
        return
    left = {name: value for name, value in said.items() if name not in without}
    assert json.loads(grpc.body) == left
    assert list(json.loads(grpc.body)) == list(left)


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/v1/chat/completions", {}, 501, "/v1/chat/completions"),
        ("/open_session", {}, 501, "/open_session"),
        ("/start_profile", {"num_steps": 3}, 400, "num_steps"),
        ("/update_weights_from_disk", {"model_path": "a", "abort_all_requests": True}, 400, "abort_all_requests"),
        ("/v1/loads?include=core", None, 400, "include"),
        ("/generate", {**IDS, "extra_key": "k"}, 400, "extra_key"),
        ("/generate", {**IDS, "image_data": "u"}, 400, "image_inputs"),
    ],
    ids=str,
)
async def test_what_has_no_place_in_a_message_is_refused_by_name_or_sent_over_http(
    autojump_clock, path, body, status, named
):
    async with world() as w:
        answer = await w.ask(path, body)
        assert answer.status == status
        assert named in answer.body.decode()
    async with world(http_fallback=True) as w:
        answer = await w.ask(path, body)
        assert named not in answer.body.decode() or answer.status == 404
        assert w.worker.requests[-1].request.target == path


async def test_a_fallback_that_breaks_off_breaks_off_here(autojump_clock):
    """The engine's HTTP answer is cut: nobody may take what came for the whole."""
    async with world(plan=struck(faults.at_token(3), faults.CLOSE), http_fallback=True) as w:
        with pytest.raises(ConnectionBroken):
            await w.ask("/generate", {**IDS, "stream": True, "extra_key": "k"})
