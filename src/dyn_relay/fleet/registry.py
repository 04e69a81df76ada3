"""The fleet: who is in it, how they are, and who gets the next attempt.

For the relay: `choose_now` (or `pick`), `lease`, `trial`, `report` and `ask`; `poison.py` tells the order. For control:
`add`, `remove`, `workers`, `get`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence

import structlog
import trio

from dyn_relay.config import Config
from dyn_relay.fleet.health import Examiner, Fetch, Probe, Watch
from dyn_relay.fleet.poison import NotYet, PoisonRegister, Probation, SuspectedPoison, Trial
from dyn_relay.fleet.policies.base import Ask
from dyn_relay.fleet.policies.catalog import POLICIES
from dyn_relay.fleet.target import Lease, Target
from dyn_relay.fleet.worker import Signal, State, Worker
from dyn_relay.formats.base import Format
from dyn_relay.http11.client import Origin, Pool, fetch

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("fleet")

#: Who is asked when no worker is ready: a proxy that answers "no worker" while one of them might work helps nobody.
#: The dead come last, since a dial there is all but lost.
TIERS: tuple[frozenset[State], ...] = (
    frozenset({State.READY}),
    frozenset({State.STARTING, State.UNREADY, State.SUSPECT}),
    frozenset({State.DEAD}),
)


#: Seconds between two counts of the tokens that live answers hold.
RECOUNT = 1.0
#: At most this share of the workers tries suspects at a time; the others serve the rest undisturbed.
QUARANTINE_SHARE = 0.5


#: An attempt of which nothing is known.
ANY = Ask()


def _anybody(worker: Worker) -> bool:
    return True


class Fleet:
    """All workers. `add`ed ones are probed while `run` runs.

    `clock` gives seconds, `rng` decides what is left to chance, `on_poison` is told of each step in `poison.py`.
    """

    def __init__(
        self,
        config: Config,
        format: Format,
        pool: Pool,
        clock: Callable[[], float] = trio.current_time,
        rng: random.Random | None = None,
        *,
        fetch: Fetch = fetch,
        on_poison: Callable[[str], None] = lambda event: None,
    ) -> None:
        self.config = config
        self._clock = clock
        self._examiner = Examiner(config, format, pool, fetch)
        #: Chooses; `Fleet.run` runs it.
        self.policy = POLICIES[config.policy](config, rng or random.Random(config.seed), clock)
        self._recounted = -math.inf
        self._workers: dict[str, Worker] = {}
        self._watches: dict[str, Watch] = {}
        self._joined = 0
        self._nursery: trio.Nursery | None = None
        self._waiting = trio.lowlevel.ParkingLot()  # suspects that wait for a worker of their own
        register = PoisonRegister(config.suspect_attempts, config.poison_ttl_secs, clock)
        self._probation = Probation(register, self._changed, on_poison)

    # -- membership

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Everybody, draining ones included, in the order of joining."""
        return tuple(self._workers.values())

    @property
    def staying(self) -> tuple[Worker, ...]:
        """Everybody but the draining ones."""
        return tuple(worker for worker in self._workers.values() if worker.state is not State.DRAINING)

    def get(self, id_or_url: str) -> Worker | None:
        """A worker by id or URL."""
        if id_or_url in self._workers:
            return self._workers[id_or_url]
        try:
            origin = Origin.parse(id_or_url)
        except ValueError:
            return None
        return next((worker for worker in self._workers.values() if worker.origin == origin), None)

    def add(self, url: str) -> Worker:
        """Let a worker join; the one that is there if the URL is known. Raises `ValueError` for a bad URL."""
        origin = Origin.parse(url)
        worker = self.get(url)
        if worker is not None:
            if worker.apply(Signal.REJOIN, "", self._clock()):
                self._watches[worker.id].alarm()
            return worker
        self._joined += 1
        worker = Worker(id=f"w{self._joined}", number=self._joined, origin=origin, since=self._clock())
        self._workers[worker.id] = worker
        watch = self._watches[worker.id] = Watch(worker, self._examiner, self._clock, self._changed)
        log.info("worker joined", worker=worker.id, url=worker.url)
        if self._nursery is not None:
            self._nursery.start_soon(watch.run)
        self._changed()
        return worker

    def remove(self, id_or_url: str, drain: bool = True) -> Worker:
        """Let a worker leave: no new attempts. `drain`: it stays listed until its live ones end. Raises `KeyError`.

        Never ends a live attempt.
        """
        worker = self.get(id_or_url)
        if worker is None:
            raise KeyError(id_or_url)
        worker.apply(Signal.DRAIN, "", self._clock())
        if not drain or worker.in_flight == 0:
            self._forget(worker)
        self._changed()
        return worker

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Probe everybody until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                for watch in self._watches.values():
                    nursery.start_soon(watch.run)
                nursery.start_soon(self.policy.run, self)
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    # -- choosing

    def pick(
        self, exclude: Collection[str] = frozenset(), accept: Callable[[Worker], bool] = _anybody, ask: Ask = ANY
    ) -> Target | None:
        """The policy's choice among the targets of the best workers that are not excluded, not draining, and accepted.

        `exclude`: ids of workers or targets. Ready workers if there is any, else the others. None only if nobody is
        left. Take the lease before awaiting.
        """
        candidates = self._candidates(exclude, accept)
        if self.wary:
            # A suspect's turn must be short, since others wait for theirs: let its worker's queue run empty.
            candidates = [w for w in candidates if not self._probation.on_trial_at(w.id)] or candidates
        return self._choose(candidates, exclude, ask)

    def choose_now(
        self,
        fingerprint: bytes,
        exclude: Collection[str] = frozenset(),
        accept: Callable[[Worker], bool] = _anybody,
        ask: Ask = ANY,
        *,
        proven: bool = False,
    ) -> Target | None:
        """`pick`, but a suspect only gets a worker that can try it alone.

        `proven`: the request has given tokens, so that nothing is held against it. Raises `SuspectedPoison` for a
        convicted one, `NotYet` for a suspect that has to wait for `changed`.
        """
        register = self._probation.register
        if proven or not register.suspicion(fingerprint):
            return self.pick(exclude, accept, ask)
        if register.convicted(fingerprint):
            raise SuspectedPoison
        candidates = self._candidates(exclude, accept)
        free = [worker for worker in candidates if self._probation.may_begin(fingerprint, worker.id)]
        on_trial = sum(self._probation.on_trial_at(worker.id) for worker in candidates)
        if candidates and (not free or on_trial >= math.ceil(len(candidates) * QUARANTINE_SHARE)):
            raise NotYet
        return self._choose(free, exclude, ask)

    async def changed(self) -> None:
        """Return when a worker has joined, left, moved or described itself, or a suspect was let go.

        One that was told `NotYet` may have better luck then.
        """
        await self._waiting.park()

    @property
    def wary(self) -> bool:
        """True while anything is held against any request; only then do fingerprints matter."""
        return len(self._probation.register) > 0

    def lease(self, target: Target, generations: int = 1, tokens: Callable[[], int] = lambda: 0) -> Lease:
        """The attempt's claim on the target, for so many answers: `with fleet.lease(target):`.

        `tokens`: those that the engine holds for them at the moment.
        """
        return Lease(target, self._released, generations, tokens)

    def trial(self, worker: Worker, fingerprint: bytes, *, proven: bool = False) -> Trial:
        """The attempt's part in finding poison: `with fleet.trial(worker, fingerprint) as trial:`."""
        return self._probation.trial(worker.id, fingerprint, proven=proven)

    # -- evidence

    def report(self, worker: Worker, ok: bool, cause: str = "", kind: str = "") -> None:
        """What an attempt has seen of its worker.

        Not ok: it could not connect, was cut, stalled, or got a 5xx (`kind`, for the log; `cause` in words). The worker
        is left out at once and probed. Ok: it ended well. An answer of 4xx or "busy" says nothing: do not report it.
        """
        if ok:
            worker.served += 1
            changed = worker.apply(Signal.WORKED, "", self._clock())
        else:
            worker.failures += 1
            changed = worker.apply(Signal.FAILED, ": ".join(filter(None, (kind, cause))), self._clock())
            # Only the first failure hurries the probe: a dead worker's hundred streams must not make a hundred probes.
            if changed and worker.id in self._watches:
                self._watches[worker.id].alarm()
        if changed:
            self._changed()

    def restarted(self, worker: Worker, cause: str) -> None:
        """Somebody has seen that it is a new process."""
        log.warning("worker restarted", worker=worker.id, url=worker.url, cause=cause)
        self.policy.forget(worker)
        if worker.id in self._watches:
            self._watches[worker.id].alarm()

    async def ask(self, worker: Worker) -> Probe:
        """Probe the worker now and return what it says, for a stalled stream or a cut. Shares one probe with others.

        Takes up to twice the probe's timeout; cancel it to wait less.
        """
        watch = self._watches.get(worker.id)
        return Probe(False, cause="no longer probed") if watch is None else await watch.ask()

    async def lives(self, worker: Worker) -> bool:
        """After a failure: does the worker answer at all? False within a few seconds if it does not."""
        watch = self._watches.get(worker.id)
        return watch is not None and await watch.lives()

    async def relearn(self, workers: Iterable[Worker]) -> None:
        """Read the infos of those that listen again, unless that was done just now."""
        watches = [self._watches[one.id] for one in workers if one.state is not State.DEAD and one.id in self._watches]
        async with trio.open_nursery() as nursery:
            for watch in watches:
                nursery.start_soon(watch.relearn)

    # -- inside

    def _changed(self) -> None:
        """Who waits for `changed` may be able to go on."""
        self._waiting.unpark_all()

    def _choose(self, workers: Sequence[Worker], exclude: Collection[str], ask: Ask) -> Target | None:
        targets = [target for worker in workers for target in worker.targets if target.id not in exclude]
        if not targets:
            return None
        if self._clock() - self._recounted >= RECOUNT:
            self._recounted = self._clock()
            for worker in self._workers.values():
                worker.recount()
        return self.policy.choose(targets, ask)

    def _candidates(self, exclude: Collection[str], accept: Callable[[Worker], bool]) -> list[Worker]:
        self._parole()
        usable = [w for w in self._workers.values() if w.id not in exclude and accept(w)]
        usable = [worker for worker in usable if not worker.locked] or usable
        for tier in TIERS:
            found = [worker for worker in usable if worker.state in tier]
            if found:
                return found
        return []

    def _parole(self) -> None:
        """Let suspects back in whose time is over and of whom no probe has said anything bad meanwhile."""
        now = self._clock()
        for worker in self._workers.values():
            over = now - worker.since >= self.config.inhibited_duration_secs
            if worker.state is State.SUSPECT and over and worker.bad_probes <= 1:
                worker.apply(Signal.PAROLE, "", now)

    def _released(self, target: Target) -> None:
        worker = target.worker
        if worker.state is State.DRAINING and worker.in_flight == 0 and self._workers.get(worker.id) is worker:
            self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        del self._workers[worker.id]
        self._watches.pop(worker.id).stop()
        self.policy.forget(worker)
        log.info("worker left", worker=worker.id, url=worker.url)
