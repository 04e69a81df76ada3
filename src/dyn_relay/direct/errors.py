"""How a call that did not end with OK looks over HTTP: a table.

A death must look like one: the answer breaks off, as it does when an HTTP engine dies. What the engine has said of a
request must look as its HTTP server says it. SGLang 0.5.23 says INTERNAL for both a request that it finds wrong and its
own trouble; what tells them apart is in `internal`.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

import msgspec

from dyn_relay.grpc.status import CallFailed, Code, Lost, Refused
from dyn_relay.http11.headers import Headers
from dyn_relay.net import ConnectFailed

JSON: Headers = [(b"content-type", b"application/json")]


class Meaning(enum.Enum):
    """What a status means before the first message of an answer."""

    MISTAKE = "mistake"  #: the client's: a 400, in a stream an event inside a 200
    BUSY = "busy"  #: 429: nothing was begun, another worker may take it
    DEATH = "death"  #: the connection ends without an answer
    ABORTED = "aborted"  #: the answer ends as an aborted one
    ERROR = "error"  #: a status of its own, see `_STATUSES`
    SAID = "said"  #: by its message, see `internal`


#: By status. After the first message only ABORTED stays; all others are a death, since no engine that goes on says so.
MEANINGS: dict[Code, Meaning] = {
    Code.CANCELLED: Meaning.ABORTED,
    Code.UNKNOWN: Meaning.ERROR,
    Code.INVALID_ARGUMENT: Meaning.MISTAKE,
    Code.DEADLINE_EXCEEDED: Meaning.DEATH,
    Code.NOT_FOUND: Meaning.ERROR,
    Code.ALREADY_EXISTS: Meaning.MISTAKE,
    Code.PERMISSION_DENIED: Meaning.ERROR,
    Code.RESOURCE_EXHAUSTED: Meaning.BUSY,
    Code.FAILED_PRECONDITION: Meaning.ERROR,
    Code.ABORTED: Meaning.ERROR,
    Code.OUT_OF_RANGE: Meaning.MISTAKE,
    Code.UNIMPLEMENTED: Meaning.ERROR,
    Code.INTERNAL: Meaning.SAID,
    Code.UNAVAILABLE: Meaning.DEATH,
    Code.DATA_LOSS: Meaning.DEATH,
    Code.UNAUTHENTICATED: Meaning.ERROR,
}
#: Of `Meaning.ERROR`; else 500.
_STATUSES = {
    Code.NOT_FOUND: 404,
    Code.PERMISSION_DENIED: 403,
    Code.UNIMPLEMENTED: 501,
    Code.UNAUTHENTICATED: 401,
}
#: What 0.5.23 says with INTERNAL when its own half of a call is gone.
_GONE = ("gRPC response stream closed before", "Channel closed before")
#: How an exception with an HTTP status is spelled in a status message ("503: The request queue is full.").
_HTTP_EXCEPTION = re.compile(r"([45]\d\d): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answer:
    """An error as a whole HTTP answer. `event`: the same for a stream that stock answers with 200."""

    status: int
    body: bytes
    event: bytes | None = None


def meaning(failure: CallFailed | ConnectFailed) -> Meaning:
    """What it means before the first message."""
    if isinstance(failure, Refused):
        gone = failure.code is Code.INTERNAL and failure.message.startswith(_GONE)
        return Meaning.DEATH if gone else MEANINGS[failure.code]
    begun = isinstance(failure, Lost) and not failure.unprocessed
    return Meaning.DEATH if begun else Meaning.BUSY


def mistake(message: str, code: int = 400) -> Answer:
    """As stock answers a `ValueError`: an object, in a stream an event."""
    error = {"message": message, "type": "invalid_request_error", "code": code, "retryable": False}
    body = msgspec.json.encode({"error": {"message": message}})
    return Answer(code, body, b"data: " + msgspec.json.encode({"error": error}) + b"\n\n")


def refused(message: str) -> Answer:
    """As stock answers a body that its JSON contract does not allow: a bare string, and never a stream."""
    return Answer(400, msgspec.json.encode({"error": message}))


def trouble(status: int, message: str) -> Answer:
    """As stock answers with an `HTTPException`."""
    error = {"object": "error", "message": message, "type": str(status), "param": None, "code": status}
    return Answer(status, msgspec.json.encode(error))


def internal(message: str, well: bool) -> Answer:
    """INTERNAL before the first message. `well`: the engine says that it is.

    An `HTTPException` begins with its status. All else that stock raises there is a `ValueError` with words for the
    client, as long as it works: one that does not would fail every request so.
    """
    said = _HTTP_EXCEPTION.fullmatch(message)
    if said is not None:
        return trouble(int(said[1]), said[2])
    return mistake(message) if well else trouble(500, message or "Internal Server Error")


def abandoned(reason: object) -> Answer | None:
    """A finish reason with which the scheduler refuses a request, as a unary answer says it; None for any other."""
    if not isinstance(reason, dict) or reason.get("type") != "abort" or type(reason.get("status_code")) is not int:
        return None
    words, status = str(reason.get("message")), reason["status_code"]
    return mistake(words) if status == 400 else trouble(status, words)


def answer(failure: Exception) -> Answer:
    """What has one of the other meanings, but a death. It has begun nothing if it was never connected."""
    if isinstance(failure, Refused) and MEANINGS[failure.code] is not Meaning.BUSY:
        words = failure.message or failure.code.name
        if MEANINGS[failure.code] is Meaning.MISTAKE:
            return mistake(words)
        return trouble(_STATUSES.get(failure.code, 500), words)
    return trouble(429, str(failure))
