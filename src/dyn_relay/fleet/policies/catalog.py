"""The policies by name, as `--policy` spells them."""

from __future__ import annotations

import random
from collections.abc import Callable

from dyn_relay.fleet.policies.base import Policy
from dyn_relay.fleet.policies.least_loaded import LeastLoaded
from dyn_relay.fleet.policies.power_of_two import PowerOfTwo
from dyn_relay.fleet.policies.round_robin import RoundRobin
from dyn_relay.fleet.policies.uniform import Uniform

POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "least_loaded": lambda rng: LeastLoaded(),
    "round_robin": lambda rng: RoundRobin(),
    "random": Uniform,
    "power_of_two": PowerOfTwo,
}
