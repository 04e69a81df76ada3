"""The laws of a router that lets generations outlive their workers, for any router and any backend.

A law is a plain function of `Observed`: a request, the faults of its attempts, and what the client and the
workers saw. A `Backend` makes the observation::

    seen = backend.observe(Case(body, faults=((faults.at_token(3), faults.CLOSE),), dialects=("incremental",)))
    laws.equivalence(seen, oracle)

These speak SGLang's `/generate`. The ones in `tokens` have the same names and speak any other backend's language, once
a `Wire` tells how that spells a request and an answer; a case names its wire.

`levels` has two backends ready: a format's exchange without I/O, and any router that is reached over HTTP with a
`Stage` of mock workers behind it. `cases` has Hypothesis strategies (and needs Hypothesis), `Sometimes` counts the
hard cases that a run must have met.
"""

from dyn_testkit.laws import tokens
from dyn_testkit.laws.laws import (
    admission,
    budget,
    equivalence,
    exactly_once,
    fold,
    never_continued,
    no_false_success,
    passthrough,
    snapshot,
    truncation,
    uninterrupted,
    verbatim,
)
from dyn_testkit.laws.numbers import join_rows, left_of, rows_survive, split_rows
from dyn_testkit.laws.observed import Attempt, Backend, Case, Observed, Planned
from dyn_testkit.laws.pairs import aggregated, join, meeting
from dyn_testkit.laws.sometimes import GOALS, NeverHappened, Sometimes
from dyn_testkit.laws.stage import Stage
from dyn_testkit.laws.wire import Reading, Wire

__all__ = [
    "GOALS",
    "Attempt",
    "Backend",
    "Case",
    "NeverHappened",
    "Observed",
    "Planned",
    "Reading",
    "Sometimes",
    "Stage",
    "Wire",
    "admission",
    "aggregated",
    "budget",
    "equivalence",
    "exactly_once",
    "fold",
    "join",
    "join_rows",
    "left_of",
    "meeting",
    "never_continued",
    "no_false_success",
    "passthrough",
    "rows_survive",
    "snapshot",
    "split_rows",
    "tokens",
    "truncation",
    "uninterrupted",
    "verbatim",
]
