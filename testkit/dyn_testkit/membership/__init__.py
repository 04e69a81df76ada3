"""A state machine for the membership of a fleet: Hypothesis looks for the shortest program that a router gets wrong.

    class TestMyRouter(Membership.TestCase): ...  # for this project's own

    class Mine(Membership):
        factory = staticmethod(my_router)  # a `RouterFactory` of dyn_testkit.simulation.router

    TestMine = Mine.TestCase

`machine.py` has the steps and what must hold after each, `world.py` what they act upon. It needs Hypothesis.
"""

from dyn_testkit.membership.machine import Membership
from dyn_testkit.membership.world import Broken, World

__all__ = ["Broken", "Membership", "World"]
