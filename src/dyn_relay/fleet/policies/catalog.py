"""The policies by name, as `--policy` spells them."""

from __future__ import annotations

import random
from collections.abc import Callable

from dyn_relay.config import Config
from dyn_relay.fleet.policies.balance import Guard
from dyn_relay.fleet.policies.base import Policy
from dyn_relay.fleet.policies.cache_aware import CacheAware
from dyn_relay.fleet.policies.consistent_hashing import ConsistentHashing
from dyn_relay.fleet.policies.kv_aware import KvAware
from dyn_relay.fleet.policies.least_loaded import LeastLoaded
from dyn_relay.fleet.policies.manual import Manual
from dyn_relay.fleet.policies.power_of_two import PowerOfTwo
from dyn_relay.fleet.policies.round_robin import RoundRobin
from dyn_relay.fleet.policies.uniform import Uniform


def _guard(config: Config) -> Guard:
    return Guard(config.balance_abs_threshold, config.balance_rel_threshold)


#: Made of the configuration, a source of chance, and a clock in seconds.
POLICIES: dict[str, Callable[[Config, random.Random, Callable[[], float]], Policy]] = {
    "least_loaded": lambda config, rng, clock: LeastLoaded(),
    "round_robin": lambda config, rng, clock: RoundRobin(),
    "random": lambda config, rng, clock: Uniform(rng),
    "power_of_two": lambda config, rng, clock: PowerOfTwo(rng),
    "consistent_hashing": lambda config, rng, clock: ConsistentHashing(_guard(config), clock),
    "cache_aware": lambda config, rng, clock: CacheAware(
        _guard(config), config.cache_threshold, config.cache_index_bytes
    ),
    "kv_aware": KvAware,
    "manual": lambda config, rng, clock: Manual(clock),
}
