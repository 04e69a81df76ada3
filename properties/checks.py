"""The laws as they are checked on a whole router, on any level: each takes a backend and gives a check of cases."""

from __future__ import annotations

from dyn_testkit import laws
from dyn_testkit.laws import cases as some
from dyn_testkit.laws.levels import other
from dyn_testkit.oracle import Oracle

ORACLE = Oracle(some.MODEL)


def equivalence(backend, oracle=ORACLE):
    def check(case):
        seen = backend.observe(case)
        laws.equivalence(seen, oracle)
        return seen

    return check


def admission(backend):
    def check(judged, case):
        body, reason = judged
        seen = backend.observe(laws.Case(body, case.faults, case.dialects, case.fragmentation))
        laws.admission(seen, reason)
        return seen

    return check


def budget(backend):
    def check(case):
        seen = backend.observe(case)
        laws.budget(seen, ORACLE)
        return seen

    return check


def snapshot(backend):
    def check(case):
        seen = backend.observe(case)
        laws.snapshot(seen)
        return seen

    return check


def fold(backend):
    def check(case):
        unary = backend.observe(other(case, stream=False))
        laws.fold(unary, backend.observe(other(case, stream=True)))
        return unary

    return check


def passthrough(backend):
    """Attempt 0 of a stream with a rid, and everything that is not migratable, goes out as it came."""

    def check(judged, case):
        body, reason = judged
        seen = backend.observe(laws.Case(body, (), case.dialects, case.fragmentation))
        ours = not seen.case.streaming or "rid" not in seen.request
        laws.passthrough(seen, rewritten=ours and not reason)
        return seen

    return check


def no_false_success(backend):
    def check(case, kept):
        seen = backend.observe(case)
        laws.no_false_success(seen, ORACLE)
        if seen.response.wire:
            laws.truncation(seen, ORACLE, kept % (len(seen.response.wire) + 1))
        return seen

    return check


def exactly_once(backend):
    def check(case):
        seen = backend.observe(case)
        laws.exactly_once(seen)
        return seen

    return check


def join(backend, oracle):
    def check(case):
        seen = backend.observe(case)
        laws.join(seen, oracle)
        return seen

    return check


def everything_of_pairs(backend, oracle):
    """All laws of one answer that a pair has given."""

    def check(case):
        seen = backend.observe(case)
        laws.join(seen, oracle)
        laws.snapshot(seen)
        alone = laws.aggregated(seen)
        laws.admission(alone, "")
        if not any(seen.request.get(name) for name in ("return_routed_experts", "return_indexer_topk")):
            laws.budget(alone, oracle)  # the rows of a lost finish are asked for, which takes a call
        laws.no_false_success(alone, oracle)
        laws.exactly_once(alone)
        return seen

    return check


def everything(backend):
    """All laws of one answer at once."""

    def check(case):
        seen = backend.observe(case)
        laws.equivalence(seen, ORACLE)
        laws.admission(seen, "")
        laws.budget(seen, ORACLE)
        laws.snapshot(seen)
        laws.no_false_success(seen, ORACLE)
        laws.exactly_once(seen)
        return seen

    return check
