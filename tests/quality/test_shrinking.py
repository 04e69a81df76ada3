"""`dyn_testkit.strategies` is public: what fails under it must shrink to what a reader takes in at a glance."""

from __future__ import annotations

import pytest
from quality_kit import minimal

from dyn_testkit import faults, strategies
from dyn_testkit.engine import Model
from dyn_testkit.faults import CLOSE, KILL_WORKER, Spot
from dyn_testkit.simnet import WHOLE, Fragmentation, Link

MODEL = Model(vocab_size=60)
REQUESTS = strategies.requests(MODEL)
LEAST = {"input_ids": [0], "sampling_params": {"temperature": 0, "max_new_tokens": 0}, "return_logprob": False}


def request(sampling=None, **fields):
    return {**LEAST, **fields, "sampling_params": {**LEAST["sampling_params"], **(sampling or {})}}


def test_requests():
    """The shortest prompt, no budget, no optional field."""
    assert minimal(REQUESTS) == LEAST
    assert minimal(REQUESTS, lambda found: len(found["input_ids"]) > 2) == request(input_ids=[0, 0, 0])
    long = minimal(REQUESTS, lambda found: found["sampling_params"]["max_new_tokens"] > 4)
    assert long == request({"max_new_tokens": 5})


FIELDS = {"stream": False, "rid": "0", "top_logprobs_num": 0}
SAMPLING = {"sampling_seed": 0, "stop_token_ids": [], "logit_bias": {"3": 1.5}}


@pytest.mark.parametrize(("name", "value"), FIELDS.items(), ids=FIELDS)
def test_a_field_alone(name, value):
    """Whatever field it takes to fail, no other one is left."""
    assert minimal(REQUESTS, lambda found: name in found) == request(**{name: value})


@pytest.mark.parametrize(("name", "value"), SAMPLING.items(), ids=SAMPLING)
def test_a_sampling_parameter_alone(name, value):
    assert minimal(REQUESTS, lambda found: name in found["sampling_params"]) == request({name: value})


def test_two_fields():
    assert minimal(REQUESTS, lambda found: found.get("stream") and found["return_logprob"]) == request(
        stream=True, return_logprob=True
    )


def test_places():
    """The head, then the earliest token."""
    places = strategies.places(9)
    assert minimal(places) == faults.AT_HEAD
    assert minimal(places, lambda where: where.spot is Spot.INSIDE_JSON) == faults.inside_json(1, 0)
    assert minimal(places, lambda where: where.token > 4) == faults.at_token(5)


def test_kills():
    """Fewer, then earlier."""
    kills = strategies.kill_plans(3, 9)
    assert minimal(kills) == ()
    assert minimal(kills, lambda found: len(found) > 1) == (0, 0)
    assert minimal(kills, lambda found: sum(found) > 3) == (4,)


def test_fault_plans():
    """Fewer, then milder."""
    plans = strategies.fault_plans(3, 9)

    def least(condition):
        return [(fault.where, fault.what) for fault in minimal(plans, condition).faults]

    assert least(lambda plan: True) == []
    assert least(lambda plan: plan.faults) == [(faults.AT_HEAD, CLOSE)]
    assert least(lambda plan: len(plan.faults) > 1) == [(faults.AT_HEAD, CLOSE)] * 2
    kills = least(lambda plan: any(fault.what is KILL_WORKER for fault in plan.faults))
    assert kills == [(faults.AT_HEAD, KILL_WORKER)]


def test_fragmentations():
    """Whole reads, then few cuts."""
    cuts = strategies.fragmentations()
    assert minimal(cuts) == WHOLE
    assert minimal(cuts, lambda found: found.largest) == Fragmentation(64)
    assert minimal(cuts, lambda found: len(found.sizes) > 2) == Fragmentation(None, (1, 1, 1))


def test_links():
    """No time, no limit; what it takes to fail comes alone."""
    links = strategies.links()
    assert minimal(links) == Link()
    assert minimal(links, lambda link: link.latency > 0.01) == Link(latency=0.05)
    assert minimal(links, lambda link: link.bandwidth) == Link(bandwidth=1e6)
    assert minimal(links, lambda link: link.buffer < 1000) == Link(buffer=100)
