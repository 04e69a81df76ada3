"""What a process that takes a dead one's place is told by another: what no configuration says."""

from __future__ import annotations

import msgspec

from dyn_relay.fleet.discovery.discovery import Discovery
from dyn_relay.fleet.discovery.leased import Leased, Leases
from dyn_relay.fleet.naming import Naming, last_named
from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.rejoin import Standing
from dyn_relay.fleet.worker import Role, Worker
from dyn_relay.http11.origin import Origin


class Member(msgspec.Struct):
    """A worker; see `Worker` for the fields."""

    url: str
    named_by: list[str]
    standing: Standing
    epoch: str | None
    role: Role
    bootstrap_port: int | None
    welcome: bool


class Past(msgspec.Struct):
    """What a URL was last named for that has left, or is leaving."""

    url: str
    role: Role
    bootstrap_port: int | None


class Told(msgspec.Struct):
    """One process's view."""

    workers: list[Member]
    left: list[Past]
    #: Whom each source of discovery names, as it was last heard: only its changes act.
    named: dict[str, list[str]]
    leases: Leases
    #: No attempt is to begin.
    paused: bool


def tell(fleet: Fleet, discovery: Discovery, leased: Leased) -> Told:
    """This process's."""
    members = [_member(worker) for worker in fleet.workers if worker.wanted]
    leaving = [last_named(worker) for worker in fleet.workers if not worker.wanted]
    left = [Past(str(one.origin), one.role, one.bootstrap_port) for one in (*fleet.namings.left, *leaving)]
    return Told(members, left, discovery.named(), leased.tell(), fleet.paused)


def _member(worker: Worker) -> Member:
    """As it is, or as it will be once it has joined anew."""
    named, stays = last_named(worker), worker.renamed is None
    return Member(
        url=worker.url,
        named_by=sorted(worker.named_by),
        standing=worker.standing if stays else Standing.KNOWN,
        epoch=worker.epoch if stays else None,
        role=named.role,
        bootstrap_port=named.bootstrap_port,
        welcome=worker.welcome and stays,
    )


def learn(told: Told, fleet: Fleet, discovery: Discovery, leased: Leased) -> None:
    """Begin where another process is."""
    for one in told.left:
        fleet.namings.remember(Naming(Origin.parse(one.url), one.role, one.bootstrap_port))
    for member in told.workers:
        worker = fleet.add(member.url, role=member.role, bootstrap_port=member.bootstrap_port)
        worker.named_by = set(member.named_by)
        worker.standing, worker.epoch, worker.welcome = member.standing, member.epoch, member.welcome
    discovery.recall(told.named)
    leased.recall(told.leases)
    fleet.pause(told.paused)
