"""The policies by name, as `--policy` spells them."""

from __future__ import annotations

import random
from collections.abc import Callable

from dyn_relay.config import Config
from dyn_relay.fleet.policies.base import Policy
from dyn_relay.fleet.policies.kv_aware import KvAware
from dyn_relay.fleet.policies.least_loaded import LeastLoaded
from dyn_relay.fleet.policies.power_of_two import PowerOfTwo
from dyn_relay.fleet.policies.round_robin import RoundRobin
from dyn_relay.fleet.policies.uniform import Uniform

#: Made of the configuration, a source of chance, and a clock in seconds.
POLICIES: dict[str, Callable[[Config, random.Random, Callable[[], float]], Policy]] = {
    "least_loaded": lambda config, rng, clock: LeastLoaded(),
    "round_robin": lambda config, rng, clock: RoundRobin(),
    "random": lambda config, rng, clock: Uniform(rng),
    "power_of_two": lambda config, rng, clock: PowerOfTwo(rng),
    "kv_aware": KvAware,
}
