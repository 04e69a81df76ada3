"""What goes wrong on the wire."""

from __future__ import annotations

import msgspec

from dyn_relay.http11.headers import reason


class Refusal(Exception):
    """A request that is answered with an error here, after which its connection is closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class BadResponse(Exception):
    """What came is not an HTTP/1.1 response that we can take: garbage, ambiguous framing, a size over the limit."""


class EventTooLarge(Exception):
    """A server-sent event is larger than the limit."""


def error_body(status: int, message: str) -> bytes:
    """A JSON error in the shape that SGLang 0.5.23 gives to a body it cannot parse."""
    kind = reason(status).decode() or str(status)
    return msgspec.json.encode({"object": "error", "message": message, "type": kind, "param": None, "code": status})
