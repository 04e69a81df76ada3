"""Workers come and go, in any order, while requests run through the whole proxy."""

from __future__ import annotations

from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from dyn_testkit.membership import Membership
from properties.prove import SEED


def test_workers_come_and_go():
    """The list is right, no request is lost while a healthy worker remains, and nothing is left behind."""
    machine = seed(SEED)(Membership)
    run_state_machine_as_test(machine, settings=settings(max_examples=50, stateful_step_count=20, deadline=None))
