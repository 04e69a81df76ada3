"""How gRPC spells messages, statuses and timeouts. What is wrong gets the statuses of tonic, the server in SGLang."""

from __future__ import annotations

import re
import struct
from urllib.parse import quote_from_bytes

from dyn_relay.grpc.status import Code

#: Bytes of the largest message that is taken, SGLang's own limit.
MAX_MESSAGE = 64 << 20

_PREFIX = struct.Struct(">BI")
#: What a status message keeps as it is: printable ASCII but the percent sign.
_PLAIN = bytes(byte for byte in range(0x20, 0x7F) if byte != ord("%"))
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)


class Status(Exception):
    """Ends a call with a status. Raised by handlers."""

    def __init__(self, code: Code, message: str = "") -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


def frame(message: bytes, *, length: int | None = None, compressed: bool = False) -> bytes:
    """One length-prefixed message; `length` and `compressed` lie about it."""
    return _PREFIX.pack(compressed, len(message) if length is None else length) + message


def only_message(body: bytes) -> bytes:
    """The one message in a request's body. Raises `Status`."""
    if not body:
        raise Status(Code.INTERNAL, "Missing request message.")
    if len(body) < _PREFIX.size:
        raise Status(Code.INTERNAL, "Unexpected EOF decoding stream.")
    length = check_prefix(body)
    message = body[_PREFIX.size :]
    if len(message) < length:
        raise Status(Code.INTERNAL, "Unexpected EOF decoding stream.")
    if len(message) > length:
        raise Status(Code.UNIMPLEMENTED, "more than one request message")
    return message


def check_prefix(body: bytes | bytearray) -> int:
    """The length that a body's first message says, which must begin there whole. Raises `Status`."""
    flag, length = _PREFIX.unpack_from(body)
    if flag == 1:
        why = "received message with compressed-flag but no grpc-encoding was specified"
        raise Status(Code.INTERNAL, f"protocol error: {why}")
    if flag:
        why = f"received message with invalid compression flag: {flag} (valid flags are 0 and 1)"
        raise Status(Code.INTERNAL, f"protocol error: {why} while receiving request")
    if length > MAX_MESSAGE:
        limit = f"found {length} bytes, the limit is: {MAX_MESSAGE} bytes"
        raise Status(Code.OUT_OF_RANGE, f"Error, decoded message length too large: {limit}")
    return int(length)


def begun(body: bytearray) -> bool:
    """Is its first message's prefix there?"""
    return len(body) >= _PREFIX.size


def spell_message(message: str) -> str:
    """The value of `grpc-message`."""
    return quote_from_bytes(message.encode(), safe=_PLAIN)


def parse_timeout(text: str) -> float | None:
    """Seconds of a `grpc-timeout`; None if it is none."""
    found = _TIMEOUT.fullmatch(text)
    return None if found is None else int(found[1]) * _UNITS[found[2]]
