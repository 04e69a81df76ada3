"""One engine, as the fleet sees it, and the table of its states.

Two kinds of evidence move a worker. *Probes* are asked by us and may lie both ways: a busy engine fails them, a dead
scheduler can pass them. *Passive* signals come from requests. So a failed probe alone is soft: it takes thresholds, and
it only keeps new requests away. A failed request is hard: the worker is left out at once, until a probe says otherwise
or a short time has passed. Neither touches a live stream; only the stream's own silence or end does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import structlog

from dyn_relay.fleet.breaker import Breaker
from dyn_relay.fleet.rejoin import Standing
from dyn_relay.fleet.target import Target
from dyn_relay.formats.traits import UNKNOWN, Traits
from dyn_relay.http11.client import Origin

if TYPE_CHECKING:
    from dyn_relay.fleet.naming import Naming

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("fleet")


class State(StrEnum):
    """How a worker is; `MEANING` says what each is."""

    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    UNREADY = "unready"
    SUSPECT = "suspect"
    OPEN = "open"
    HALF_OPEN = "half_open"
    STALE = "stale"
    DEAD = "dead"
    DRAINING = "draining"


MEANING: dict[State, str] = {
    State.STARTING: "it, or a new process of it, has joined, and no probe has succeeded yet; that may take an hour",
    State.READY: "it can take requests",
    State.BUSY: "it is well, but has just said that its queue is full",
    State.UNREADY: "it answers, but fails its probes, as a busy SGLang does; its live streams go on",
    State.SUSPECT: "it has just failed a request: left out until a probe, or a short time, clears it",
    State.OPEN: "too many incidents in a row, with no request that ended well in between: left alone for a while",
    State.HALF_OPEN: "on trial after that: one request at a time, and none that has tokens to lose",
    State.STALE: "it came back with other weights than the fleet's, or waits to be admitted (`--rejoin`)",
    State.DEAD: "nothing listens there any more",
    State.DRAINING: "it is leaving: live requests end, it gets no new ones",
}

#: States in which a worker is well.
HEALTHY = frozenset({State.READY, State.BUSY})

#: Who is asked when no worker is ready: a proxy that answers "no worker" while one of them might work helps nobody.
#: A free half-open worker counts as ready for what has no tokens to lose. The dead come last, since a dial there is all
#: but lost; draining and stale ones get nothing.
TIERS: tuple[frozenset[State], ...] = (
    frozenset({State.READY}),
    frozenset({State.BUSY, State.STARTING, State.UNREADY, State.SUSPECT}),
    frozenset({State.OPEN, State.HALF_OPEN}),
    frozenset({State.DEAD}),
)
#: A state's place in it.
TIER: dict[State, int] = {state: tier for tier, states in enumerate(TIERS) for state in states}


class Signal(StrEnum):
    """What can move it."""

    PROBE_OK = "a probe succeeded"
    RECOVERED = "enough probes succeeded"
    PROBE_FAILED = "a probe failed"
    UNHEALTHY = "too many probes failed"
    GONE = "too many probes could not connect"
    FAILED = "a request failed"
    WORKED = "a request succeeded"
    PAROLE = "left out long enough"
    FULL = "its queue is full"
    FREE = "its queue may have room again"
    KEY_REFUSED = "it refuses our key"
    TRIPPED = "too many requests failed in a row"
    TRIAL = "open for long enough"
    PASSED = "enough trials succeeded"
    RESTARTED = "it is a new process"
    OUTDATED = "not let in again"
    ADMITTED = "let in again"
    DRAIN = "asked to leave"
    REJOIN = "added again"


_LISTENING = (State.READY, State.BUSY, State.SUSPECT, State.OPEN, State.HALF_OPEN)

#: (state, signal) -> next state. What is not listed changes nothing.
TRANSITIONS: dict[tuple[State, Signal], State] = {
    (State.STARTING, Signal.PROBE_OK): State.READY,
    (State.STARTING, Signal.RECOVERED): State.READY,
    (State.STARTING, Signal.WORKED): State.READY,
    (State.READY, Signal.FULL): State.BUSY,
    (State.READY, Signal.FAILED): State.SUSPECT,
    (State.READY, Signal.KEY_REFUSED): State.SUSPECT,
    (State.READY, Signal.TRIPPED): State.OPEN,
    (State.READY, Signal.UNHEALTHY): State.UNREADY,
    (State.BUSY, Signal.FREE): State.READY,
    (State.BUSY, Signal.FAILED): State.SUSPECT,
    (State.BUSY, Signal.KEY_REFUSED): State.SUSPECT,
    (State.BUSY, Signal.TRIPPED): State.OPEN,
    (State.BUSY, Signal.UNHEALTHY): State.UNREADY,
    (State.SUSPECT, Signal.PROBE_OK): State.READY,
    (State.SUSPECT, Signal.RECOVERED): State.READY,
    (State.SUSPECT, Signal.WORKED): State.READY,
    (State.SUSPECT, Signal.PAROLE): State.READY,
    (State.SUSPECT, Signal.UNHEALTHY): State.UNREADY,
    (State.UNREADY, Signal.RECOVERED): State.READY,
    (State.UNREADY, Signal.GONE): State.DEAD,
    (State.OPEN, Signal.TRIAL): State.HALF_OPEN,
    (State.HALF_OPEN, Signal.PASSED): State.READY,
    (State.HALF_OPEN, Signal.FAILED): State.OPEN,
    (State.HALF_OPEN, Signal.UNHEALTHY): State.OPEN,
    (State.STALE, Signal.ADMITTED): State.READY,
    (State.STALE, Signal.GONE): State.DEAD,
    (State.DEAD, Signal.RECOVERED): State.READY,
    (State.DEAD, Signal.UNHEALTHY): State.UNREADY,
    (State.DRAINING, Signal.REJOIN): State.STARTING,
    **{(state, Signal.GONE): State.DEAD for state in _LISTENING},
    # What is dead or unready needs as many good probes as ever.
    **{(state, Signal.RESTARTED): State.STARTING for state in _LISTENING},
    **{(state, Signal.OUTDATED): State.STALE for state in State if state not in (State.STALE, State.DRAINING)},
    **{(state, Signal.DRAIN): State.DRAINING for state in State if state is not State.DRAINING},
}

#: States that somebody should look at.
_LOUD = frozenset({State.SUSPECT, State.UNREADY, State.OPEN, State.STALE, State.DEAD})


class Role(StrEnum):
    """What a worker does for a request; the names are those of SMG's `worker_type`."""

    REGULAR = "regular"  #: all of it
    PREFILL = "prefill"  #: the prompt and one token, for a decode worker
    DECODE = "decode"  #: the tokens, once it has the prompt's cache from a prefill worker


@dataclass(slots=True, eq=False)
class Worker:
    """An engine and what is known of it. Times are seconds of the fleet's clock."""

    #: Short and stable, unique within this process, in the order of joining: "w1".
    id: str
    number: int
    origin: Origin
    since: float
    state: State = State.STARTING
    #: What it was named for.
    role: Role = Role.REGULAR
    #: What else it may be for if it says so itself.
    may_be: frozenset[Role] = frozenset()
    #: Where a prefill worker hands caches over, if it is not the port that the worker itself knows.
    bootstrap_port: int | None = None
    #: Why it is in this state, for people.
    cause: str = "joined"
    traits: Traits = UNKNOWN
    #: Its traits were read since it last may have been restarted.
    learnt: bool = False
    #: It refuses our key: asked only if all do. It refuses fast, and would seem to have the least to do.
    locked: bool = False
    #: Which process it is, by its infos; None as long as they have not told.
    epoch: str | None = None
    #: Whether its weights are to be compared with the fleet's (`rejoin.py`).
    standing: Standing = Standing.KNOWN
    #: Somebody who knows has let it in, as it is when its infos are read next.
    welcome: bool = False
    #: It answered its last probe, be it badly.
    answers: bool = False
    breaker: Breaker = field(default_factory=Breaker)
    #: The sources of discovery that name it, and "hand" if an operator does.
    named_by: set[str] = field(default_factory=set)
    #: What it was last named for, if that was after it had begun to leave, and another role.
    renamed: Naming | None = None
    #: What it says against what it was named for, as the log has it (`contradictions.py`).
    noted: frozenset[str] = frozenset()
    #: Attempts that ended well, and those that it failed.
    served: int = 0
    failures: int = 0
    #: Probes in a row; a failed request begins a bad row.
    good_probes: int = 0
    bad_probes: int = 0
    #: Where its attempts go: to itself, or to each of its ranks.
    targets: list[Target] = field(default_factory=list)
    #: The live ones among its former ranks, until their last attempt ends.
    _former: list[Target] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.targets = [Target(self)]

    def divide(self, count: int) -> None:
        """Make each of its data-parallel ranks a target of its own; of what is live there nothing is lost.

        One rank is no rank: then the worker is the target.
        """
        ranks = list(range(count)) if count > 1 else [None]
        if [target.rank for target in self.targets] != ranks:
            self._former = [target for target in (*self._former, *self.targets) if target.in_flight]
            self.targets = [Target(self, rank) for rank in ranks]

    @property
    def healthy(self) -> bool:
        """It is well; that it is busy does not matter."""
        return self.state in HEALTHY

    @property
    def wanted(self) -> bool:
        """It is to stay, or to join anew once it has left."""
        return self.state is not State.DRAINING or bool(self.named_by)

    def full(self, now: float) -> bool:
        """All its queues are."""
        return all(target.full(now) for target in self.targets)

    def recount(self) -> None:
        """Bring `tokens` up to date."""
        for target in (*self.targets, *self._former):
            target.recount()

    @property
    def part(self) -> Role:
        """What it is here for."""
        if not self.may_be:
            return self.role
        return next((role for role in self.may_be if role == self.traits.role), self.role)

    @property
    def misplaced(self) -> bool:
        """It says that it has another role than the one that it was named for, and cannot be used in that one."""
        return self.traits.role not in (None, self.part)

    @property
    def shown(self) -> str:
        """Its state for the metrics: who is well, and gets nothing, must not pass for ready."""
        return "misplaced" if self.healthy and self.misplaced else self.state.value

    @property
    def unmet(self) -> bool:
        """Nothing that it says of itself is known, and it has not been asked since it last may have been restarted."""
        return not self.learnt and self.traits == UNKNOWN

    @property
    def in_flight(self) -> int:
        """Live attempts (leases)."""
        return sum(target.in_flight for target in (*self.targets, *self._former))

    @property
    def load(self) -> int:
        """Answers that they ask for: a batch is one attempt, and as many answers as it has prompts and samples."""
        return sum(target.load for target in (*self.targets, *self._former))

    @property
    def tokens(self) -> int:
        """Tokens that the engine holds for them, as of the last count."""
        return sum(target.tokens for target in (*self.targets, *self._former))

    @property
    def url(self) -> str:
        """Where it is."""
        return str(self.origin)

    def apply(self, signal: Signal, cause: str, now: float) -> bool:
        """Move by the table; True if the state changed. `cause` says what was seen."""
        state = TRANSITIONS.get((self.state, signal))
        if state is None:
            return False
        was, self.state, self.since = self.state, state, now
        self.cause = f"{signal}: {cause}" if cause else str(signal)
        if state in (State.SUSPECT, State.OPEN, State.DEAD, State.STARTING):
            self.learnt = False  # what comes back may be a new process with other weights
        if state in (State.SUSPECT, State.OPEN):
            self.good_probes, self.bad_probes = 0, 1
        if state in (State.HALF_OPEN, State.DEAD, State.STARTING):
            self.breaker.clear()
        write = log.warning if state in _LOUD else log.info
        write("worker is " + state, worker=self.id, url=self.url, was=str(was), cause=self.cause)
        return True
