"""The language of `/generate` bodies, and SGLang's four shapes of refusal."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from dyn_testkit.worker.wire import Reply, Request, json_reply


class Refused(Exception):
    """The body is not in the language: an HTTP error, also for streams."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.body.decode())
        self.reply = reply


class Invalid(Exception):
    """A well-formed request asks for something impossible (the tokenizer manager's `ValueError`): status 400."""


class Aborted(Exception):
    """The scheduler drops the request. `echo`: the short event of requests that never ran, without usage."""

    def __init__(
        self, message: str, status_code: int | None, err_type: str | None = None, *, echo: bool = False
    ) -> None:
        super().__init__(message)
        self.finish: dict[str, Any] = {"type": "abort", "message": message}
        if echo:
            self.finish = {"type": "abort", "status_code": status_code, "message": message}
        else:
            self.finish |= {"status_code": status_code, "err_type": err_type}
        self.message = message
        self.status_code = status_code
        self.echo = echo
        #: The scheduler found the request itself wrong.
        self.refused = err_type is not None


class Poisoned(Exception):
    """The request kills the engine."""


def validation_error(*details: str) -> Refused:
    """FastAPI's refusal, as SGLang words it."""
    count = "1 validation error" if len(details) == 1 else f"{len(details)} validation errors"
    listed = "".join(f"\n  {detail}" for detail in details)
    where = f'\n\n  File "http_server.py", line 928, in generate_request\n    POST /generate [{", ".join(details)}]'
    return Refused(bad_request_object(f"{count}:{listed}{where}"))


def bad_request_object(message: str) -> Reply:
    """The error object of FastAPI's refusals."""
    return json_reply({"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}, 400)


def error_object(status: int, message: str) -> Reply:
    """The error object of scheduler aborts (an `HTTPException`)."""
    return json_reply(
        {"object": "error", "message": message, "type": str(status), "param": None, "code": status}, status
    )


def contract_error(message: str) -> Refused:
    """The contract's refusal: a bare string."""
    return Refused(json_reply({"error": message}, 400))


def value_error(message: str) -> Reply:
    """A `ValueError` of a unary request."""
    return json_reply({"error": {"message": message}}, 400)


_INTEGER, _NUMBER, _BOOLEAN, _STRING, _ANY = "i64", "f64", "a boolean", "a string", ""

#: Sampling keys in SGLang's order, with the type that the contract wants (an empty name: not checked here).
SAMPLING_KEYS = {
    "max_new_tokens": _INTEGER,
    "stop": _ANY,
    "stop_token_ids": _ANY,
    "stop_regex": _ANY,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _INTEGER,
    "min_p": _NUMBER,
    "frequency_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "min_new_tokens": _INTEGER,
    "n": _INTEGER,
    "json_schema": _STRING,
    "regex": _STRING,
    "ebnf": _STRING,
    "structural_tag": _STRING,
    "ignore_eos": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "spaces_between_special_tokens": _BOOLEAN,
    "no_stop_trim": _BOOLEAN,
    "stream_interval": _INTEGER,
    "logit_bias": _ANY,
    "sampling_seed": _INTEGER,
    "custom_params": _ANY,
    "beam_width": _INTEGER,
    "watermark": _ANY,
    "choice": _ANY,
}
_TYPES: dict[str, tuple[type, ...]] = {
    _INTEGER: (int,),
    _NUMBER: (int, float),
    _BOOLEAN: (bool,),
    _STRING: (str,),
}
_TOP_LEVEL = {
    "stream": _BOOLEAN,
    "return_text_in_logprobs": _BOOLEAN,
    "return_prompt_token_ids": _BOOLEAN,
    "return_routed_experts": _BOOLEAN,
    "routed_experts_start_len": _INTEGER,
    "routed_dp_rank": _INTEGER,
    "data_parallel_rank": _INTEGER,
}
#: Fields whose contract has no `null`.
_NOT_NULL = {"return_prompt_token_ids", "routed_experts_start_len"}


def _check_type(value: object, wanted: str, nullable: bool = True) -> None:
    if not wanted or (value is None and nullable) or type(value) in _TYPES[wanted]:
        return
    raise contract_error(f"invalid type: {_describe(value)}, expected {wanted}")


def _describe(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{value}`"
        case float():
            return f"floating point `{value}`"
        case str():
            return f"string {msgspec.json.encode(value).decode()}"
        case list():
            return "sequence"
        case _:
            return "map"


def parse_body(request: Request) -> dict[str, Any]:
    """The JSON object in a request. Raises `Refused`."""
    content_type = (request.header(b"content-type") or b"application/json").lower()
    if not request.body:
        raise validation_error("{'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}")
    value: object = request.body
    if content_type.partition(b";")[0].strip().endswith(b"json"):
        try:
            value = msgspec.json.decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            found = re.search(r"byte (\d+)", str(exc))
            at = found.group(1) if found else "0"
            raise validation_error(
                f"{{'type': 'json_invalid', 'loc': ('body', {at}), 'msg': 'JSON decode error', 'input': {{}}, "
                f"'ctx': {{'error': {str(exc)!r}}}}}"
            ) from exc
    if not isinstance(value, dict):
        raise validation_error(
            "{'type': 'dataclass_type', 'loc': ('body',), 'msg': 'Input should be a dictionary or an instance of "
            f"GenerateReqInput', 'input': {value!r}, 'ctx': {{'class_name': 'GenerateReqInput'}}}}"
        )
    _check_contract(value)
    return value


def _check_contract(body: dict[str, Any]) -> None:
    for name, wanted in _TOP_LEVEL.items():
        if name in body:
            _check_type(body[name], wanted, nullable=name not in _NOT_NULL)
    ids: Any = body.get("input_ids")
    if ids is not None:
        bad = "" if isinstance(ids, list) else f"must be list or null; got {type(ids).__name__}"
        wrong = (
            next((item for item in ids if type(item) is not int and not isinstance(item, list)), None) if not bad else 0
        )
        if not bad and wrong is not None:
            bad = f"elements must be int or list; got {type(wrong).__name__}"
        if bad:
            raise validation_error(
                f"{{'type': 'value_error', 'loc': ('body', 'input_ids'), 'msg': 'Value error, {bad}', "
                f"'input': {ids!r}, 'ctx': {{'error': ValueError({bad!r})}}}}"
            )
    given = body.get("sampling_params")
    for params in given if isinstance(given, list) else [given]:
        if params is None:
            continue
        if not isinstance(params, dict):
            raise validation_error(
                f"{{'type': 'list_type', 'loc': ('body', 'sampling_params', 'list[dict[str,any]]'), "
                f"'msg': 'Input should be a valid list', 'input': {params!r}}}",
                f"{{'type': 'dict_type', 'loc': ('body', 'sampling_params', 'dict[str,any]'), "
                f"'msg': 'Input should be a valid dictionary', 'input': {params!r}}}",
            )
        for name, value in params.items():
            if name not in SAMPLING_KEYS:
                known = ", ".join(f"`{key}`" for key in SAMPLING_KEYS)
                raise contract_error(f"unknown field `{name}`, expected one of {known}")
            _check_type(value, SAMPLING_KEYS[name])
