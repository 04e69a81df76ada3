"""`/tokenize` and `/detokenize`.

SGLang 0.5.23: `entrypoints/openai/serving_tokenize.py`, the types in `entrypoints/openai/protocol.py`, and
`validate_json_request` in `entrypoints/http_server.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dyn_testkit.worker.contract import (
    Refused,
    bad_request_object,
    error_object,
    read_json,
    too_deep,
    validation_error,
)
from dyn_testkit.worker.options import WorkerOptions
from dyn_testkit.worker.schema import Field, boolean, detail, integer, list_of
from dyn_testkit.worker.wire import Reply, Request, json_reply

_TOKENIZE = {
    "model": Field(("str",), None, null=False),
    "prompt": Field((list_of("str"), "str"), None),
    "add_special_tokens": Field(("bool",), None, null=False),
}
_DETOKENIZE = {
    "model": Field(("str",), None, null=False),
    "tokens": Field((list_of("int"), list_of("int", 2)), None, null=False),
    "skip_special_tokens": Field(("bool",), None, null=False),
}


def tokenize(options: WorkerOptions, request: Request) -> Reply:
    """The answer to `{"prompt": text or list of texts}`; there is no chat template for `messages`."""
    endpoint = f'File "http_server.py", line 1906, in openai_v1_tokenize\n    POST {request.path}'
    try:
        body = _object(request, endpoint, _prompt_problems)
    except Refused as refused:
        return refused.reply
    prompt = body.get("prompt")
    if prompt is None:
        return error_object(400, "Cannot use chat template functions", "BadRequestError")
    if options.skip_tokenizer_init and prompt != []:
        return _internal("tokenization", "'NoneType' object has no attribute 'encode'")
    tokenizer = options.tokenizer
    prefix = tokenizer.prefix if boolean(body.get("add_special_tokens", True)) else ()
    try:
        many = [[*prefix, *tokenizer.encode(text)] for text in ([prompt] if isinstance(prompt, str) else prompt)]
    except ValueError as exc:
        return error_object(400, str(exc), "BadRequestError")
    tokens, count = (many[0], len(many[0])) if isinstance(prompt, str) else (many, [len(ids) for ids in many])
    limit = -1 if options.skip_tokenizer_init else options.model.context_length
    return json_reply({"tokens": tokens, "count": count, "max_model_len": limit})


def detokenize(options: WorkerOptions, request: Request) -> Reply:
    """The answer to `{"tokens": ids or list of ids, "skip_special_tokens": true}`; no ids need no tokenizer."""
    endpoint = f'File "http_server.py", line 1924, in openai_v1_detokenize\n    POST {request.path}'
    try:
        body = _object(request, endpoint, _tokens_problems)
    except Refused as refused:
        return refused.reply
    tokens: list[Any] = body["tokens"]
    if not tokens:
        return json_reply({"text": ""})
    if options.skip_tokenizer_init:
        why = "'NoneType' object has no attribute 'decode'. Input tokens might be invalid for the model."
        return error_object(400, f"Error decoding tokens: {why}", "DecodeError")
    nested = isinstance(tokens[0], list)
    many = [[integer(token) for token in ids] for ids in (tokens if nested else [tokens])]
    skip = boolean(body.get("skip_special_tokens", True))
    try:
        texts = [options.tokenizer.decode(ids, skip) for ids in many]
    except OverflowError as exc:
        return _internal("detokenization", str(exc))
    return json_reply({"text": texts if nested else texts[0]})


def _internal(what: str, why: str) -> Reply:
    return error_object(500, f"Internal server error during {what}: {why}", "InternalServerError")


def _prompt_problems(body: Mapping[str, Any]) -> list[str]:
    found = _problems(body, _TOKENIZE)
    if not found and (body.get("prompt") is None) == (body.get("messages") is None):
        problem = "Exactly one of 'prompt' or 'messages' must be provided."
        error = {"ctx": {"error": ValueError(problem)}}
        found.append(detail("value_error", ("body",), f"Value error, {problem}", body, **error))
    return found


def _tokens_problems(body: Mapping[str, Any]) -> list[str]:
    missing = [] if "tokens" in body else [detail("missing", ("body", "tokens"), "Field required", body)]
    return missing + _problems(body, _DETOKENIZE)


def _problems(body: Mapping[str, Any], fields: Mapping[str, Field]) -> list[str]:
    """What FastAPI cannot read, one detail a fault."""
    return [problem for name, field in fields.items() if name in body for problem in field.problems(name, body[name])]


def _object(request: Request, endpoint: str, problems: Callable[[Mapping[str, Any]], list[str]]) -> dict[str, Any]:
    """The JSON object in a request that has no problems. Raises `Refused`."""
    if (request.header(b"content-type") or b"").lower().partition(b";")[0] != b"application/json":
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        wrong = {"loc": ["header", "content-type"], "msg": message, "type": "value_error"}
        raise Refused(bad_request_object(f"1 validation error:\n  {wrong} [{wrong}]"))
    if not request.body:
        raise validation_error(detail("missing", ("body",), "Field required", None), endpoint=endpoint)
    try:
        value = read_json(request.body, endpoint)
        if not isinstance(value, dict):
            message = "Input should be a valid dictionary or object to extract fields from"
            raise validation_error(detail("model_attributes_type", ("body",), message, value), endpoint=endpoint)
        found = problems(value)
    except RecursionError as exc:
        raise too_deep(endpoint) from exc
    if found:
        raise validation_error(*found, endpoint=endpoint)
    return value
