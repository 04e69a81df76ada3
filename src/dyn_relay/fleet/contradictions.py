"""What a worker says of itself against what it was named for: the log says when it begins, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from dyn_relay.fleet.worker import Role, Worker

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("fleet")

#: What each is, and what it comes to, for people.
MISPLACED = "worker says that it has another role than the one it was named for: it gets nothing"
OTHER_PORT = "worker says that it has another bootstrap port than the one it was named with, which counts"


def contradictions(worker: Worker) -> Mapping[str, Mapping[str, object]]:
    """Those that there are, with both sides of each."""
    says, found = worker.traits, dict[str, Mapping[str, object]]()
    if worker.misplaced:
        found[MISPLACED] = {"named": str(worker.role), "says": str(says.role)}
    ports = worker.bootstrap_port, says.bootstrap_port
    if worker.role is Role.PREFILL and says.role == Role.PREFILL and None not in ports and ports[0] != ports[1]:
        found[OTHER_PORT] = {"named": ports[0], "says": ports[1]}
    return found


def note(worker: Worker) -> None:
    """It has just described itself."""
    found = contradictions(worker)
    for what, sides in found.items():
        if what not in worker.noted:
            log.warning(what, worker=worker.id, url=worker.url, **sides)
    for what in worker.noted - found.keys():
        log.info(f"no longer: {what}", worker=worker.id, url=worker.url)
    worker.noted = frozenset(found)
