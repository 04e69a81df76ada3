"""Health and information routes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dyn_testkit.contract.subject import Subject
from dyn_testkit.contract.table import Inapplicable, check, equal, expect

_MODEL_KEYS = (
    "model_path",
    "served_model_name",
    "tokenizer_path",
    "is_generation",
    "preferred_sampling_params",
    "weight_version",
)
_SERVER_KEYS = ("model_path", "skip_tokenizer_init", "internal_states", "version", "max_req_input_len", "kv_events")
_LOAD_KEYS = ("dp_rank", "num_running_reqs", "num_waiting_reqs", "max_running_requests", "token_usage")
_CARD_KEYS = ("id", "object", "created", "owned_by", "root", "parent", "max_model_len")


async def _empty_ok(worker: Subject, path: str) -> None:
    response = (await worker.ask(path)).response
    equal("status", response.status, 200)
    equal("body", response.body, b"")


async def _object(worker: Subject, path: str, keys: Iterable[str]) -> dict[str, Any]:
    exchange = await worker.ask(path)
    value = worker.value_of(exchange)
    equal("content type", exchange.response.header("content-type"), "application/json")
    expect(isinstance(value, dict), f"{path} is no JSON object")
    missing = [key for key in keys if key not in value]
    expect(not missing, f"{path} lacks {', '.join(missing)}")
    found: dict[str, Any] = value
    return found


@check("§1.3, http_server.py:721")
async def health(worker: Subject) -> None:
    """`GET /health` of a worker that works is 200 with an empty body."""
    await _empty_ok(worker, "/health")


@check("§1.3, http_server.py:721")
async def health_generate(worker: Subject) -> None:
    """`GET /health_generate` of a worker that works is 200 with an empty body."""
    await _empty_ok(worker, "/health_generate")


@check("§1.1, http_server.py:714")
async def ready(worker: Subject) -> None:
    """`GET /ready` of a worker that is not paused is 200 with an empty body."""
    await _empty_ok(worker, "/ready")


@check("§1.1, http_server.py:802")
async def model_info(worker: Subject) -> None:
    """`GET /model_info` is an object that names model, tokenizer, preferred sampling and weight version."""
    value = await _object(worker, "/model_info", _MODEL_KEYS)
    expect(isinstance(value["weight_version"], str), "weight_version is no string")
    expect(isinstance(value["preferred_sampling_params"], dict | None), "preferred_sampling_params: object or null")
    equal("/get_model_info", await _object(worker, "/get_model_info", ()), value)


@check("§1.1, http_server.py:853")
async def server_info(worker: Subject) -> None:
    """`GET /server_info` is an object of server arguments, with `version` and one internal state a DP rank."""
    value = await _object(worker, "/server_info", _SERVER_KEYS)
    expect(isinstance(value["internal_states"], list), "internal_states is no list")
    equal("internal_states, one a DP rank", len(value["internal_states"]), value.get("dp_size", 1))
    equal("keys of /get_server_info", set(await _object(worker, "/get_server_info", ())), set(value))


@check("§1.1, http_server.py:1993")
async def models(worker: Subject) -> None:
    """`GET /v1/models` is a list whose first card tells the context length as `max_model_len`."""
    value = await _object(worker, "/v1/models", ("object", "data"))
    equal("object", value["object"], "list")
    card = value["data"][0]
    missing = [key for key in _CARD_KEYS if key not in card]
    expect(not missing, f"the card lacks {', '.join(missing)}")
    expect(isinstance(card["max_model_len"], int), "max_model_len is no integer")
    equal("the card's object", card["object"], "model")


@check("§1.1, v1_loads.py:97")
async def loads(worker: Subject) -> None:
    """`GET /v1/loads` lists the load of each DP rank."""
    value = await _object(worker, "/v1/loads", ("timestamp", "version", "loads"))
    equal("loads, one a DP rank", len(value["loads"]), worker.facts.says("dp_size", 1))
    for load in value["loads"]:
        missing = [key for key in _LOAD_KEYS if key not in load]
        expect(not missing, f"a load lacks {', '.join(missing)}")


@check("§1.2, auth.py:98")
async def key_is_required(worker: Subject) -> None:
    """Without the key a request is 401 `{"error":"Unauthorized"}`; `/health` is open to everybody."""
    if worker.api_key is None:
        raise Inapplicable("no api_key= was given")
    for headers in ({"authorization": None}, {"authorization": "Bearer not-the-key"}):
        response = (await worker.ask("/generate", worker.body(1), headers=headers)).response
        equal("status", response.status, 401)
        equal("body", response.json(), {"error": "Unauthorized"})
    equal("status of /health", (await worker.ask("/health", headers={"authorization": None})).response.status, 200)
