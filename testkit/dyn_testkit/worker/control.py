"""Every route but `/generate`: health, infos, control."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from dyn_testkit.worker.texts import detokenize, tokenize
from dyn_testkit.worker.wire import TEXT, Reply, Request, json_reply

if TYPE_CHECKING:
    from dyn_testkit.worker.core import MockWorker

Route = Callable[["MockWorker", Request], Awaitable[Reply]]

EMPTY_OK = Reply(200, content_type=None)
_NO_INFOS = json_reply({"detail": "Not Found"}, 404)
#: Paths that never need a key.
_OPEN = ("/health", "/ready", "/metrics")
_CACHE_FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the "
    b"operation will not be performed.)\n"
)


async def _health(worker: MockWorker, request: Request) -> Reply:
    if worker.health_status is None:
        await trio.sleep_forever()
    if worker.options.health_delay:
        await trio.sleep(worker.options.health_delay)
    return Reply(worker.health_status or 503, content_type=None)


async def _ready(worker: MockWorker, request: Request) -> Reply:
    up = worker.health_status == 200 and not worker.scheduler.paused
    return Reply(200 if up else 503, content_type=None)


def _weight_version(worker: MockWorker) -> str | None:
    return worker.scheduler.weight_version if worker.options.tells_versions else None


async def _root(worker: MockWorker, request: Request) -> Reply:
    return json_reply("SGLang is running")


def model_info(worker: MockWorker) -> dict[str, Any]:
    """What `/model_info` tells."""
    return {
        "model_path": worker.model_path,
        "served_model_name": worker.model_path,
        "tokenizer_path": worker.options.model_path,
        "is_generation": True,
        "preferred_sampling_params": worker.options.preferred_sampling_params,
        "weight_version": _weight_version(worker),
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": worker.options.disaggregation,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "mock",
        "architectures": ["MockForCausalLM"],
    }


async def _model_info(worker: MockWorker, request: Request) -> Reply:
    return json_reply(model_info(worker)) if worker.options.infos else _NO_INFOS


def _server_args(worker: MockWorker) -> dict[str, Any]:
    options = worker.options
    return {
        "model_path": worker.model_path,
        "tokenizer_path": options.model_path,
        "skip_tokenizer_init": options.skip_tokenizer_init,
        "context_length": None,
        "max_running_requests": options.max_running_requests,
        "max_queued_requests": options.max_queued_requests,
        "dp_size": options.dp_size,
        "host": worker.host,
        "port": worker.port,
        "served_model_name": worker.model_path,
        "weight_version": _weight_version(worker),
        "preferred_sampling_params": options.preferred_sampling_params,
        "allow_auto_truncate": False,
        "stream_interval": options.stream_interval,
        "incremental_streaming_output": options.dialect != "cumulative",
        "enable_return_routed_experts": options.routed_experts,
        "enable_return_indexer_topk": options.indexer_topk,
        "enable_deterministic_inference": options.deterministic,
        "load_balance_method": "follow_bootstrap_room" if options.disaggregation == "prefill" else "round_robin",
        "disaggregation_mode": options.disaggregation,
        "disaggregation_bootstrap_port": worker.bootstrap_port,
        "random_seed": worker.seed,
    }


def server_info(worker: MockWorker) -> dict[str, Any]:
    """What `/server_info` tells on any wire."""
    options = worker.options
    return _server_args(worker) | {
        "launch_command": f"--model-path {options.model_path} --host {worker.host} --port {worker.port}",
        "status": "ready",
        "max_total_num_tokens": 1 << 20,
        "max_req_input_len": options.model.max_input,
        "kv_events": worker.kv_publisher.descriptor() if worker.kv_publisher else None,
    }


async def _server_info(worker: MockWorker, request: Request) -> Reply:
    options = worker.options
    if not options.infos:
        return _NO_INFOS
    more = {
        "startup_time": {"scheduler_e2e": 1.0 + worker.seed / 2**32},
        "internal_states": [_server_args(worker)] * options.dp_size,
        "version": options.version,
        "frontend": "python",
    }
    return json_reply(server_info(worker) | more)


def loads(worker: MockWorker) -> list[dict[str, Any]]:
    """The load of each rank."""
    scheduler = worker.scheduler
    load = {
        "timestamp": worker.renderer.wall() if worker.health_status is not None else 0.0,  # its last step's
        "dp_rank": 0,
        "num_running_reqs": scheduler.running,
        "num_waiting_reqs": len(scheduler.waiting),
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": sum(len(live.job.prompt) + len(live.ids) for live in scheduler.live.values()),
        "num_total_tokens": 0,
        "num_active_tokens": 0,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": 1 << 20,
        "max_running_requests": worker.options.max_running_requests or 4096,
        "token_usage": 0.0,
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "total_prefill_uncached_tokens": 0,
        "total_prefill_busy_us": 0,
        "decode_moments": [0.0] * 6,
    }
    return [load | {"dp_rank": rank} for rank in range(worker.options.dp_size)]


async def _loads(worker: MockWorker, request: Request) -> Reply:
    return json_reply(
        {
            "timestamp": datetime.fromtimestamp(worker.renderer.wall(), UTC).isoformat(),
            "version": worker.options.version,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": loads(worker),
        }
    )


async def _models(worker: MockWorker, request: Request) -> Reply:
    card = {
        "id": worker.model_path,
        "object": "model",
        "created": int(worker.renderer.wall()),
        "owned_by": "sglang",
        "root": worker.model_path,
        "parent": None,
        "max_model_len": worker.options.model.context_length,
    }
    return json_reply({"object": "list", "data": [card]})


async def _flush(worker: MockWorker, request: Request) -> Reply:
    if worker.scheduler.flush():
        return Reply(200, _CACHE_FLUSHED, content_type=None)
    return Reply(400, b"Flush cache failed.\n", content_type=None)


async def _abort(worker: MockWorker, request: Request) -> Reply:
    body = _object(request)
    worker.record_abort(body)
    worker.scheduler.abort(str(body.get("rid") or ""), everything=bool(body.get("abort_all")))
    return EMPTY_OK


async def _pause(worker: MockWorker, request: Request) -> Reply:
    worker.scheduler.pause(_object(request).get("mode", "abort"))
    return json_reply({"message": "Generation paused successfully.", "status": "ok"})


async def _continue(worker: MockWorker, request: Request) -> Reply:
    worker.scheduler.resume()
    return json_reply({"message": "Generation continued successfully.", "status": "ok"})


async def _update_weight_version(worker: MockWorker, request: Request) -> Reply:
    body = _object(request)
    version = str(body.get("new_version"))
    if body.get("abort_all_requests", True):
        worker.scheduler.abort("", everything=True)
    worker.scheduler.weight_version = version
    message = f"Weight version updated to {version}"
    return json_reply({"success": True, "message": message, "new_version": version})


async def _update_weights(worker: MockWorker, request: Request) -> Reply:
    body = _object(request)
    worker.update_weights(str(body.get("model_path", worker.model_path)), str(body.get("weight_version") or ""))
    return json_reply({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})


async def _tokenize(worker: MockWorker, request: Request) -> Reply:
    return tokenize(worker.options, request)


async def _detokenize(worker: MockWorker, request: Request) -> Reply:
    return detokenize(worker.options, request)


def _text(body: bytes) -> Route:
    async def route(worker: MockWorker, request: Request) -> Reply:
        return Reply(200, body, TEXT)

    return route


def _object(request: Request) -> dict[str, Any]:
    """The request's JSON object; anything else counts as an empty one."""
    try:
        value = msgspec.json.decode(request.body) if request.body else {}
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


#: path -> (methods, needs the admin's key, handler)
ROUTES: dict[str, tuple[tuple[str, ...], bool, Route]] = {
    "/health": (("GET",), False, _health),
    "/health_generate": (("GET",), False, _health),
    "/ready": (("GET",), False, _ready),
    "/ping": (("GET",), False, _health),
    "/": (("GET",), False, _root),
    "/model_info": (("GET",), False, _model_info),
    "/get_model_info": (("GET",), False, _model_info),
    "/server_info": (("GET",), False, _server_info),
    "/get_server_info": (("GET",), False, _server_info),
    "/v1/loads": (("GET",), False, _loads),
    "/v1/models": (("GET",), False, _models),
    "/tokenize": (("POST",), False, _tokenize),
    "/v1/tokenize": (("POST",), False, _tokenize),
    "/detokenize": (("POST",), False, _detokenize),
    "/v1/detokenize": (("POST",), False, _detokenize),
    "/flush_cache": (("GET", "POST"), True, _flush),
    "/abort_request": (("POST",), True, _abort),
    "/pause_generation": (("POST",), True, _pause),
    "/continue_generation": (("POST",), True, _continue),
    "/update_weight_version": (("POST",), True, _update_weight_version),
    "/update_weights_from_disk": (("POST",), True, _update_weights),
    "/start_profile": (("GET", "POST"), True, _text(b"Start profiling.\n")),
    "/stop_profile": (("GET", "POST"), True, _text(b"Stop profiling. This will take some time.\n")),
}
GENERATE_METHODS = ("PUT", "POST")


def authorize(worker: MockWorker, request: Request) -> Reply | None:
    """The 401 that a request gets, or None if it may pass."""
    options = worker.options
    admin = request.path in ROUTES and ROUTES[request.path][1]
    key = options.admin_api_key if admin and options.admin_api_key is not None else options.api_key
    if key is None or request.method == "OPTIONS" or request.path.startswith(_OPEN):
        return None
    scheme, _, given = (request.header(b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer" and hmac.compare_digest(given, key.encode()):
        return None
    return json_reply({"error": "Unauthorized"}, 401)


def _methods(path: str) -> tuple[str, ...] | None:
    if path == "/generate":
        return GENERATE_METHODS
    return ROUTES[path][0] if path in ROUTES else None


def method_refused(request: Request) -> Reply | None:
    """The 307, 404 or 405 that a request gets, or None if there is a route for it."""
    methods = _methods(request.path)
    if methods is None:
        path, _, query = request.target.partition("?")
        if _methods(path.rstrip("/")) is None:
            return json_reply({"detail": "Not Found"}, 404)
        target = path.rstrip("/").encode() + (b"?" + query.encode() if query else b"")
        location = b"http://" + (request.header(b"host") or b"") + target
        return Reply(307, content_type=None, late_headers=((b"location", location),))
    if request.method in methods:
        return None
    refusal = json_reply({"detail": "Method Not Allowed"}, 405)
    return Reply(405, refusal.body, headers=((b"allow", ", ".join(methods).encode()),))
