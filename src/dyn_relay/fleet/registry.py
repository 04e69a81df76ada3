"""The fleet: who is in it, how they are, and who gets the next attempt.

For the relay: `choose_now` (or `pick`), `lease`, `trial`, `report`, `full`, `ask` and `lives`; `poison.py` tells the
order. For who empties a worker: `leaving`, `has_room`, `look`. For control: `add`, `remove`, `admit`, `pause`,
`workers`, `get`. For discovery: `add` and `withdraw`.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Collection, Iterable

import structlog
import trio

from dyn_relay.config import Config
from dyn_relay.fleet.breaker import Breaker
from dyn_relay.fleet.calm import Calm
from dyn_relay.fleet.health import Examiner, Fetch, Probe, Watch
from dyn_relay.fleet.keeper import Keeper
from dyn_relay.fleet.naming import Naming, Namings, last_named
from dyn_relay.fleet.poison import NotYet, PoisonRegister, Probation, SuspectedPoison, Trial
from dyn_relay.fleet.policies.base import Ask
from dyn_relay.fleet.policies.catalog import POLICIES
from dyn_relay.fleet.selection import Selection
from dyn_relay.fleet.stage import Stage, policies_of
from dyn_relay.fleet.target import Lease, Target, no_tokens
from dyn_relay.fleet.worker import TIERS, Role, Signal, State, Worker
from dyn_relay.formats.base import Format
from dyn_relay.http11.client import Origin, Pool, fetch

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("fleet")

#: At most this share of the workers tries suspects at a time; the others serve the rest undisturbed.
QUARANTINE_SHARE = 0.5
#: Who names a worker that was added over the control endpoints.
HAND = "hand"
#: An attempt of which nothing is known.
ANY = Ask()


def _anybody(worker: Worker) -> bool:
    return True


class Fleet:
    """All workers. `add`ed ones are probed while `run` runs.

    `clock` gives seconds, `rng` decides what is left to chance, `on_poison` is told of each step in `poison.py`,
    `on_move` of a worker's old and new state.
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
        on_move: Callable[[State, State], None] = lambda before, after: None,
        on_leave: Callable[[Origin], None] = lambda origin: None,
    ) -> None:
        self.config = config
        self._clock = clock
        self._examiner = Examiner(config, format, pool, fetch)
        #: Who chooses among the workers of a role; `Fleet.run` runs them.
        self.policies = {
            role: POLICIES[name](config, rng or random.Random(config.seed), clock)
            for role, name in policies_of(config).items()
        }
        self._keeper = Keeper(
            config, clock, lambda: self.staying, self.relearn, moved=self._moved, renewed=self._renewed
        )
        self._on_move = on_move
        self._on_leave = on_leave
        self.namings = Namings(config)
        self._workers: dict[str, Worker] = {}
        self._selection = Selection(self._workers, self.policies, self._keeper, clock)
        self._watches: dict[str, Watch] = {}
        self._joined = 0
        self._nursery: trio.Nursery | None = None
        self._waiting = trio.lowlevel.ParkingLot()  # suspects that wait for a worker of their own, and others
        self._paused = False
        self.calm = Calm(config.abort_settle_secs, clock, self._unpaused)
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

    @property
    def ready(self) -> int:
        """How many are `READY`."""
        return sum(worker.state in TIERS[0] for worker in self._workers.values())

    @property
    def able(self) -> bool:
        """For each part of a request, or for all of it, somebody is well, or on trial."""
        up = [one for one in self._workers.values() if one.healthy or one.state is State.HALF_OPEN]
        parts = {worker.part for worker in up if not worker.misplaced}
        return {Role.PREFILL, Role.DECODE} <= parts or Role.REGULAR in parts

    def get(self, id_or_url: str) -> Worker | None:
        """A worker by id or URL."""
        if id_or_url in self._workers:
            return self._workers[id_or_url]
        try:
            origin = Origin.parse(id_or_url)
        except ValueError:
            return None
        return next((worker for worker in self._workers.values() if worker.origin == origin), None)

    def is_name_of(self, name: str, url: str) -> bool:
        """Would a worker at the URL have this id, or is it its URL? Ids that are counted are nobody's beforehand."""
        try:
            origin = Origin.parse(url)
            return self.config.processes > 1 and (self._name(origin) == name or Origin.parse(name) == origin)
        except ValueError:
            return False

    def add(
        self,
        url: str,
        by: str = HAND,
        role: Role | None = None,
        bootstrap_port: int | None = None,
        *,
        back: bool = False,
    ) -> Worker:
        """Let a worker join; the one that is there if the URL is known. Raises `ValueError` for a bad URL.

        `by`: who names it. It stays as long as anybody does. One that an operator names is let in, see `admit`. `role`:
        what it is for; None: what it was named for before, or the only thing that workers are for here. One that is
        leaving, and is named for another role, joins anew for that once its last attempt has ended. Raises `ValueError`
        for a role without a use, and for another one than that of a worker that stays. `back`: it was away, and is
        judged as one that was.
        """
        origin = Origin.parse(url)
        worker = self.get(url)
        named = self.namings.settle(origin, worker, role, bootstrap_port)
        if worker is None:
            worker = self._join(named, {by})
            if back:
                self._keeper.away(worker)
            return worker
        worker.named_by.add(by)
        if named.role is not worker.role:
            log.info("worker is named anew", worker=worker.id, url=worker.url, role=named.role, was=worker.role)
            worker.renamed = named
            return worker
        worker.renamed, worker.bootstrap_port = None, named.bootstrap_port
        if self._keeper.move(worker, Signal.REJOIN):
            self._watches[worker.id].alarm()
        return self.admit(worker.id) if by == HAND else worker

    def remove(self, id_or_url: str, drain: bool = True) -> Worker:
        """Let a worker leave: no new attempts. `drain`: it stays listed until its live ones end. Raises `KeyError`.

        Never ends a live attempt.
        """
        worker = self.get(id_or_url)
        if worker is None:
            raise KeyError(id_or_url)
        worker.named_by.clear()
        self._keeper.move(worker, Signal.DRAIN)
        if not drain or worker.in_flight == 0:
            self._forget(worker)
        else:
            self._changed()
        return worker

    def withdraw(self, url: str, by: str) -> None:
        """One that named a worker names it no more: it leaves, as with `remove`, if nobody else does."""
        worker = self.get(url)
        if worker is not None and by in worker.named_by:
            worker.named_by.remove(by)
            if not worker.named_by:
                self.remove(worker.id)

    def admit(self, id_or_url: str) -> Worker:
        """Whatever weights it has, or comes back with, it may serve: see `rejoin.py`. Raises `KeyError`."""
        worker = self.get(id_or_url)
        if worker is None:
            raise KeyError(id_or_url)
        self._keeper.admit(worker)
        self._watches[worker.id].alarm()
        return worker

    def leaving(self, worker: Worker) -> bool:
        """It gets no new attempts, and goes when its last one has ended."""
        return worker.state is State.DRAINING and self._workers.get(worker.id) is worker

    @property
    def paused(self) -> bool:
        """No attempt is to begin."""
        return self._paused

    def pause(self, on: bool) -> None:
        """Let no attempt begin until further notice, or end that."""
        self._paused = on
        self._changed()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Probe everybody until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                for watch in self._watches.values():
                    nursery.start_soon(watch.run)
                for role, policy in self.policies.items():
                    nursery.start_soon(policy.run, Stage(self, role))
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    # -- choosing

    def has_room(self, exclude: Collection[str], accept: Callable[[Worker], bool]) -> bool:
        """Would `pick` find a target at a worker that is well?"""
        return self._selection.has_room(exclude, accept)

    def pick(
        self, exclude: Collection[str] = frozenset(), accept: Callable[[Worker], bool] = _anybody, ask: Ask = ANY
    ) -> Target | None:
        """The policy's choice among the targets of the best workers that are not excluded, and accepted.

        `exclude`: ids of workers or targets. Ready workers if there is any, else the others (`TIERS`). None only if
        nobody is left. Take the lease before awaiting.
        """
        candidates = self._selection.candidates(exclude, accept, ask)
        if self.wary:
            # A suspect's turn must be short, since others wait for theirs: let its worker's queue run empty.
            candidates = [w for w in candidates if not self._probation.on_trial_at(w.id)] or candidates
        return self._selection.choose(candidates, exclude, ask)

    def choose_now(
        self,
        fingerprint: bytes,
        exclude: Collection[str] = frozenset(),
        accept: Callable[[Worker], bool] = _anybody,
        ask: Ask = ANY,
        *,
        proven: bool = False,
    ) -> Target | None:
        """`pick`, but a suspect only gets a worker that can try it alone, or with few others of a death of very many.

        `proven`: the request has given tokens, so that nothing is held against it. Raises `SuspectedPoison` for a
        convicted one, `NotYet` for a suspect that has to wait for `changed`.
        """
        register = self._probation.register
        if proven or not register.suspicion(fingerprint):
            return self.pick(exclude, accept, ask)
        if register.convicted(fingerprint):
            raise SuspectedPoison
        candidates = self._selection.candidates(exclude, accept, ask)
        trying = {worker.id for worker in candidates if self._probation.on_trial_at(worker.id)}
        more = len(trying) < math.ceil(len(candidates) * QUARANTINE_SHARE)
        may_begin = self._probation.may_begin
        free = [one for one in candidates if (more or one.id in trying) and may_begin(fingerprint, one.id)]
        if candidates and not free:
            raise NotYet
        return self._selection.choose(free, exclude, ask)

    async def changed(self) -> None:
        """Return when a worker has joined, left, moved or described itself, a suspect was let go, a pause is over."""
        await self._waiting.park()

    @property
    def wary(self) -> bool:
        """True while anything is held against any request; only then do fingerprints matter."""
        return len(self._probation.register) > 0

    def lease(self, target: Target, generations: int = 1, tokens: Callable[[], int] = no_tokens) -> Lease:
        """The attempt's claim on the target, for so many answers: `with fleet.lease(target):`.

        `tokens`: those that the engine holds for them at the moment.
        """
        lease = Lease(target, self._released, generations, tokens)
        if target.worker.state is State.HALF_OPEN:
            target.worker.breaker.trial = lease
        return lease

    def may_try(self, fingerprint: bytes, worker: Worker) -> bool:
        """Might the request, chosen for the worker, be tried there still, after something was awaited?"""
        register = self._probation.register
        return not register.suspicion(fingerprint) or self._probation.may_begin(fingerprint, worker.id)

    def trial(self, *workers: Worker, fingerprint: bytes, proven: bool = False) -> Trial:
        """The attempt's part in finding poison: `with fleet.trial(worker, fingerprint=fingerprint) as trial:`."""
        return self._probation.trial([worker.id for worker in workers], fingerprint, proven=proven)

    # -- evidence

    def report(self, worker: Worker, ok: bool, cause: str = "", kind: str = "", *, key_refused: bool = False) -> None:
        """What an attempt has seen of its worker.

        Not ok: it could not connect, was cut, stalled, or got a 5xx (`kind`, for the log; `cause` in words), or a 401
        to our key. The worker is left out at once and probed. Ok: it ended well. Any other 4xx says nothing: do not
        report it. For "busy" there is `full`.
        """
        if ok:
            worker.served += 1
            self._keeper.ended_well(worker)
            return
        worker.failures += 1
        words = ": ".join(filter(None, (kind, cause)))
        # Only the first failure hurries the probe: a dead worker's hundred streams must not make a hundred probes.
        if self._keeper.failed(worker, words, key_refused=key_refused) and worker.id in self._watches:
            self._watches[worker.id].alarm()

    def full(self, target: Target, seconds: float | None = None) -> None:
        """An attempt was told that the queue is full, and to come back after `seconds`, if it was told that."""
        self._keeper.full(target, seconds)

    def restarted(self, worker: Worker, cause: str) -> None:
        """Somebody has seen that it is a new process (its KV events begin anew, say): it starts clean, and is probed.

        A restart that its infos tell is seen without that.
        """
        self._keeper.restarted(worker, cause)
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

    async def look(self) -> None:
        """Ask all ready workers for a sign of life; one that gives none has failed."""

        async def ask(worker: Worker) -> None:
            if not await self.lives(worker):
                self.report(worker, False, "no sign of life")

        async with trio.open_nursery() as nursery:
            for worker in self._workers.values():
                if worker.state is State.READY:
                    nursery.start_soon(ask, worker)

    async def relearn(self, workers: Iterable[Worker]) -> None:
        """Read the infos of those that listen again, unless that was done just now."""
        watches = [self._watches[one.id] for one in workers if one.state is not State.DEAD and one.id in self._watches]
        async with trio.open_nursery() as nursery:
            for watch in watches:
                nursery.start_soon(watch.relearn)

    # -- inside

    def _join(self, named: Naming, by: set[str]) -> Worker:
        self._joined += 1
        breaker = Breaker(self.config.cb_failure_threshold, self.config.cb_success_threshold)
        number, now = self._joined, self._clock()
        worker = Worker(self._name(named.origin), number, named.origin, now, breaker=breaker, named_by=by)
        worker.role, worker.bootstrap_port = named.role, named.bootstrap_port
        if self.config.decode_fallback and worker.role is Role.DECODE:
            worker.may_be = frozenset({Role.REGULAR})
        self._workers[worker.id] = worker
        watch = self._watches[worker.id] = Watch(worker, self._examiner, self._clock, self._keeper)
        log.info("worker joined", worker=worker.id, url=worker.url)
        if self._nursery is not None:
            self._nursery.start_soon(watch.run)
        self._changed()
        return worker

    def _name(self, origin: Origin) -> str:
        """Its id: w1, w2, ...; where several processes must agree without asking each other, made of its URL."""
        if self.config.processes == 1:
            return f"w{self._joined}"
        return f"w{hashlib.sha256(str(origin).encode()).hexdigest()[:10]}"

    def _moved(self, worker: Worker, before: State) -> None:
        self._on_move(before, worker.state)
        self._changed()

    def _changed(self) -> None:
        """Who waits for `changed` may be able to go on."""
        self._waiting.unpark_all()

    async def _unpaused(self) -> bool:
        """No worker that could get an attempt says that it is paused."""
        workers = self._selection.candidates((), _anybody, ANY)
        paused: list[bool] = []

        async def ask(worker: Worker) -> None:
            paused.append(await self._examiner.paused(worker))

        async with trio.open_nursery() as nursery:
            for worker in workers:
                nursery.start_soon(ask, worker)
        return not any(paused)

    def _released(self, target: Target) -> None:
        if self.leaving(target.worker) and target.worker.in_flight == 0:
            self._forget(target.worker)

    def _renewed(self, worker: Worker) -> None:
        for policy in self.policies.values():
            policy.forget(worker)  # a new process of it may have another part

    def _forget(self, worker: Worker) -> None:
        del self._workers[worker.id]
        self._watches.pop(worker.id).stop()
        self._renewed(worker)
        self.namings.remember(last_named(worker))
        log.info("worker left", worker=worker.id, url=worker.url)
        self._on_leave(worker.origin)
        if worker.renamed is not None and worker.wanted:
            self._join(worker.renamed, worker.named_by)
        self._changed()
