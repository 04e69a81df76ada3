"""A session stays where it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dyn_relay.fleet.policies.base import Ask, Policy
from dyn_relay.fleet.policies.least_loaded import LeastLoaded
from dyn_relay.fleet.policies.pins import Pins
from dyn_relay.fleet.target import Target


class Manual(Policy):
    """A key goes where it went before, whatever the load; it moves only when it must, and begins where load is least.

    As SMG's policy of that name: workers that join take no sessions from others. What has no key goes by load.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._pins = Pins(clock)
        self._by_load = LeastLoaded()

    def choose(self, candidates: Sequence[Target], ask: Ask) -> Target:
        if not ask.key:
            return self._by_load.choose(candidates, ask)
        held = self._pins.get(ask.key)
        for target in candidates:
            if target.id == held:
                return target
        target = self._by_load.choose(candidates, ask)
        self._pins.set(ask.key, target.id)
        return target
