"""How a call ends: the codes of gRPC, and the ways in which a call fails."""

from __future__ import annotations

import enum


class Code(enum.IntEnum):
    """gRPC's status codes, by their numbers on the wire."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class CallFailed(Exception):
    """A call did not end with OK."""


class Refused(CallFailed):
    """The server ended the call with a status of its own choice."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        #: What `grpc-message` said, decoded; may be empty.
        self.message = message


class TooLarge(ValueError):
    """A request that cannot be sent, to no server: nothing was."""


class Lost(CallFailed):
    """The call has no status: its connection broke or went away, its stream was reset, or its bytes made no sense."""

    def __init__(self, why: str, *, unprocessed: bool = False) -> None:
        super().__init__(why)
        #: The server has certainly not begun it: a GOAWAY or REFUSED_STREAM said so, or it was never sent.
        self.unprocessed = unprocessed
