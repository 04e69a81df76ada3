"""Requests that kill the engine that takes them, and how few engines to lose on them.

Some valid-looking requests kill a stock engine (SGLang 0.5.23: a token id outside the vocabulary, for one), and a proxy
that migrates them kills its fleet. When a worker dies, every attempt on it that has no token yet may be the culprit.
Each of these requests becomes a *suspect* and is tried again alone: at most one suspect is *on probation* on a worker
at a time, and one request at most once at a time in the fleet, until its first token clears it. So

- a suspect whose worker dies during its probation did it: it is *convicted*, and refused for a while;
- who was on that worker beside a suspect on probation is *innocent*: the suspect did it;
- everybody else becomes a suspect.

A death that leaves hundreds of suspects is hardly the doing of one of them, and one by one they would wait for minutes.
So of more than `SINGLY` suspects of one death, a `SINGLY`-th of them are on probation on a worker together. If that
dies, it was one of these few, and each of them is tried alone from then on: one more engine is lost if it was poison.

The relay needs four calls (nothing may be awaited between 1 and 2)::

    worker = fleet.choose_now(fingerprint, exclude, accept)               # 1: raises SuspectedPoison: answer 502;
                                                                          # NotYet: await fleet.changed(), again
    with fleet.lease(worker), fleet.trial(worker, fingerprint=fingerprint, proven=proven) as trial:   # 2
        ...
        trial.token()                                                     # 3: at the attempt's first token
        ...
        finding = trial.died()                                            # 4: its worker died before the first token

`died` is about the worker, not the connection: after a cut, `await fleet.lives(worker)` tells whether it still answers.
A finding other than CONVICTED lets the request go on, by choosing again after the `with` block. An attempt at a pair of
workers is on trial at both, and either may die of it.

Suspects wait for each other, so their turns are kept short: only a share of the workers tries them, and other requests
avoid these meanwhile, so that a suspect does not queue behind newer traffic.

`proven`: an earlier attempt of the request has given tokens. A request's name here is its fingerprint: equal for
requests that would do the same to an engine, so that a client's own retries and the members of a group
share their fate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

import structlog

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("poison")

#: Entries kept; the oldest go first. A suspect's entry is only needed until its next attempt's first token.
CAPACITY = 65536
#: Suspects of one death that are tried one by one.
SINGLY = 16


class SuspectedPoison(Exception):
    """The request is refused: workers died under it."""


class NotYet(Exception):
    """A suspect must wait: no worker can try it alone now."""


class Finding(Enum):
    """What a worker's death says about an attempt on it that had no token yet."""

    INNOCENT = "innocent"  #: another suspect was on probation there, or the request has been proven before
    SUSPECT = "suspect"  #: may be the culprit: it may be tried again, alone
    CONVICTED = "convicted"  #: refuse it


@dataclass(slots=True)
class _Entry:
    suspicion: int
    convicted: bool
    expires: float
    #: How many suspects may be on probation together where this one is.
    together: int


class PoisonRegister:
    """What is held against which fingerprint. `attempts`: how many more workers may be risked on a suspect."""

    def __init__(self, attempts: int, ttl: float, clock: Callable[[], float], capacity: int = CAPACITY) -> None:
        self._attempts = attempts
        self._ttl = ttl
        self._clock = clock
        self._capacity = capacity
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the one that expires first is first

    def __len__(self) -> int:
        return len(self._entries)

    def suspicion(self, fingerprint: bytes) -> int:
        """Deaths held against it; 0 for an unblemished request."""
        entry = self._entry(fingerprint)
        return entry.suspicion if entry else 0

    def convicted(self, fingerprint: bytes) -> bool:
        """True if it is to be refused."""
        entry = self._entry(fingerprint)
        return entry is not None and entry.convicted

    def together(self, fingerprint: bytes) -> int:
        """How many suspects may be on probation together where this one is."""
        entry = self._entry(fingerprint)
        return entry.together if entry else 1

    def suspect(self, fingerprint: bytes, *, alone: bool, among: int = 1) -> bool:
        """Hold a death against it; True if that convicts it.

        `alone`: it was on probation by itself, so the death is another one. Otherwise all its attempts that were on the
        same dead worker count as one. `among`: how many may have been it; 1: it is to be tried alone from now on.
        """
        known, before = self._entry(fingerprint), self.suspicion(fingerprint)
        together = min(max(among // SINGLY, 1), known.together if known else among)
        suspicion, expires = before + 1 if alone else max(before, 1), self._clock() + self._ttl
        entry = _Entry(suspicion, self.convicted(fingerprint), expires, together)
        entry.convicted |= entry.suspicion > self._attempts
        self._entries[fingerprint] = entry
        self._entries.move_to_end(fingerprint)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return entry.convicted

    def clear(self, fingerprint: bytes) -> bool:
        """Drop what is held against a suspect; True if anything was. A conviction stands: some kill the second time."""
        entry = self._entry(fingerprint)
        if entry is None or entry.convicted:
            return False
        del self._entries[fingerprint]
        return True

    def _entry(self, fingerprint: bytes) -> _Entry | None:
        entries = self._entries
        if not entries:  # the usual case, on every request's path
            return None
        now = self._clock()
        while entries and next(iter(entries.values())).expires <= now:
            entries.popitem(last=False)
        return entries.get(fingerprint)


class _Group:
    """The suspects that are on probation on one worker: one, or several of a death that had very many."""

    __slots__ = ("room", "trials")

    def __init__(self, room: int) -> None:
        #: How many there may be.
        self.room = room
        self.trials: set[Trial] = set()


class Probation:
    """Who is tried where: the attempts without a token on each worker, and the suspects among them."""

    def __init__(self, register: PoisonRegister, changed: Callable[[], None], event: Callable[[str], None]) -> None:
        self.register = register
        #: Called when a suspect that waits may be able to go on.
        self._changed = changed
        #: Told "suspect", "convicted", "cleared" or "innocent".
        self._event = event
        self._tokenless: dict[str, set[Trial]] = {}
        self._on_worker: dict[str, _Group] = {}
        self._on_trial: set[bytes] = set()

    def may_begin(self, fingerprint: bytes, worker: str) -> bool:
        """May a suspect be tried on this worker now?"""
        group = self._on_worker.get(worker)
        if fingerprint in self._on_trial:
            return False
        return group is None or len(group.trials) < min(group.room, self.register.together(fingerprint))

    def on_trial_at(self, worker: str) -> bool:
        """Is a suspect on probation there?"""
        return worker in self._on_worker

    def trial(self, workers: Sequence[str], fingerprint: bytes, *, proven: bool = False) -> Trial:
        """An attempt's place in this. `proven`: an earlier attempt of the request gave tokens."""
        return Trial(self, workers, fingerprint, proven)

    def begin(self, trial: Trial) -> None:
        """Take note of an attempt. Raises `RuntimeError` if a suspect goes where it may not."""
        if trial.proven:
            return
        trial.suspect = self.register.suspicion(trial.fingerprint) > 0
        if trial.suspect and not all(self.may_begin(trial.fingerprint, worker) for worker in trial.workers):
            raise RuntimeError("a suspect must not share: nothing may be awaited between choose_now() and trial()")
        for worker in trial.workers:
            others, group = self._tokenless.setdefault(worker, set()), self._on_worker.get(worker)
            if trial.suspect:
                room = self.register.together(trial.fingerprint)
                if group is None:
                    group = self._on_worker[worker] = _Group(room)
                group.room = min(group.room, room)
                group.trials.add(trial)
                for other in others:
                    if not other.suspect:
                        other.beside.setdefault(worker, set()).add(trial)
            elif group is not None:
                trial.beside[worker] = set(group.trials)
            others.add(trial)
        if trial.suspect:
            self._on_trial.add(trial.fingerprint)

    def pass_(self, trial: Trial) -> None:
        """Its first token is there: it is no poison."""
        if trial.proven:
            return
        trial.proven = True
        self.end(trial)
        if self.register.clear(trial.fingerprint):
            self._event("cleared")
            self._changed()
        for worker in trial.workers:
            for other in self._tokenless.get(worker, ()):
                beside = other.beside.get(worker)
                if beside is not None:
                    beside.discard(trial)  # if the worker dies now, it was not this one
                    if not beside:
                        del other.beside[worker]

    def death(self, trial: Trial, worker: str) -> Finding:
        """The rule at the top of this file."""
        if trial.proven or worker in trial.beside:
            finding = Finding.INNOCENT
        else:
            among = self._among(trial, worker)
            alone, among = trial.suspect and among == 1, 1 if trial.suspect else among
            guilty = self.register.suspect(trial.fingerprint, alone=alone, among=among)
            finding = Finding.CONVICTED if guilty else Finding.SUSPECT
        self._event(finding.value)
        if finding is Finding.CONVICTED:
            log.error("request convicted of killing workers", worker=worker, fingerprint=trial.fingerprint.hex())
        return finding

    def _among(self, trial: Trial, worker: str) -> int:
        """How many may have killed the worker: counted when the first of them is told of its death, for all of them."""
        if worker not in trial.among:
            tokenless, group = self._tokenless.get(worker, {trial}), self._on_worker.get(worker)
            suspects = group.trials if group is not None else tokenless
            for one in {trial, *tokenless}:
                one.among.setdefault(worker, len(suspects))
        return trial.among[worker]

    def end(self, trial: Trial) -> None:
        """The attempt is over, or has passed."""
        tried = False
        for worker in trial.workers:
            tokenless = self._tokenless.get(worker)
            if tokenless is not None:
                tokenless.discard(trial)
                if not tokenless:
                    del self._tokenless[worker]
            group = self._on_worker.get(worker)
            if group is not None and trial in group.trials:
                group.trials.discard(trial)
                if not group.trials:
                    del self._on_worker[worker]
                tried = True
        if tried:
            self._on_trial.discard(trial.fingerprint)
            self._changed()


class Trial:
    """One attempt's part in `Probation`; a context manager around the attempt."""

    __slots__ = ("_probation", "among", "beside", "fingerprint", "proven", "suspect", "workers")

    def __init__(self, probation: Probation, workers: Sequence[str], fingerprint: bytes, proven: bool) -> None:
        self._probation = probation
        #: Ids of those that it is at.
        self.workers = workers
        self.fingerprint = fingerprint
        #: Cannot be poison: a token came, in this attempt or before.
        self.proven = proven
        #: On probation.
        self.suspect = False
        #: The suspects that are, or were until they ended without a token, on probation beside it, by worker.
        self.beside: dict[str, set[Trial]] = {}
        #: How many may have killed a worker of its that has died.
        self.among: dict[str, int] = {}

    def __enter__(self) -> Trial:
        self._probation.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._probation.end(self)

    def token(self) -> None:
        """The attempt's first token is there. Further calls do nothing."""
        self._probation.pass_(self)

    def died(self, worker: str | None = None) -> Finding:
        """One of the attempt's workers died, None: its only one. To be called once, inside the `with` block."""
        return self._probation.death(self, self.workers[0] if worker is None else worker)
