"""The methods of SGLang 0.5.23's native service that are called here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from dyn_relay.grpc import sglang_pb2 as pb

SERVICE = "sglang.runtime.v1.SglangService"

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Q, R]):
    """One method: its path on the wire and its messages. `streams`: it answers with any number of them."""

    path: str
    request: type[Q]
    response: type[R]
    streams: bool = False


def _method(name: str, request: type[Q], response: type[R], *, streams: bool = False) -> Method[Q, R]:
    return Method(f"/{SERVICE}/{name}", request, response, streams)


GENERATE = _method("Generate", pb.GenerateRequest, pb.GenerateResponse, streams=True)
TEXT_GENERATE = _method("TextGenerate", pb.TextGenerateRequest, pb.TextGenerateResponse, streams=True)
ABORT = _method("Abort", pb.AbortRequest, pb.AbortResponse)
HEALTH_CHECK = _method("HealthCheck", pb.HealthCheckRequest, pb.HealthCheckResponse)
WATCH_ENGINE_STATE = _method("WatchEngineState", pb.WatchEngineStateRequest, pb.EngineStateSnapshot, streams=True)
GET_MODEL_INFO = _method("GetModelInfo", pb.GetModelInfoRequest, pb.GetModelInfoResponse)
GET_SERVER_INFO = _method("GetServerInfo", pb.GetServerInfoRequest, pb.GetServerInfoResponse)
GET_LOAD = _method("GetLoad", pb.GetLoadRequest, pb.GetLoadResponse)
LIST_MODELS = _method("ListModels", pb.ListModelsRequest, pb.ListModelsResponse)
TOKENIZE = _method("Tokenize", pb.TokenizeRequest, pb.TokenizeResponse)
DETOKENIZE = _method("Detokenize", pb.DetokenizeRequest, pb.DetokenizeResponse)
FLUSH_CACHE = _method("FlushCache", pb.FlushCacheRequest, pb.FlushCacheResponse)
PAUSE_GENERATION = _method("PauseGeneration", pb.PauseGenerationRequest, pb.PauseGenerationResponse)
CONTINUE_GENERATION = _method("ContinueGeneration", pb.ContinueGenerationRequest, pb.ContinueGenerationResponse)
START_PROFILE = _method("StartProfile", pb.StartProfileRequest, pb.StartProfileResponse)
STOP_PROFILE = _method("StopProfile", pb.StopProfileRequest, pb.StopProfileResponse)
UPDATE_WEIGHTS_FROM_DISK = _method("UpdateWeightsFromDisk", pb.UpdateWeightsRequest, pb.UpdateWeightsResponse)
