"""What disturbs a run: the protocol of a nemesis, and the wrapper that lets none get away without having done it.

A nemesis offers some kinds of faults. The run calls `setup` once, then for each planned fault `invoke`, waits, and
calls `teardown`. `Validated` stands between the two: it holds both to the protocol, looks for the fault with its own
eyes once it should be there, and again once it should be gone. What it finds is the proof that the history keeps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dyn_testkit.simulation.scenario import PlannedFault
    from dyn_testkit.simulation.world import World


#: The rid of whoever looks for faults from the outside; nothing befalls its requests.
AUDITOR = "auditor"


class Missed(Exception):
    """There was nothing to strike (no live request, a worker that is dead already): the fault did not happen."""


class Unproven(AssertionError):
    """A nemesis says that it did something, but nothing of it can be seen; or it is still there after its end."""


class Nemesis(Protocol):
    """Something that disturbs a fleet."""

    @property
    def faults(self) -> frozenset[str]:
        """The kinds of faults that it offers."""

    async def setup(self, world: World) -> None:
        """Called once, before the first request."""

    async def invoke(self, world: World, fault: PlannedFault) -> None:
        """Do it. Raises `Missed`."""

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """Undo it: what can be undone works again when this returns."""


#: Looks for a fault from the outside; says what was seen, "" if it is not there.
Proof = Callable[["World", "PlannedFault"], Awaitable[str]]


class Validated:
    """A nemesis that is watched. `proofs` has an entry for each kind."""

    def __init__(self, nemesis: Nemesis, proofs: Mapping[str, Proof], lasting: frozenset[str]) -> None:
        """`lasting`: the kinds whose effect must be gone after `teardown`; the others are over at once, or for good.

        Raises `ValueError` if a kind has no proof.
        """
        unproven = sorted(nemesis.faults - proofs.keys())
        if unproven:
            raise ValueError(f"{type(nemesis).__name__}: nothing would prove {', '.join(unproven)}")
        self._nemesis = nemesis
        self._proofs = proofs
        self._lasting = lasting
        self._ready = False

    @property
    def faults(self) -> frozenset[str]:
        """As the nemesis."""
        return self._nemesis.faults

    async def setup(self, world: World) -> None:
        """Once."""
        assert not self._ready, f"{type(self._nemesis).__name__} is set up twice"
        await self._nemesis.setup(world)
        self._ready = True

    async def invoke(self, world: World, fault: PlannedFault) -> str:
        """Do it and return the proof. Raises `Missed`, `Unproven`."""
        assert self._ready, f"{type(self._nemesis).__name__} is not set up"
        assert fault.kind in self.faults, f"{type(self._nemesis).__name__} does not offer {fault.kind}"
        await self._nemesis.invoke(world, fault)
        seen = await self._proofs[fault.kind](world, fault)
        if not seen:
            raise Unproven(f"{fault.kind} of {world.name(fault)} was invoked, but nothing is to be seen of it")
        return seen

    async def teardown(self, world: World, fault: PlannedFault) -> None:
        """Undo it. Raises `Unproven` if it is still there."""
        await self._nemesis.teardown(world, fault)
        if fault.kind in self._lasting:
            seen = await self._proofs[fault.kind](world, fault)
            if seen:
                raise Unproven(f"{fault.kind} of {world.name(fault)} was undone, but {seen}")
