"""Events of a continuation that differ from the one before in numbers alone: almost all, where lists are deltas.

What the client gets of such an event differs from what it got of the one before in the same numbers. Both are cut at
these once; as long as what stands between them comes again, byte by byte, the client's event is put together without
another look at its fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec

from dyn_relay.formats.sglang.answer import IDS, RULES, Rule, rule
from dyn_relay.formats.sglang.wire import Fields, is_list, read_fields, write

_ids = msgspec.json.Decoder(list[int])

_IDS, _ROWS, _TOTAL, _SENT = IDS.encode(), b"output_token_logprobs", b"completion_tokens", b"response_sent_to_client_ts"
_SHIFTED = frozenset(name.encode() for name, found in RULES.items() if found is Rule.SHIFT)
_NUMBER = rb"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_ROW = rb"\[(?:%b|null)(?:,(?:%b|null))*\]" % (_NUMBER, _NUMBER)
_LIST = rb"\[%b(?:,%b)*\]"
#: A quote inside a JSON string has a backslash before it, so no string looks like a field. Values of another kind are
#: left to stand where they are.
_CHANGING = re.compile(
    rb'"(%b)":(%b|%b|%b)(?=[,}])'
    % (
        b"|".join(sorted({_IDS, _ROWS, _SENT, *_SHIFTED}, reverse=True)),
        *(_NUMBER, _LIST % (_NUMBER, _NUMBER), _LIST % (_ROW, _ROW)),
    )
)
#: Within one attempt, what becomes of such a field depends on its value alone.
_OF_VALUE = (Rule.NAME, Rule.FIRST, Rule.SUM, Rule.REASON, Rule.LATEST)
_OF_NUMBERS = (Rule.SHIFT, Rule.SENT)


class Stencil:
    """Made of one event and what became of it, for those that follow it."""

    __slots__ = ("_base", "_between", "_names", "_shown", "_shown_names")

    def __init__(self, data: bytes, shown: bytes, base: int) -> None:
        parts, given = _CHANGING.split(data), _CHANGING.split(shown)
        self._base = base
        self._between, self._names = parts[::3], parts[1::3]
        self._shown, self._shown_names = given[::3], given[1::3]

    @classmethod
    def of(cls, data: bytes, view: tuple[Fields, Fields], base: int) -> Stencil | None:
        """Of an event, and the client's view of it, in an attempt that `base` tokens came before.

        None if what becomes of the next one may depend on more than its numbers.
        """
        try:
            json.loads(data, object_pairs_hook=_once)
        except (ValueError, RecursionError):
            return None
        top = read_fields(data)
        meta = read_fields(top["meta_info"])
        if top.keys() != {IDS, "meta_info"} or not all(_foreseen(name, meta) for name in meta):
            return None
        shown = write(*view)
        stencil = cls(data, shown, base)
        counted = {_IDS, _TOTAL, _ROWS} if _ROWS.decode() in meta else {_IDS, _TOTAL}
        if not counted.issubset(stencil._names):
            return None
        try:
            same = stencil._filled(_CHANGING.split(data)[2::3]) == shown
        except (KeyError, ValueError):
            return None
        return stencil if same else None

    def event(self, data: bytes, before: int) -> tuple[Sequence[int], int, bytes] | None:
        """Its ids, the attempt's tokens with it, and the client's event; None if it must be looked at.

        `before`: the attempt's tokens without it.
        """
        parts = _CHANGING.split(data)
        if parts[::3] != self._between or parts[1::3] != self._names:
            return None
        try:
            values = dict(zip(self._names, parts[2::3], strict=True))
            ids, total = _ids.decode(values[_IDS]), int(values[_TOTAL])
            rows = values[_ROWS].count(b"[") - 1 if _ROWS in values else len(ids)
            if not len(ids) == rows == total - before > 0:
                return None
            return ids, total, self._filled(parts[2::3])
        except (KeyError, ValueError, msgspec.DecodeError):
            return None

    def _filled(self, values: Sequence[bytes]) -> bytes:
        """The client's event. Raises `KeyError`, `ValueError` if it does not have the same numbers."""
        found = dict(zip(self._names, values, strict=True))
        if len(found) < len(values):
            raise ValueError("a field that is there twice")
        out = [self._shown[0]]
        for name, between in zip(self._shown_names, self._shown[1:], strict=True):
            value = found[name]
            out += (b'"', name, b'":', b"%d" % (int(value) + self._base) if name in _SHIFTED else value, between)
        return b"".join(out)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Raises `ValueError` for a name that is there twice, however spelled: readers heed the last one alone."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field that is there twice")
    return found


def _foreseen(name: str, meta: Fields) -> bool:
    found = rule(name)
    if found is None:
        return not is_list(meta[name])
    return found in _OF_VALUE or found in _OF_NUMBERS or name == _ROWS.decode()
