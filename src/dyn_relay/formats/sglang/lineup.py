"""What the finish of a continuation must hold, so that it can end an answer that others began.

An engine's own answer is its own affair, and passes. One that is put together here must line up with its tokens, or be
no answer: a list that is one short reads like any other.
"""

from __future__ import annotations

from array import array

import msgspec
from msgspec import Raw

from dyn_relay.formats.base import CannotComplete
from dyn_relay.formats.sglang.answer import IDS, Rule, rule
from dyn_relay.formats.sglang.detection import spoken
from dyn_relay.formats.sglang.dialect import deltas
from dyn_relay.formats.sglang.ledger import Attempt, Ledger
from dyn_relay.formats.sglang.rebase import unlike
from dyn_relay.formats.sglang.spans import stated
from dyn_relay.formats.sglang.wire import is_list, length_of, read_fields

#: Characters from which on an unknown string may be rows in some encoding.
BLOB = 256

_ids = msgspec.json.Decoder(list[int])


def check_finish(ledger: Ledger, attempt: Attempt, data: bytes, before: int, total: int) -> None:
    """`data`: the event, which would take the attempt from `before` to `total` tokens.

    Raises `ValueError` for a worker that is wrong, `CannotComplete` where no worker could tell what is to be joined.
    """
    top = read_fields(data)
    meta = read_fields(top["meta_info"])
    if name := unlike(ledger, meta):
        raise ValueError(f"only one of an answer and its finish has {name}")
    ids = array("I", _ids.decode(top[IDS]))
    if "weight_versions" in meta and stated(meta["weight_versions"], total) is None:
        raise ValueError("weight_versions do not cover the answer")
    dialect = attempt.dialect
    if dialect is None and (shown := deltas(len(ids), before, total)) is not None:
        dialect = spoken(data, attempt.newest, shown, before, total)
    told = before if dialect is not None and dialect.rows_are_deltas else 0
    for name, value in meta.items():
        if rule(name) is Rule.ROWS:
            if is_list(value) and told + length_of(value) != total:
                raise ValueError(f"{name} has not one element a token")
        elif rule(name) is None:
            joined = name in ledger.lists and told + length_of(value) == total
            if not joined and not _is_state(value, _earlier(ledger, name)):
                raise CannotComplete("meta_info")


def _is_state(value: Raw, earlier: Raw | None) -> bool:
    """May the newest value of an unknown field stand for the whole answer?

    A list or a blob that was not there before, or has grown, may be rows in some encoding, of which those of earlier
    attempts would be missing.
    """
    if is_list(value):
        return length_of(value) == length_of(earlier)
    size = len(bytes(value))
    blob = bytes(value)[:1] == b'"' and size > BLOB
    return not blob or (earlier is not None and size == len(bytes(earlier)))


def _earlier(ledger: Ledger, name: str) -> Raw | None:
    return ledger.template[1].get(name) if ledger.template is not None else None
