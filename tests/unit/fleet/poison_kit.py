"""Four workers, and requests of which some kill the worker that they are tried on."""

from __future__ import annotations

import trio
from scripted_engines import choose, claim, make_fleet, ready

from dyn_relay.fleet.poison import Finding, SuspectedPoison
from dyn_relay.fleet.registry import Fleet
from dyn_relay.fleet.worker import Worker

URLS = tuple(f"http://w{n}:1" for n in (1, 2, 3, 4))


class World:
    """Four workers; requests that are poison kill the one they are tried on once everybody there is in place."""

    def __init__(self, poison: set[bytes] = frozenset(), **options: object) -> None:  # type: ignore[assignment]
        self.fleet: Fleet = make_fleet(urls=URLS, **options)
        self.poison = poison
        self.died: dict[str, trio.Event] = {worker.id: trio.Event() for worker in ready(self.fleet)}
        self.outcomes: dict[str, str] = {}
        self.busiest = 0
        self.on_trial: dict[str, int] = {}

    @property
    def dead(self) -> list[str]:
        return [worker for worker, event in self.died.items() if event.is_set()]

    async def request(self, name: str, fingerprint: bytes, first: Worker | None = None) -> None:
        """One logical request, as the relay runs it, to its first token."""
        excluded: set[str] = set()
        worker: Worker | None = first
        while True:
            try:
                worker = worker or await choose(self.fleet, fingerprint, excluded)
            except SuspectedPoison:
                self.outcomes[name] = "refused"
                return
            if worker is None:
                self.outcomes[name] = "no worker"
                return
            finding = await self.attempt(worker, fingerprint)
            if finding is None or finding is Finding.CONVICTED:
                self.outcomes[name] = "token" if finding is None else "convicted"
                return
            excluded.add(worker.id)
            worker = None

    async def attempt(self, worker: Worker, fingerprint: bytes) -> Finding | None:
        died = self.died[worker.id]
        with claim(self.fleet, worker), self.fleet.trial(worker, fingerprint=fingerprint) as trial:
            if trial.suspect:
                self.on_trial[worker.id] = self.on_trial.get(worker.id, 0) + 1
                self.busiest = max(self.busiest, self.on_trial[worker.id])
            try:
                for _ in range(5):  # everybody takes a place before anything happens
                    await trio.lowlevel.checkpoint()
                if fingerprint in self.poison:
                    self.fleet.report(worker, False, "end of stream", "cut")
                    died.set()
                for _ in range(5):
                    await trio.lowlevel.checkpoint()
                if died.is_set():
                    return trial.died()
                trial.token()
                return None
            finally:
                if trial.suspect:
                    self.on_trial[worker.id] -= 1
