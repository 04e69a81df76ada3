"""Cumulative events, read as deltas: what an event repeats of the one before was read when that came.

A cumulative event of n tokens is n times as large as a delta, and almost all of it stood in the one before. So its
lists are compared with those of the event before, at the speed of memory, and cut out; only what is left, a delta,
goes through the JSON decoder. That is exact: the decoder would be in the same state at both ends of what is cut.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, UnsetType

from dyn_relay.formats.sglang.events import Delta, Meta
from dyn_relay.formats.sglang.wire import Foreign, inside

#: How events of engines without a tokenizer begin (SGLang 0.5.23).
_OPENING = b'{"output_ids":['
#: No string can hold this: its quotes would be escaped.
_ROWS_KEY = b'"output_token_logprobs":'


class _Meta(Meta, gc=False):
    """`Meta`, with the list that makes cumulative events large."""

    output_token_logprobs: Raw | UnsetType = UNSET


class _Grown(Delta, gc=False):
    """`Delta` of a cumulative event."""

    meta_info: _Meta | None = None
    #: As in `Whole`, which reads the others.
    index: int | None = None


_decoder = msgspec.json.Decoder(_Grown)


class Growing:
    """The events of one attempt after `event`. `decode` raises `Foreign` for one that does not go on from the last."""

    __slots__ = ("_between", "_event", "_ids_end", "_rows_at", "_rows_end")

    def __init__(self, event: bytes) -> None:
        """Raises `Foreign` for an event of another shape, `msgspec.DecodeError`."""
        if not event.startswith(_OPENING):
            raise Foreign("output_ids does not come first")
        self._event = event
        self._ids_end = event.index(b"]", len(_OPENING))
        meta = _decoder.decode(event).meta_info
        rows = UNSET if meta is None else meta.output_token_logprobs
        #: Where the rows begin and end; both at the end of the ids if there are none.
        self._rows_at = self._rows_end = self._ids_end + 1
        if not isinstance(rows, UnsetType):
            self._rows_at = event.index(_ROWS_KEY, self._ids_end) + len(_ROWS_KEY) + 1
            self._rows_end = self._rows_at + len(inside(rows))
            if event[self._rows_at - 1 : self._rows_end + 1] != bytes(rows):
                raise Foreign("rows in two places")
        #: From the end of the ids to the beginning of the rows.
        self._between = event[self._ids_end : self._rows_at]

    def decode(self, event: bytes) -> Delta:
        """What the next event brings. Raises `Foreign`, `msgspec.DecodeError`."""
        last, ids_end, between = self._event, self._ids_end, self._between
        grown = event.find(b"]", ids_end)
        rows_at = grown + len(between)
        rows = last[self._rows_at : self._rows_end]
        cut = rows_at + len(rows)
        if not (
            event.startswith(last[:ids_end])
            and event.startswith(between, grown)
            and event.startswith(rows, rows_at)
            and event[ids_end : ids_end + 1] == b","
        ):
            raise Foreign("not the one before and more")
        rest = event[cut + 1 :] if rows else event[cut:]  # without the comma; what has none is no JSON then
        delta = _decoder.decode(b"".join((_OPENING, event[ids_end + 1 : grown], between, rest)))
        if rows:
            fresh = UNSET if delta.meta_info is None else delta.meta_info.output_token_logprobs
            if isinstance(fresh, UnsetType):
                raise Foreign("no rows")
            cut += 1 + len(inside(fresh))
        self._event, self._ids_end, self._rows_at, self._rows_end = event, grown, rows_at, cut
        return delta
