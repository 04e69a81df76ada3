"""The laws of a router that lets generations outlive their workers, for any backend and any router.

A law is a plain function of `Observed`: a request, the faults of its attempts, and what the client and the
workers saw. A `Backend` makes the observation::

    seen = backend.observe(Case(body, faults=((faults.at_token(3), faults.CLOSE),), dialects=("incremental",)))
    laws.equivalence(seen, oracle)

`levels` has two backends ready: a format's exchange without I/O, and any router that is reached over HTTP with a
`Stage` of mock workers behind it. `cases` has Hypothesis strategies (and needs Hypothesis), `Sometimes` counts the
hard cases that a run must have met.
"""

from dyn_testkit.laws.laws import (
    admission,
    budget,
    equivalence,
    exactly_once,
    fold,
    no_false_success,
    passthrough,
    snapshot,
    truncation,
)
from dyn_testkit.laws.numbers import join_rows, left_of, rows_survive, split_rows
from dyn_testkit.laws.observed import Attempt, Backend, Case, Observed, Planned
from dyn_testkit.laws.sometimes import GOALS, NeverHappened, Sometimes
from dyn_testkit.laws.stage import Stage

__all__ = [
    "GOALS",
    "Attempt",
    "Backend",
    "Case",
    "NeverHappened",
    "Observed",
    "Planned",
    "Sometimes",
    "Stage",
    "admission",
    "budget",
    "equivalence",
    "exactly_once",
    "fold",
    "join_rows",
    "left_of",
    "no_false_success",
    "passthrough",
    "rows_survive",
    "snapshot",
    "split_rows",
    "truncation",
]
