"""What a URL is named for: a role, and a bootstrap port if one was given with it.

The processes of one proxy lose a worker that leaves at different times, each with the last of its own requests there.
All must take the next word about its URL alike, so what it was last named for outlives it.
"""

from __future__ import annotations

from typing import NamedTuple

from dyn_relay.config import Config
from dyn_relay.fleet.stage import roles_of
from dyn_relay.fleet.worker import Role, Worker
from dyn_relay.http11.origin import Origin

#: So many of those that have left are remembered, the last ones.
REMEMBERED = 4096


class Naming(NamedTuple):
    """A URL, and what it is for."""

    origin: Origin
    role: Role
    #: Of a prefill worker, if it is not to say so itself.
    bootstrap_port: int | None


class Namings:
    """Who was named for what, and what a new word about a URL means."""

    def __init__(self, config: Config) -> None:
        self._roles = roles_of(config)
        self._left: dict[Origin, Naming] = {}

    @property
    def left(self) -> tuple[Naming, ...]:
        """What those that have left were last named for."""
        return tuple(self._left.values())

    def remember(self, named: Naming) -> None:
        """It has left. Where workers are for one thing only there is nothing to remember."""
        if len(self._roles) == 1:
            return
        self._left.pop(named.origin, None)
        self._left[named.origin] = named
        if len(self._left) > REMEMBERED:
            del self._left[next(iter(self._left))]

    def settle(self, origin: Origin, worker: Worker | None, role: Role | None, port: int | None) -> Naming:
        """What the URL is for from now on; `worker`: the one that is there.

        No role, or the one that it has, with no port: as before. Raises `ValueError` for a role without a use, for none
        where none is known, and for another one than that of a worker that is to stay.
        """
        last = last_named(worker) if worker is not None else self._left.get(origin)
        if role is None:
            role = last.role if last is not None else self._only()
        if role not in self._roles:
            raise ValueError(f"must be {' or '.join(self._roles)} here, not {role}")
        if last is not None and role is last.role:
            return last._replace(bootstrap_port=port or last.bootstrap_port)
        if worker is not None and last is not None and worker.wanted:
            raise ValueError(f"{worker.id} is for {last.role}: it must leave before it can be for {role}")
        return Naming(origin, role, port)

    def _only(self) -> Role:
        if len(self._roles) > 1:
            raise ValueError(f"{' or '.join(self._roles)} is needed: it is not known what this URL is for")
        return self._roles[0]


def last_named(worker: Worker) -> Naming:
    """What it was named for, the last time that anybody named it."""
    return worker.renamed or Naming(worker.origin, worker.role, worker.bootstrap_port)
