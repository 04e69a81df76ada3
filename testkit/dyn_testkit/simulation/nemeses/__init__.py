"""Nemeses: what disturbs a simulated run, each with the proof that it did."""

from __future__ import annotations

from collections.abc import Mapping

from dyn_testkit.history import Harm
from dyn_testkit.simulation.nemeses.base import AUDITOR, Missed, Nemesis, Unproven, Validated
from dyn_testkit.simulation.nemeses.clients import Clients
from dyn_testkit.simulation.nemeses.cuts import OF_CALLS, Cut, Hound
from dyn_testkit.simulation.nemeses.legs import Legs
from dyn_testkit.simulation.nemeses.links import Links
from dyn_testkit.simulation.nemeses.proofs import PROOFS
from dyn_testkit.simulation.nemeses.sidecars import Sidecars
from dyn_testkit.simulation.nemeses.workers import Death, Illness, Rollout

#: The kinds that work again once they are undone, if nothing else befalls the same worker meanwhile.
LASTING = frozenset(
    {"stall", "lie", "busy", "drain", "partition", "refuse", "hang", "deaf"}
    | Death.faults
    | Legs.faults
    | Sidecars.faults
)

#: What of its worker suffers from each kind; of what clients do, of new weights and slowness, nothing.
HARMS: Mapping[str, tuple[Harm, ...]] = {
    "stall": ("attempts", "health", "answers", "dials"),
    # An engine at which no dial comes to anything is taken for dead by its sidecar, one that is silent is not.
    **dict.fromkeys([*Sidecars.faults, "partition"], ("attempts", "health", "answers", "dials", "lease")),
    **dict.fromkeys(Death.faults, ("attempts", "health", "answers", "dials", "lease", "engine")),
    # A leg is waited for: when the worker dies is not known beforehand.
    **dict.fromkeys(Legs.faults, ("attempts", "dials")),
    "drain": ("attempts", "health", "dials", "lease"),  # it ends with a death
    # Those of addresses strike new dials alone: a probe may have a connection yet.
    **dict.fromkeys(["refuse", "hang", "deaf"], ("attempts", "dials")),
    **dict.fromkeys([*Cut.faults, *Hound.faults, "busy", "lie", "reset"], ("attempts",)),
    **dict.fromkeys([*Clients.faults, "weights", "slow"], ()),
    "dawdle": ("clients",),
}

#: Who does what.
KINDS: Mapping[str, type[Nemesis]] = {
    kind: nemesis
    for nemesis in (Death, Illness, Rollout, Cut, Hound, Links, Clients, Legs, Sidecars)
    for kind in sorted(nemesis.faults)
}

#: The kinds that only pairs know.
OF_PAIRS = Legs.faults

#: The kinds that only workers know which are reached over gRPC.
OF_GRPC = OF_CALLS

#: The kinds that only workers know which are reached through sidecars.
OF_SIDECARS = Sidecars.faults

__all__ = [
    "AUDITOR",
    "HARMS",
    "KINDS",
    "LASTING",
    "OF_GRPC",
    "OF_PAIRS",
    "OF_SIDECARS",
    "PROOFS",
    "Missed",
    "Nemesis",
    "Unproven",
    "Validated",
]
