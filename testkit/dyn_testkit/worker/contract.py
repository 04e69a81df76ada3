"""The language of `/generate` bodies, and SGLang's four shapes of refusal."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from dyn_testkit.worker.schema import WrongType, check_contract, settle, unreadable
from dyn_testkit.worker.wire import TEXT, Reply, Request, json_reply


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


class Unhandled(Exception):
    """SGLang's own code falls over the request (a `TypeError`, an `IndexError`): status 500, a stream just ends."""


class Poisoned(Exception):
    """The request kills the engine."""


_LONG_NUMBER = re.compile(rb"\d{19}")
INTERNAL_ERROR = Reply(500, b"Internal Server Error", TEXT)


#: Where in SGLang a body is refused: line, function, method and path.
GENERATE = 'File "http_server.py", line 928, in generate_request\n    POST /generate'


def validation_error(*details: str, endpoint: str = GENERATE) -> Refused:
    """FastAPI's refusal, as SGLang words it."""
    count = "1 validation error" if len(details) == 1 else f"{len(details)} validation errors"
    listed = "".join(f"\n  {detail}" for detail in details)
    where = f"\n\n  {endpoint} [{', '.join(details)}]"
    return Refused(bad_request_object(f"{count}:{listed}{where}"))


def bad_request_object(message: str) -> Reply:
    """The error object of FastAPI's refusals."""
    return error_object(400, message, "Bad Request")


def error_object(status: int, message: str, kind: str | None = None) -> Reply:
    """The error object of scheduler aborts (an `HTTPException`, which has no other type), and of the OpenAI routes."""
    error = {"object": "error", "message": message, "type": kind or str(status), "param": None, "code": status}
    return json_reply(error, status)


def contract_error(message: str) -> Refused:
    """The contract's refusal: a bare string."""
    return Refused(json_reply({"error": message}, 400))


def value_error(message: str) -> Reply:
    """A `ValueError` of a unary request."""
    return json_reply({"error": {"message": message}}, 400)


def decode(body: bytes) -> object:
    """Parse JSON as SGLang's parser does: integers beyond 64 bits are floats.

    Raises `msgspec.DecodeError`, `OverflowError` (larger than any float), `RecursionError` (nested too deeply).
    """
    value = msgspec.json.decode(body)
    return _narrow(value) if _LONG_NUMBER.search(body) else value


def _narrow(value: object) -> object:
    match value:
        case dict():
            return {key: _narrow(item) for key, item in value.items()}
        case list():
            return [_narrow(item) for item in value]
        case int() if not -(1 << 63) <= value < 1 << 64:
            return float(value)
        case _:
            return value


def read_json(body: bytes, endpoint: str = GENERATE) -> object:
    """Parse a body. Raises `Refused`, `RecursionError`."""
    try:
        return decode(body)
    except (msgspec.DecodeError, OverflowError) as exc:
        raise _not_json(str(exc), endpoint) from exc


def too_deep(endpoint: str = GENERATE) -> Refused:
    """What a `RecursionError` comes to."""
    return _not_json("depth limit exceeded", endpoint)


def _not_json(error: str, endpoint: str) -> Refused:
    found = re.search(r"byte (\d+)", error)
    at = found.group(1) if found else "0"
    return validation_error(
        f"{{'type': 'json_invalid', 'loc': ('body', {at}), 'msg': 'JSON decode error', 'input': {{}}, "
        f"'ctx': {{'error': {error!r}}}}}",
        endpoint=endpoint,
    )


def parse_body(request: Request) -> dict[str, Any]:
    """The JSON object in a request, with the types that the engine wants. Raises `Refused`."""
    try:
        return _parse(request)
    except RecursionError as exc:
        raise too_deep() from exc


def _parse(request: Request) -> dict[str, Any]:
    content_type = (request.header(b"content-type") or b"application/json").lower()
    if not request.body:
        raise validation_error("{'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}")
    value: object = request.body
    if content_type.partition(b";")[0].strip().endswith(b"json"):
        value = read_json(request.body)
    if not isinstance(value, dict):
        raise validation_error(
            "{'type': 'dataclass_type', 'loc': ('body',), 'msg': 'Input should be a dictionary or an instance of "
            f"GenerateReqInput', 'input': {value!r}, 'ctx': {{'class_name': 'GenerateReqInput'}}}}"
        )
    problems = unreadable(value)
    if problems:
        raise validation_error(*problems)
    try:
        check_contract(value)
    except WrongType as exc:
        raise contract_error(str(exc)) from exc
    return settle(value)
