"""Telling what an attempt's worker speaks: from its event, where the counts leave it open, and from its info."""

from __future__ import annotations

from dyn_relay.formats.sglang.answer import Rule, may_be_rows, rule
from dyn_relay.formats.sglang.dialect import Dialect, deltas
from dyn_relay.formats.sglang.events import meta_of
from dyn_relay.formats.sglang.wire import is_list, length_of


def spoken(data: bytes, earlier: bytes, ids_are_deltas: bool, before: int, total: int) -> Dialect:
    """The dialect of an attempt's second growing event, given whether its ids are deltas, and the event before.

    Raises `ValueError` if it can be none.
    """
    if not ids_are_deltas:
        return Dialect.CUMULATIVE
    old = meta_of(earlier)
    for name, value in sorted(meta_of(data).items(), key=lambda item: rule(item[0]) is not Rule.ROWS):
        length = length_of(value)
        if rule(name) is Rule.ROWS and is_list(value):
            return Dialect.INCREMENTAL if deltas(length, before, total) else Dialect.MIXED
        # A list that is not known must line up, and have lined up in the event before.
        if may_be_rows(name, value) and length_of(old.get(name)) == before and length in (total, total - before):
            return Dialect.MIXED if length == total else Dialect.INCREMENTAL
    return Dialect.INCREMENTAL


def told(hint: Dialect | None, data: bytes) -> Dialect | None:
    """The dialect that the worker says it speaks; the flag for deltas has not always meant the logprobs too."""
    if hint is Dialect.INCREMENTAL and any(rule(name) is Rule.ROWS for name in meta_of(data)):
        return None
    return hint
