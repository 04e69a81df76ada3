"""Checkers: is what happened right? One a file, each a function of a history, each usable alone.

    history = load(Path("history.jsonl"))
    for finding in tokens.check(history): ...

The reference of a request is what an undisturbed engine says to it: the record of a run in which nothing failed, or an
oracle's answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dyn_testkit.checkers import (
    avoidance,
    budget,
    causes,
    counters,
    dialect,
    exactly_once,
    exclusion,
    experts,
    finish,
    framing,
    identity,
    keys,
    latency,
    leak,
    leases,
    limit,
    liveness,
    logprobs,
    orders,
    pairs,
    requests,
    rows,
    silence,
    snapshot,
    spans,
    tenure,
    texts,
    tokens,
    versions,
)
from dyn_testkit.checkers.base import Checker, Finding
from dyn_testkit.history import History

CHECKERS: Mapping[str, Checker] = {
    module.__name__.rpartition(".")[2]: module.check
    for module in (
        liveness,
        tokens,
        texts,
        finish,
        budget,
        counters,
        logprobs,
        experts,
        spans,
        versions,
        latency,
        snapshot,
        identity,
        dialect,
        framing,
        keys,
        requests,
        exactly_once,
        causes,
        rows,
        limit,
        exclusion,
        avoidance,
        tenure,
        silence,
        orders,
        pairs,
        leases,
        leak,
    )
}


def check(history: History, names: Collection[str] = tuple(CHECKERS)) -> list[Finding]:
    """Run some checkers, all by default.

    Raises `KeyError` for a name that none has, `fold.Incomplete` for a reference that is not whole.
    """
    return [finding for name in names for finding in CHECKERS[name](history)]


__all__ = ["CHECKERS", "Checker", "Finding", "check"]
