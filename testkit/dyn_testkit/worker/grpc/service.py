"""SGLang's native service: which method does what. Messages and statuses are those of a live 0.5.23."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.methods import Method
from dyn_relay.grpc.status import Code
from dyn_testkit.grpc import Call, Route, Routes, Status, unary
from dyn_testkit.worker.control import loads, model_info, server_info
from dyn_testkit.worker.grpc.generate import generate
from dyn_testkit.worker.wire import Request

if TYPE_CHECKING:
    from dyn_testkit.worker.core import MockWorker

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

#: `/model_info` tells these, too; nothing that gRPC asks for does.
_HTTP_ONLY = ("preferred_sampling_params", "has_image_understanding", "has_audio_understanding")
_PAUSE_MODES = ("abort", "retract", "in_place")


def routes(worker: MockWorker, index: int) -> Routes:
    """The methods of a worker, on its so many-th connection.

    Calls are recorded under their own paths; generations and aborts as HTTP would have had them.
    """

    def one(method: Method[Q, R], answer: Callable[[MockWorker, Q], Awaitable[R]]) -> tuple[str, Route]:
        async def recorded(request: Q) -> R:
            worker.record(_as_http(method, request), index)
            return await answer(worker, request)

        return unary(method, recorded)

    return {
        methods.GENERATE.path: Route(pb.GenerateRequest, partial(generate, worker, index)),
        methods.TEXT_GENERATE.path: Route(pb.TextGenerateRequest, partial(generate, worker, index)),
        methods.WATCH_ENGINE_STATE.path: Route(pb.WatchEngineStateRequest, partial(_watch, worker)),
    } | dict(
        (
            one(methods.HEALTH_CHECK, _health),
            one(methods.GET_MODEL_INFO, _model_info),
            one(methods.GET_SERVER_INFO, _server_info),
            one(methods.GET_LOAD, _load),
            one(methods.LIST_MODELS, _models),
            one(methods.TOKENIZE, _tokenize),
            one(methods.DETOKENIZE, _detokenize),
            one(methods.ABORT, _abort),
            one(methods.FLUSH_CACHE, _flush),
            one(methods.PAUSE_GENERATION, _pause),
            one(methods.CONTINUE_GENERATION, _continue),
            one(methods.START_PROFILE, _start_profile),
            one(methods.STOP_PROFILE, _stop_profile),
            one(methods.UPDATE_WEIGHTS_FROM_DISK, _update_weights),
        )
    )


def _as_http(method: Method[Any, Any], request: Message) -> Request:
    if isinstance(request, pb.AbortRequest):
        return Request("POST", "/abort_request", (), json.dumps(_abort_body(request)).encode())
    return Request("POST", method.path, (), request.SerializeToString())


def _abort_body(request: pb.AbortRequest) -> dict[str, Any]:
    return {"rid": request.rid, "abort_all": request.abort_all}


# What it is -----------------------------------------------------------------------------------------------------------


def _healthy(worker: MockWorker) -> bool:
    """A flag: nothing is run to find out, so what hangs is healthy."""
    return worker.health_status in (200, None)


async def _health(worker: MockWorker, request: pb.HealthCheckRequest) -> pb.HealthCheckResponse:
    return pb.HealthCheckResponse(healthy=_healthy(worker))


async def _model_info(worker: MockWorker, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
    told = {name: value for name, value in model_info(worker).items() if name not in _HTTP_ONLY}
    return pb.GetModelInfoResponse(model_path=worker.model_path, json_info=json.dumps(told))


async def _server_info(worker: MockWorker, request: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
    return pb.GetServerInfoResponse(json_info=json.dumps(server_info(worker) | {"grpc_features": []}))


async def _load(worker: MockWorker, request: pb.GetLoadRequest) -> pb.GetLoadResponse:
    rank = request.dp_rank if request.HasField("dp_rank") else None
    return pb.GetLoadResponse(json_info=json.dumps([load for load in loads(worker) if rank in (None, load["dp_rank"])]))


async def _models(worker: MockWorker, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
    limit = worker.options.model.context_length
    card = pb.ModelCard(id=worker.model_path, root=worker.model_path, max_model_len=limit)
    return pb.ListModelsResponse(models=[card])


async def _watch(worker: MockWorker, call: Call, request: pb.WatchEngineStateRequest) -> None:
    instance = int((worker.options.epoch + worker.born) * 1e9)
    revision, told = 0, b""
    while True:
        state = pb.EngineStateSnapshot(
            instance_id=instance,
            healthy=_healthy(worker),
            is_pause=worker.scheduler.paused and not worker.frozen,
            model_info=await _model_info(worker, pb.GetModelInfoRequest()),
            server_info=await _server_info(worker, pb.GetServerInfoRequest()),
        )
        if state.SerializeToString() != told:
            told, revision = state.SerializeToString(), revision + 1
            state.revision = revision
            await call.send(state)
        await worker.scheduler.wait_changed()


# What it does ---------------------------------------------------------------------------------------------------------


async def _tokenize(worker: MockWorker, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
    options = worker.options
    if options.skip_tokenizer_init:
        return pb.TokenizeResponse()
    special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    tokens = [*(options.tokenizer.prefix if special else ()), *options.tokenizer.encode(request.text)]
    return pb.TokenizeResponse(
        tokens=tokens, count=len(tokens), max_model_len=options.model.context_length, input_text=request.text
    )


async def _detokenize(worker: MockWorker, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
    if any(token < 0 for token in request.tokens):
        raise Status(Code.INVALID_ARGUMENT, "Detokenize tokens must be non-negative")
    if worker.options.skip_tokenizer_init:
        return pb.DetokenizeResponse()
    return pb.DetokenizeResponse(text=worker.options.tokenizer.decode(request.tokens, True))


async def _abort(worker: MockWorker, request: pb.AbortRequest) -> pb.AbortResponse:
    worker.record_abort(_abort_body(request))
    worker.channels.abort(worker.scheduler, request.rid, everything=request.abort_all)
    return pb.AbortResponse(success=True)


async def _flush(worker: MockWorker, request: pb.FlushCacheRequest) -> pb.FlushCacheResponse:
    return pb.FlushCacheResponse(success=worker.scheduler.flush(), message="Cache flushed.")


async def _pause(worker: MockWorker, request: pb.PauseGenerationRequest) -> pb.PauseGenerationResponse:
    if request.mode in _PAUSE_MODES:
        worker.scheduler.pause(request.mode)
    else:
        worker.doom()  # the scheduler does not know it, and dies of it
    return pb.PauseGenerationResponse(message=f"Generation paused (mode={request.mode}).")


async def _continue(worker: MockWorker, request: pb.ContinueGenerationRequest) -> pb.ContinueGenerationResponse:
    worker.scheduler.resume()
    return pb.ContinueGenerationResponse(message="Generation continued.")


async def _start_profile(worker: MockWorker, request: pb.StartProfileRequest) -> pb.StartProfileResponse:
    worker.profiling = True
    return pb.StartProfileResponse(message="Profiling started.")


async def _stop_profile(worker: MockWorker, request: pb.StopProfileRequest) -> pb.StopProfileResponse:
    if not worker.profiling:
        raise Status(Code.INTERNAL, "Profiling is not in progress. Call /start_profile first.")
    worker.profiling = False
    return pb.StopProfileResponse(message="Profiling stopped.")


async def _update_weights(worker: MockWorker, request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
    worker.update_weights(request.model_path)
    return pb.UpdateWeightsResponse(success=True, message="Succeeded to update model weights.")
