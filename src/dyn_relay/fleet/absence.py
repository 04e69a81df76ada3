"""Why nobody can be asked, in words: which part of a request has no worker, and who might have been one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dyn_relay.fleet.rejoin import Standing
from dyn_relay.fleet.worker import TIER, Role, Worker

#: Misplaced workers that are named, at most.
SHOWN = 10


def absent(workers: Sequence[Worker], roles: Iterable[Role]) -> str:
    """Of these roles, those that no worker can play now; empty if there is none."""
    lacking = [role for role in roles if not any(_askable(one, role) for one in workers)]
    return "; ".join(_words(role, [one for one in workers if one.role is role]) for role in lacking)


def _askable(worker: Worker, role: Role) -> bool:
    well = worker.state in TIER and worker.standing is not Standing.AWAY
    return well and worker.part is role and not worker.misplaced


def _words(role: Role, named: Sequence[Worker]) -> str:
    """`named`: who was named for it."""
    kind = "worker" if role is Role.REGULAR else f"{role} worker"
    return f"no {kind} is available{_those(named)}"


def _those(workers: Sequence[Worker]) -> str:
    misplaced = [one for one in workers if one.misplaced]
    others = Counter(str(one.state) for one in workers if not one.misplaced)
    words = [f"{count} {state}" for state, count in others.items()]
    if misplaced:
        says = ", ".join(f"{one.url} says {one.traits.role}" for one in misplaced[:SHOWN])
        words.insert(0, f"{len(misplaced)} misplaced: {says}")
    return f" ({'; '.join(words)})" if words else ""
