"""What workers are for: one role for all, or prefill and decode; and who chooses among those of a role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from dyn_relay.config import Config
from dyn_relay.config.checks import urls_and_ports
from dyn_relay.fleet.worker import Role, Worker
from dyn_relay.http11.origin import Origin

if TYPE_CHECKING:
    from dyn_relay.fleet.policies.base import Members


def roles_of(config: Config) -> tuple[Role, ...]:
    """What a worker can be named for."""
    return (Role.PREFILL, Role.DECODE) if config.pd_disaggregation else (Role.REGULAR,)


def policies_of(config: Config) -> Mapping[Role, str]:
    """The parts that there are, and the name of each one's policy."""
    names = {
        Role.REGULAR: config.policy,
        Role.PREFILL: config.prefill_policy or config.policy,
        Role.DECODE: config.decode_policy or config.policy,
    }
    return {role: names[role] for role in (*roles_of(config), *([Role.REGULAR] if config.decode_fallback else []))}


class Named(NamedTuple):
    """A worker, as it is named by whoever wants it in the fleet."""

    origin: Origin
    #: What it is for; None: the only thing that there is.
    role: Role | None = None
    #: Of a prefill worker, where it does not say so itself.
    bootstrap_port: int | None = None
    #: It was there before, and may be another process now, with other weights.
    back: bool = False
    #: Which of several processes at that URL names it, if it says so.
    instance: str = ""


def configured(config: Config) -> list[Named]:
    """The workers that the configuration names. Raises `ValueError` for a bad URL."""
    found = [Named(Origin.parse(url)) for url in config.worker_urls]
    found += [Named(origin, Role.PREFILL, port) for origin, port in urls_and_ports(config.prefill)]
    return found + [Named(Origin.parse(url), Role.DECODE) for url in config.decode]


class Stage:
    """The workers of one part, for the policy that follows them."""

    def __init__(self, fleet: Members, role: Role) -> None:
        self._fleet = fleet
        self._role = role

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of them."""
        return tuple(worker for worker in self._fleet.workers if worker.part is self._role)

    async def changed(self) -> None:
        """Return when something has changed, here or elsewhere."""
        await self._fleet.changed()

    def restarted(self, worker: Worker, cause: str) -> None:
        """The policy has seen, by `cause`, that the worker is a new process."""
        self._fleet.restarted(worker, cause)
