"""What becomes of each field of a request and of an answer, read from the tables that do it."""

from __future__ import annotations

from dyn_relay.formats.sglang.admission import TABLE
from dyn_relay.formats.sglang.answer import ANSWER, FINISH_REASON, rule
from dyn_relay.formats.sglang.continuation import BOUND_TO_WORKER, RANKS, REWRITTEN, REWRITTEN_SAMPLING
from dyn_relay.formats.sglang.errors import FIELDS as ERROR
from dyn_relay.formats.sglang.events import FRAMING

__all__ = ["ANSWER", "ERROR", "FINISH_REASON", "FRAMING", "meta_info", "refused", "request", "sampling"]

PASSED = "passed to every attempt in the client's own bytes"
_CHOSEN = "; with `--dp-aware` every attempt names the rank that was chosen for it"
_BOUND = "passed to the first worker; left out of later attempts, since it means something on that worker only"


def request(name: str) -> str:
    """Of a top-level field of a request."""
    changed = REWRITTEN.get(name, PASSED)
    if name in BOUND_TO_WORKER:
        changed = _BOUND + _CHOSEN if name in RANKS else _BOUND
    return _guarded("top level", name, changed)


def sampling(name: str) -> str:
    """Of a field of `sampling_params`."""
    return _guarded("`sampling_params`", name, REWRITTEN_SAMPLING.get(name, PASSED))


def meta_info(name: str) -> str:
    """Of a field of `meta_info`. Raises `KeyError` for one that has no rule of its own."""
    found = rule(name)
    if found is None:
        raise KeyError(name)
    return found.value


def refused(where: str, name: str) -> str:
    """When a field of a request forbids a continuation; "" for never."""
    return next((row.when for row in TABLE if (row.where, row.field) == (where, name)), "")


def _guarded(where: str, name: str, otherwise: str) -> str:
    when = refused(where, name)
    return f"refused (`no; reason={name}`) if {when}; else {otherwise}" if when else otherwise
