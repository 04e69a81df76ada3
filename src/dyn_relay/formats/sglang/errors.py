"""Errors in stock SGLang's shapes (0.5.23), and the proxy's own in the same clothes."""

from __future__ import annotations

from msgspec import Raw

from dyn_relay.formats.base import Answer, Rejected
from dyn_relay.formats.sglang.events import DONE_EVENT, Fault
from dyn_relay.formats.sglang.wire import raw, write

_SAME = "as the engine spells it; where a stream was asked for a unary client, as stock spells it to one"

#: What becomes of the fields of an engine's error, under `error` or at the top level. Its place in a body stays, too.
FIELDS: dict[str, str] = {
    "message": "the engine's own words",
    "type": _SAME,
    "code": f"{_SAME}. 4xx is relayed, 503 of a full queue goes elsewhere, other 5xx are survived if another can do it",
    "retryable": _SAME,
    "object": _SAME,
    "param": _SAME,
}

#: The reason of a failure that somebody wished for: a client that tries again would undo it.
ABORTED = "aborted"

_EVENT_STREAM = b"text/event-stream; charset=utf-8"


def unary(fault: Fault) -> Answer:
    """As stock answers a request without `stream`: its own 4xx as an `error` object, 5xx in FastAPI's dress."""
    if 400 <= fault.code < 500:
        return Answer(fault.code, write({"error": raw({"message": fault.message})}))
    return Answer(fault.code, write(_http_exception(fault.code, fault.message)))


def event(message: str, code: int) -> bytes:
    """As stock answers a request with `stream`: one event inside a 200."""
    error = {"message": message, "type": "invalid_request_error", "code": code, "retryable": False}
    return b"data: " + write({"error": raw(error)}) + b"\n\n"


def refusal(message: str, streaming: bool) -> Answer:
    """A 400 that no worker needs to see."""
    if not streaming:
        return unary(Fault(400, message))
    return Answer(200, event(message, 400) + DONE_EVENT, _EVENT_STREAM)


def rejected(reason: str, message: str, streaming: bool) -> Rejected:
    """`refusal` as an exception."""
    return Rejected(reason, refusal(message, streaming))


def failure(status: int, reason: str, message: str, delivered: int, started: bool) -> Answer:
    """The proxy's own failure; `delivered` and `started` tell a client what it has and what may still have run."""
    body = _http_exception(status, message)
    body.update(reason=raw(reason), delivered=raw(delivered), started=raw(started))
    return Answer(status, write(body))


def failure_event(status: int, reason: str, message: str, delivered: int) -> bytes:
    """The same inside a stream, without the terminator: a cut stream must not read as a whole one."""
    error = {"message": message, "type": "server_error", "code": status, "retryable": reason != ABORTED}
    return b"data: " + write({"error": raw({**error, "reason": reason, "delivered": delivered})}) + b"\n\n"


def _http_exception(status: int, message: str) -> dict[str, Raw]:
    return {
        "object": raw("error"),
        "message": raw(message),
        "type": raw(str(status)),
        "param": raw(None),
        "code": raw(status),
    }
