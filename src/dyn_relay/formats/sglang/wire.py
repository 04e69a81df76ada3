"""JSON that keeps the other side's own bytes: objects read one level deep, values left as `msgspec.Raw`.

SGLang writes with orjson, but not every server that speaks its format does: Python's own `json` emits `NaN`, `Infinity`
and `-Infinity`, which no strict parser takes. Such literals are *shielded*: turned into strings that nobody else can
send, carried through as any other value, and turned back when the result is written.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Raw

T = TypeVar("T")

#: A JSON object, its values unread. Repeated keys: the last one wins, as in orjson.
Fields = dict[str, Raw]

NULL = Raw(b"null")
TRUE = Raw(b"true")

#: Bytes from which on a copy more counts.
_LARGE = 1 << 20

_fields = msgspec.json.Decoder(Fields)
_rows = msgspec.json.Decoder(list[Raw])
_encoder = msgspec.json.Encoder()

#: A string first, so that the words inside one stay. An unterminated one ends with the data: no byte is read twice.
_LITERAL = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|-?\bInfinity\b|\bNaN\b', re.DOTALL)
#: How a shielded literal begins. A model may say `\0NaN`, but it cannot know what is drawn here.
_MARK = b'"\\u0000%s' % secrets.token_hex(8).encode()
_SHIELDED = re.compile(re.escape(_MARK) + rb'(-?Infinity|NaN)"')


class NotJson(ValueError):
    """The bytes are not JSON, not even with `NaN` and the infinities allowed."""


class Foreign(ValueError):
    """It is JSON, but not of the shape that was asked for."""


def shield(data: bytes) -> bytes:
    """Replace the literals `NaN`, `Infinity`, `-Infinity` by strings; strings that contain the words stay."""

    def one(match: re.Match[bytes]) -> bytes:
        found = match[0]
        return found if found[:1] == b'"' else b'%s%s"' % (_MARK, found)

    return _LITERAL.sub(one, data)


def unshield(data: bytes) -> bytes:
    """Undo `shield`."""
    return _SHIELDED.sub(rb"\1", data)


def read(decoder: msgspec.json.Decoder[T], data: bytes | Raw) -> T:
    """Decode; non-finite literals come shielded. Raises `NotJson`, `Foreign`."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    whole = bytes(data)
    shielded = shield(whole) if b"NaN" in whole or b"Infinity" in whole else whole
    try:
        return decoder.decode(shielded)
    except msgspec.ValidationError as exc:
        # A wrong type may stand before a cut: only whole JSON is foreign.
        try:
            msgspec.json.decode(shielded)
        except (msgspec.DecodeError, RecursionError):
            raise NotJson(str(exc)) from None
        raise Foreign(str(exc)) from None
    except (msgspec.DecodeError, RecursionError) as exc:
        raise NotJson(str(exc)) from None


def read_fields(data: bytes | Raw) -> Fields:
    """An object's fields. Raises `NotJson`, `Foreign`."""
    return read(_fields, data)


def read_rows(data: bytes | Raw) -> list[Raw]:
    """An array's elements. Raises `NotJson`, `Foreign`."""
    return read(_rows, data)


def raw(value: object) -> Raw:
    """A Python value as JSON."""
    return Raw(_encoder.encode(value))


def plain(value: Raw) -> object:
    """JSON as a Python value."""
    result: object = msgspec.json.decode(value)
    return result


def write(fields: Fields, meta: Fields | None = None) -> bytes:
    """Compact JSON; values keep their bytes. Shielded literals come out as they came in.

    `meta`: what `meta_info` has become.
    """
    return b"".join(parts(fields, meta)) if meta is not None else _unshielded(_encoder.encode(fields))


def parts(fields: Fields, meta: Fields) -> list[bytes]:
    """What `write` joins: of large values nothing is copied before that."""
    if max([len(memoryview(value)) for value in (fields["meta_info"], *meta.values())]) < _LARGE:
        return [_unshielded(_encoder.encode({**fields, "meta_info": Raw(_encoder.encode(meta))}))]
    inner = _members({name: [value] for name, value in meta.items()})
    found = _members({name: inner if name == "meta_info" else [value] for name, value in fields.items()})
    return [unshield(part) if _SHIELDED.search(part) else part for part in found]


def _members(fields: Mapping[str, Sequence[bytes]]) -> list[bytes]:
    found: list[bytes] = []
    for name, value in fields.items():
        found += (b"," if found else b"{", _encoder.encode(name), b":", *value)
    return [*found, b"}"]


def _unshielded(data: bytes) -> bytes:
    return unshield(data) if _MARK in data else data


def is_list(value: Raw) -> bool:
    """True for a JSON array."""
    return bytes(value)[:1] == b"["


def length_of(value: Raw | None) -> int:
    """Number of elements of a JSON array, -1 for anything else."""
    return len(read_rows(value)) if value is not None and is_list(value) else -1


def number(fields: Fields, name: str) -> int | None:
    """An integer field; None if it is missing or something else."""
    value = plain(fields[name]) if name in fields else None
    return value if isinstance(value, int) else None


def inside(value: bytes | Raw) -> bytes:
    """What stands between the brackets of an array, without blanks at the ends."""
    return bytes(value)[1:-1].strip()


def joined(parts: list[bytes | bytearray]) -> Raw:
    """The array of the elements in `parts`, each the inside of an array."""
    return Raw(b"[" + b",".join([part for part in parts if part]) + b"]")
