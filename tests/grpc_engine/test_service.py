"""The other methods: what HTTP tells, too, and what gRPC alone does. Expected values are those of a live 0.5.23."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.methods import Method
from dyn_relay.grpc.status import Code
from dyn_testkit.grpc.client import Answer, ask, open_client
from dyn_testkit.tokenizer import BYTE_LEVEL
from dyn_testkit.worker import MockWorker, WorkerOptions
from tests.grpc_engine.engine_kit import PROMPT, engine, generate, wanted

TEXT = {"skip_tokenizer_init": False, "tokenizer": BYTE_LEVEL}


async def said(worker: MockWorker, method: Method[Any, Any], **fields: Any) -> Any:
    """The one message of a call."""
    [message] = (await call(worker, method, **fields)).messages
    return message


async def call(worker: MockWorker, method: Method[Any, Any], **fields: Any) -> Answer[Any]:
    return await ask(worker.network, worker.grpc_url, method, method.request(**fields))


async def got(worker: MockWorker, path: str) -> dict[str, Any]:
    answer: dict[str, Any] = (await worker.ask(None, path)).json()
    return answer


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (None, True)])
async def test_health_is_a_flag(status: int | None, healthy: bool, autojump_clock: MockClock) -> None:
    async with engine(health_delay=10.0) as worker:
        worker.health_status = status
        assert (await said(worker, methods.HEALTH_CHECK)).healthy is healthy
        assert trio.current_time() == 0
        assert worker.live == 0


async def test_model_info_is_that_of_http_but_for_three(autojump_clock: MockClock) -> None:
    async with engine(model_path="a/model", weight_version="v7") as worker:
        told, http = await said(worker, methods.GET_MODEL_INFO), await got(worker, "/model_info")
    grpc = json.loads(told.json_info)
    assert told.model_path == grpc["model_path"] == "a/model"
    assert grpc["weight_version"] == "v7"
    missing = ["preferred_sampling_params", "has_image_understanding", "has_audio_understanding"]
    assert [name for name in http if name not in grpc] == missing
    assert list(grpc.items()) == [item for item in http.items() if item[0] not in missing]


async def test_server_info_tells_no_version(autojump_clock: MockClock) -> None:
    async with engine(dp_size=2) as worker:
        told, http = await said(worker, methods.GET_SERVER_INFO), await got(worker, "/server_info")
    grpc = json.loads(told.json_info)
    assert [name for name in http if name not in grpc] == ["startup_time", "internal_states", "version", "frontend"]
    assert [name for name in grpc if name not in http] == ["grpc_features"]
    assert grpc["grpc_features"] == []
    assert all(http[name] == value for name, value in grpc.items() if name != "grpc_features")
    assert grpc["dp_size"] == 2


async def test_loads(autojump_clock: MockClock) -> None:
    async with engine(dp_size=2, tick=1.0) as worker, open_client(worker.network, worker.grpc_url) as client:
        running = await client.call(methods.GENERATE, wanted(50))
        await running.reaches(1)
        loads = json.loads((await said(worker, methods.GET_LOAD)).json_info)
        assert [load["dp_rank"] for load in loads] == [0, 1]
        assert loads[0]["num_running_reqs"] == 1
        assert loads == (await got(worker, "/v1/loads"))["loads"]
        assert json.loads((await said(worker, methods.GET_LOAD, dp_rank=1)).json_info) == loads[1:]
        assert (await said(worker, methods.GET_LOAD, dp_rank=5)).json_info == "[]"


async def test_models(autojump_clock: MockClock) -> None:
    async with engine(model_path="a/model") as worker:
        [card] = (await said(worker, methods.LIST_MODELS)).models
    assert (card.id, card.root, card.HasField("parent"), card.max_model_len) == ("a/model", "a/model", False, 2000)


async def test_texts_and_tokens(autojump_clock: MockClock) -> None:
    async with engine(**TEXT) as worker:
        told = await said(worker, methods.TOKENIZE, text="Hello café")
        http = (await worker.ask({"prompt": "Hello café"}, "/tokenize")).json()
        assert {"tokens": list(told.tokens), "count": told.count, "max_model_len": told.max_model_len} == http
        assert told.input_text == "Hello café"
        assert (await said(worker, methods.DETOKENIZE, tokens=told.tokens)).text == "Hello café"
        assert (await said(worker, methods.DETOKENIZE)).text == ""
        refused = await call(worker, methods.DETOKENIZE, tokens=[5, -1])
        assert (refused.status, refused.message) == (3, "Detokenize tokens must be non-negative")
    async with engine() as worker:
        assert await said(worker, methods.TOKENIZE, text="x") == pb.TokenizeResponse()
        assert await said(worker, methods.DETOKENIZE, tokens=[5]) == pb.DetokenizeResponse()


async def test_special_tokens_are_added_unless_told_not_to(autojump_clock: MockClock) -> None:
    from dyn_testkit.tokenizer import TOKENIZERS

    [tokenizer, *_] = [one for one in TOKENIZERS.values() if one.prefix]
    async with engine(skip_tokenizer_init=False, tokenizer=tokenizer) as worker:
        many = [list((await said(worker, methods.TOKENIZE, text="a", **more)).tokens) for more in SPECIAL]
    assert many[0] == many[1] == [*tokenizer.prefix, *many[2]]


SPECIAL: list[dict[str, bool]] = [{}, {"add_special_tokens": True}, {"add_special_tokens": False}]


async def test_flushing(autojump_clock: MockClock) -> None:
    async with engine(tick=1.0) as worker, open_client(worker.network, worker.grpc_url) as client:
        running = await client.call(methods.GENERATE, wanted(5))
        await running.reaches(1)
        busy = await said(worker, methods.FLUSH_CACHE)
        await running.done()
        again = await generate(worker, wanted(1))
        idle = await said(worker, methods.FLUSH_CACHE)
        anew = await generate(worker, wanted(1))
    assert [(one.success, one.message) for one in (busy, idle)] == [(False, "Cache flushed."), (True, "Cache flushed.")]
    assert [one.messages[0].meta_info["cached_tokens"] for one in (again, anew)] == ["2", "0"]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_keeps_what_runs(mode: str, autojump_clock: MockClock) -> None:
    async with engine(tick=1.0) as worker, open_client(worker.network, worker.grpc_url) as client:
        running = await client.call(methods.GENERATE, wanted(6))
        await running.reaches(2)
        assert (await said(worker, methods.PAUSE_GENERATION, mode=mode)).message == f"Generation paused (mode={mode})."
        later = await client.call(methods.GENERATE, wanted(2))
        await trio.sleep(100)
        assert (len(running.messages), later.headers[":status"], later.messages) == (2, "200", [])
        assert (await said(worker, methods.HEALTH_CHECK)).healthy
        assert (await said(worker, methods.CONTINUE_GENERATION)).message == "Generation continued."
        await running.done()
        await later.done()
        assert (running.status, len(running.messages), later.status) == (0, 6, 0)


async def test_a_pause_that_aborts_leaves_a_last_message(autojump_clock: MockClock) -> None:
    async with engine(tick=1.0) as worker, open_client(worker.network, worker.grpc_url) as client:
        running = await client.call(methods.GENERATE, wanted(6))
        await running.reaches(2)
        await said(worker, methods.PAUSE_GENERATION, mode="abort")
        await running.done()
        assert (running.status, running.messages[-1].finished) == (0, True)
        assert json.loads(running.messages[-1].meta_info["finish_reason"])["type"] == "abort"


@pytest.mark.parametrize("mode", ["never", ""])
async def test_a_pause_of_another_kind_is_granted_and_kills(mode: str, autojump_clock: MockClock) -> None:
    async with engine(death_delay=5.0) as worker:
        answer = await call(worker, methods.PAUSE_GENERATION, mode=mode)
        assert (answer.status, answer.messages[0].message) == (0, f"Generation paused (mode={mode}).")
        await trio.sleep(4)
        assert worker.alive
        await worker.dead()
        assert trio.current_time() == 5


async def test_profiling(autojump_clock: MockClock) -> None:
    async with engine() as worker:
        idle = await call(worker, methods.STOP_PROFILE)
        words = [(await said(worker, methods.START_PROFILE)).message for _ in range(2)]
        words.append((await said(worker, methods.STOP_PROFILE)).message)
        over = await call(worker, methods.STOP_PROFILE)
    why = "Profiling is not in progress. Call /start_profile first."
    assert [(one.status, one.message) for one in (idle, over)] == [(Code.INTERNAL, why)] * 2
    assert words == ["Profiling started.", "Profiling started.", "Profiling stopped."]


async def test_other_weights(autojump_clock: MockClock) -> None:
    async with engine(weight_version="v1") as worker:
        told = await said(worker, methods.UPDATE_WEIGHTS_FROM_DISK, model_path="other")
        info = await said(worker, methods.GET_MODEL_INFO)
    assert (told.success, told.message) == (True, "Succeeded to update model weights.")
    assert (info.model_path, json.loads(info.json_info)["weight_version"]) == ("other", "v1")


async def test_a_watch_tells_of_each_change(autojump_clock: MockClock) -> None:
    async with engine() as worker, open_client(worker.network, worker.grpc_url) as client:
        await trio.sleep(7)
        watch = await client.call(methods.WATCH_ENGINE_STATE, pb.WatchEngineStateRequest())
        await watch.reaches(1)
        await generate(worker, wanted(3))  # nothing has changed
        await wait_all_tasks_blocked()
        assert len(watch.frames) == 1
        await said(worker, methods.PAUSE_GENERATION, mode="in_place")
        await watch.reaches(2)
        await said(worker, methods.CONTINUE_GENERATION)
        await watch.reaches(3)
        await said(worker, methods.UPDATE_WEIGHTS_FROM_DISK, model_path="other")
        await watch.reaches(4)
        states = watch.messages
        info = await said(worker, methods.GET_SERVER_INFO)
        worker.kill()
        await worker.restart()
        async with open_client(worker.network, worker.grpc_url) as other:
            anew = await other.call(methods.WATCH_ENGINE_STATE, pb.WatchEngineStateRequest())
            await anew.reaches(1)
    assert [one.revision for one in states] == [1, 2, 3, 4]
    assert [one.is_pause for one in states] == [False, True, False, False]
    assert [one.model_info.model_path for one in states] == ["mock/model"] * 3 + ["other"]
    assert states[-1].server_info == info
    assert {one.instance_id for one in states} == {1_800_000_000 * 10**9}
    assert anew.messages[0].instance_id == 1_800_000_007 * 10**9
    assert all(one.healthy for one in states)


async def test_what_nobody_serves(autojump_clock: MockClock) -> None:
    async with engine() as worker:
        for path in ("/sglang.runtime.v1.SglangService/Embed", "/grpc.health.v1.Health/Check"):
            answer = await call(worker, Method(path, pb.AbortRequest, pb.AbortResponse))
            assert (answer.status, answer.message) == (Code.UNIMPLEMENTED, "")


async def test_calls_are_on_record(autojump_clock: MockClock) -> None:
    async with engine() as worker:
        await said(worker, methods.GET_SERVER_INFO)
        await call(worker, methods.ABORT, rid="x")
        await generate(worker, wanted(1))
        await said(worker, methods.PAUSE_GENERATION, mode="in_place")
        paths = [recorded.path for recorded in worker.requests]
        assert (worker.aborts, worker.dialled) == ([{"rid": "x", "abort_all": False}], 4)
        assert worker.requests[1].json() == {"rid": "x", "abort_all": False}
        assert pb.PauseGenerationRequest.FromString(worker.requests[3].request.body).mode == "in_place"
    service = "/sglang.runtime.v1.SglangService/"
    assert paths == [f"{service}GetServerInfo", "/abort_request", "/generate", f"{service}PauseGeneration"]


async def test_a_worker_without_a_grpc_side_says_so() -> None:
    worker = MockWorker(None, options=WorkerOptions())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it has no gRPC side"):
        _ = worker.grpc_url


async def test_a_death_takes_both_sides_and_a_restart_brings_them_back(autojump_clock: MockClock) -> None:
    async with engine(tick=1.0) as worker, open_client(worker.network, worker.grpc_url) as client:
        running = await client.call(methods.GENERATE, wanted(50))
        await running.reaches(1)
        url = worker.grpc_url
        worker.kill()
        await running.done()
        assert running.ended == "eof"
        await worker.restart()
        assert worker.grpc_url == url
        assert (await generate(worker, wanted(2))).status == 0
        assert (await worker.ask({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}})).status == 200


@pytest.mark.parametrize("taken", [1, 2])
async def test_a_port_that_is_taken(taken: int) -> None:
    from dyn_testkit.simnet import SimNetwork

    network = SimNetwork()
    await network.listen("worker", taken)
    with pytest.raises(OSError, match="in use" if taken == 1 else "grpc port 2: .*in use"):
        async with MockWorker.serve(network, "worker", 1, WorkerOptions(grpc_port=2)):
            pass
    if taken == 2:
        await network.listen("worker", 1)  # it did not keep the other one
