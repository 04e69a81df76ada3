"""Header fields of gRPC: what a request says, and what an answer's mean. Plain code, no I/O."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from dyn_relay.grpc.status import CallFailed, Code, Lost, Refused

#: Fields, in order, names in lower case. The value of a name that ends in `-bin` is any bytes, of another printable
#: ASCII.
Metadata = Sequence[tuple[bytes, bytes]]

_NAME = re.compile(rb"[0-9a-z_.-]+")
_VALUE = re.compile(rb"[\x20-\x7e]*")
#: What a call's own fields are; no metadata may be named so. `grpc-` is reserved as a whole.
_OURS = {b"te", b"content-type", b"user-agent", b"host", b"connection"}
_TIMEOUT_DIGITS = 10**8
#: Units of `grpc-timeout`, finest first: seconds in one.
_UNITS = ((b"n", 1e-9), (b"u", 1e-6), (b"m", 1e-3), (b"S", 1.0), (b"M", 60.0), (b"H", 3600.0))
#: The finest unit used: what is finer is a matter of the clocks.
_FINEST = 1

#: What an HTTP status says where no gRPC status was given (gRPC's "HTTP to gRPC status code mapping").
HTTP_CODES = {
    400: Code.INTERNAL,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.UNIMPLEMENTED,
    429: Code.UNAVAILABLE,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.UNAVAILABLE,
}


def request_fields(
    scheme: bytes, authority: bytes, path: str, timeout: float | None, metadata: Metadata
) -> list[tuple[bytes, bytes]]:
    """The head of a request. Raises `ValueError` that names the metadata which cannot be sent."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", scheme),
        (b":path", path.encode("ascii")),
        (b":authority", authority),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"dyn-relay"),
    ]
    if timeout is not None:
        fields.append((b"grpc-timeout", timeout_value(timeout)))
    fields += [_sent(name, value) for name, value in metadata]
    return fields


def timeout_value(seconds: float) -> bytes:
    """`grpc-timeout`: at most eight digits and a unit, rounded up. `seconds` is above 0 and finite."""
    for unit, size in _UNITS[_FINEST:]:
        count = math.ceil(seconds / size)
        if count < _TIMEOUT_DIGITS:
            return b"%d%b" % (count, unit)
    return b"%dH" % (_TIMEOUT_DIGITS - 1)


def head_failure(fields: Metadata) -> CallFailed | None:
    """Why no messages can follow this head of an answer; None if they can."""
    status = _only(fields, b":status")
    if status != b"200":
        return _of_http(status)
    kind = _only(fields, b"content-type") or b"no content-type"
    if kind != b"application/grpc" and not kind.startswith((b"application/grpc+", b"application/grpc;")):
        return Lost(f"not an answer of gRPC: {kind.decode('latin-1')}")
    return None


def ending(fields: Metadata) -> CallFailed | None:
    """How these trailers (or a head that is also the end) end the call; None for OK."""
    given = [value for name, value in fields if name == b"grpc-status"]
    if not given:
        http = _only(fields, b":status")
        return Lost("the answer ended without a grpc-status") if http in (None, b"200") else _of_http(http)
    if len(given) > 1:
        return Lost("the answer ended with more than one grpc-status")
    message = _text(_only(fields, b"grpc-message") or b"")
    number = int(given[0]) if re.fullmatch(rb"[0-9]{1,3}", given[0]) else None
    if number == Code.OK:
        return None
    if number is None or number not in Code.__members__.values():
        return Refused(Code.UNKNOWN, f"grpc-status {given[0].decode('latin-1')}: {message}")
    return Refused(Code(number), message)


def received(fields: Metadata) -> list[tuple[bytes, bytes]]:
    """The metadata among an answer's fields, `-bin` decoded. Raises `Lost` if it is not base64."""
    found = []
    for name, value in fields:
        if name.startswith((b":", b"grpc-")) or name == b"content-type":
            continue
        if name.endswith(b"-bin"):
            # Several values may have been joined by commas on the way.
            found += [(name, _unbase64(name, part.strip())) for part in value.split(b",")]
        else:
            found.append((name, value))
    return found


def sendable(value: bytes) -> bool:
    """Can it be a value of metadata? HTTP allows more: tabs, and bytes above ASCII."""
    return _VALUE.fullmatch(value) is not None and value == value.strip()


def _sent(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    if not _NAME.fullmatch(name) or name in _OURS or name.startswith(b"grpc-"):
        raise ValueError(f"metadata {name!r}: the name is reserved, or has characters other than a-z 0-9 _ . -")
    if name.endswith(b"-bin"):
        return name, base64.b64encode(value).rstrip(b"=")
    if not sendable(value):
        raise ValueError(f"metadata {name!r}: the value must be printable ASCII without blanks around it")
    return name, value


def _unbase64(name: bytes, value: bytes) -> bytes:
    try:
        return base64.b64decode(value.rstrip(b"=") + b"=" * (-len(value.rstrip(b"=")) % 4), validate=True)
    except binascii.Error:
        raise Lost(f"the metadata {name.decode('latin-1')} is not base64") from None


def _of_http(status: bytes | None) -> CallFailed:
    text = (status or b"missing").decode("latin-1")
    number = int(text) if re.fullmatch(r"[0-9]{3}", text) else 0
    return Refused(HTTP_CODES.get(number, Code.UNKNOWN), f"HTTP status {text}, and no grpc-status")


def _only(fields: Metadata, name: bytes) -> bytes | None:
    return next((value for field, value in fields if field == name), None)


def _text(message: bytes) -> str:
    """Percent-encoded UTF-8; what is neither stays as it is or becomes the replacement character."""
    return unquote_to_bytes(message).decode("utf-8", "replace")
