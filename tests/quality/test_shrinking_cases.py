"""`dyn_testkit.laws.cases` is public: a law that fails must fail of a case that a reader takes in at a glance."""

from __future__ import annotations

import json

from quality_kit import minimal

from dyn_testkit import faults
from dyn_testkit.faults import CLOSE, RESET, Spot
from dyn_testkit.laws import cases as some
from dyn_testkit.simnet import WHOLE

LEAST = {
    "input_ids": [0],
    "return_logprob": False,
    "sampling_params": {"temperature": 0, "max_new_tokens": 0},
    "stream": False,
}
HEAD = (faults.AT_HEAD, CLOSE)


def spelled(value):
    """Plainly: sorted, no blanks."""
    return json.dumps(value, separators=(",", ":")).encode()


def test_bodies():
    """Plain spelling, no optional field, no field that nobody knows."""
    assert minimal(some.bodies()) == spelled(LEAST)
    strange = minimal(some.bodies(), lambda body: "conversation_id" in json.loads(body))
    assert strange == spelled({"conversation_id": "c/1", **LEAST})


def test_budgets():
    long = minimal(some.bodies(), lambda body: json.loads(body)["sampling_params"]["max_new_tokens"] > 5)
    assert json.loads(long) == {**LEAST, "sampling_params": {"temperature": 0, "max_new_tokens": 6}}


def test_plans():
    """Fewer faults, at the head, else at the earliest token; milder ones."""
    plans = some.plans()
    assert minimal(plans) == ()
    assert minimal(plans, lambda plan: len(plan) > 1) == (HEAD, HEAD)
    assert minimal(plans, lambda plan: any(what is RESET for _, what in plan)) == ((faults.AT_HEAD, RESET),)
    among = minimal(plans, lambda plan: any(where.spot is Spot.AT_TOKEN for where, _ in plan))
    assert among in (((faults.at_token(0), CLOSE),), ((faults.at_token(1), CLOSE),))
    assert minimal(some.hopeless()) == (HEAD,) * 4


def test_dialects():
    assert minimal(some.dialects()) == ("cumulative",)
    assert minimal(some.dialects(), lambda found: "mixed" in found) == ("mixed",)


def test_cases():
    """Everything at once."""
    twice = minimal(some.cases(), lambda case: len(case.faults) > 1 and case.streaming)
    assert (twice.body, twice.faults) == (spelled({**LEAST, "stream": True}), (HEAD, HEAD))
    assert (twice.dialects, twice.fragmentation) == (("cumulative",), WHOLE)


def test_verdicts():
    body, reason = minimal(some.judged_bodies(), lambda judged: judged[1] == "n")
    assert reason == "n"
    assert json.loads(body) == {**LEAST, "sampling_params": {**LEAST["sampling_params"], "n": 2}}
