"""What a process that takes a dead one's place is told by another: what no configuration says."""

from __future__ import annotations

import msgspec

from dyn_relay.fleet.discovery.discovery import Discovery
from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.rejoin import Standing
from dyn_relay.fleet.worker import Role, State


class Member(msgspec.Struct):
    """A worker; see `Worker` for the fields."""

    url: str
    named_by: list[str]
    standing: Standing
    epoch: str | None
    role: Role
    bootstrap_port: int | None
    welcome: bool


class Told(msgspec.Struct):
    """One process's view."""

    workers: list[Member]
    #: Whom each source of discovery names, as it was last heard: only its changes act.
    named: dict[str, list[str]]
    #: No attempt is to begin.
    paused: bool


def tell(fleet: Fleet, discovery: Discovery) -> Told:
    """This process's."""
    members = [
        Member(
            url=worker.url,
            named_by=sorted(worker.named_by),
            standing=worker.standing,
            epoch=worker.epoch,
            role=worker.role,
            bootstrap_port=worker.bootstrap_port,
            welcome=worker.welcome,
        )
        for worker in fleet.workers
        if worker.state is not State.DRAINING
    ]
    return Told(members, discovery.named(), fleet.paused)


def learn(told: Told, fleet: Fleet, discovery: Discovery) -> None:
    """Begin where another process is."""
    for member in told.workers:
        worker = fleet.add(member.url, role=member.role, bootstrap_port=member.bootstrap_port)
        worker.named_by = set(member.named_by)
        worker.standing, worker.epoch, worker.welcome = member.standing, member.epoch, member.welcome
    discovery.recall(told.named)
    fleet.pause(told.paused)
