"""What to do when an attempt did not end well: a table.

An attempt's failure has a kind (what was seen) and a phase (how far it had come). The table gives the action that the
relay takes if the request may be continued and its budget allows it; `request.py` makes it a loud failure if not.

What tells the actions apart is what may have happened on the worker. Before the request was sent, nothing. After a
"queue full", nothing. In every other case the engine may have generated, and may go on generating: the old attempt is
aborted by its rid if its worker may still live, and only a request that its format can continue goes elsewhere.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What was seen. The value is the label in metrics, logs and trace rows."""

    CONNECT = "connect"  #: no connection: refused, timed out, TLS
    STALE = "stale"  #: a reused idle connection ended before any byte of an answer
    CUT = "cut"  #: end of stream or reset in the middle of an answer
    FIRST_TOKEN = "first_token"  #: no token within --first-token-timeout-secs
    STALL = "stall"  #: silence for longer than --stall-timeout-secs
    BUSY = "busy"  #: the engine says that its queue is full
    FAILED = "failed"  #: the engine says 5xx, as a status, an error event or an abort
    REFUSED = "refused"  #: the engine says 4xx
    KEY = "key"  #: the engine says 401 or 403 to our key: its own trouble, not the client's
    UNFIT = "unfit"  #: the engine says 4xx to a continuation: another one took this request, so it is this one's limit
    INTERRUPTED = "interrupted"  #: somebody has aborted it at the engine, and --on-abort is resume
    MOVED = "moved"  #: nothing is wrong: we took it away, since its worker is to be empty, or everything is paused
    GARBAGE = "garbage"  #: broken HTTP framing, an event over the size limit, or not the format's language


class Phase(enum.Enum):
    """How far the attempt had come."""

    DIAL = "dial"  #: nothing was sent
    SENT = "sent"  #: no byte of an answer yet
    ANSWERED = "answered"  #: the head of an answer, no token of this attempt
    TOKENS = "tokens"  #: at least one token of this attempt


class Action(enum.Enum):
    """What to do about it."""

    REDIAL = "redial"  #: the same worker, over a fresh connection, once
    REROUTE = "reroute"  #: another worker; safe for every request, because nothing was generated
    MIGRATE = "migrate"  #: a continuation on another worker
    RELAY = "relay"  #: the engine's own answer goes to the client


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    action: Action
    #: Exclude the worker for everybody until a probe clears it.
    penalty: bool = False
    #: Uses up one of --migration-limit.
    counts: bool = False
    #: The worker may still be generating: tell it to stop.
    abort: bool = False
    #: The request may be what killed the worker, if that turns out to be dead.
    suspicious: bool = False
    #: This request does not go back to the worker while there is another one.
    avoids: bool = True


_DEATH_BEFORE_TOKENS = Rule(Action.MIGRATE, penalty=True, counts=True, abort=True, suspicious=True)
_LOST = Rule(Action.MIGRATE, penalty=True, counts=True, abort=True)
_FAILED = Rule(Action.MIGRATE, penalty=True, counts=True)
_INTERRUPTED = Rule(Action.MIGRATE, counts=True)
_MOVED = Rule(Action.MIGRATE, abort=True, avoids=False)

RULES: dict[tuple[Kind, Phase], Rule] = {
    (Kind.CONNECT, Phase.DIAL): Rule(Action.REROUTE, penalty=True),
    (Kind.STALE, Phase.SENT): Rule(Action.REDIAL, abort=True),
    (Kind.CUT, Phase.SENT): _DEATH_BEFORE_TOKENS,
    (Kind.CUT, Phase.ANSWERED): _DEATH_BEFORE_TOKENS,
    (Kind.CUT, Phase.TOKENS): _LOST,
    (Kind.FIRST_TOKEN, Phase.SENT): _DEATH_BEFORE_TOKENS,
    (Kind.FIRST_TOKEN, Phase.ANSWERED): _DEATH_BEFORE_TOKENS,
    (Kind.STALL, Phase.SENT): _DEATH_BEFORE_TOKENS,
    (Kind.STALL, Phase.ANSWERED): _DEATH_BEFORE_TOKENS,
    (Kind.STALL, Phase.TOKENS): _LOST,
    (Kind.BUSY, Phase.ANSWERED): Rule(Action.REROUTE),
    (Kind.BUSY, Phase.TOKENS): _FAILED,
    (Kind.FAILED, Phase.ANSWERED): _FAILED,
    (Kind.FAILED, Phase.TOKENS): _FAILED,
    (Kind.REFUSED, Phase.ANSWERED): Rule(Action.RELAY),
    (Kind.REFUSED, Phase.TOKENS): Rule(Action.RELAY),
    (Kind.UNFIT, Phase.ANSWERED): Rule(Action.REROUTE),
    (Kind.KEY, Phase.ANSWERED): Rule(Action.REROUTE, penalty=True),
    (Kind.INTERRUPTED, Phase.ANSWERED): _INTERRUPTED,
    (Kind.INTERRUPTED, Phase.TOKENS): _INTERRUPTED,
    (Kind.MOVED, Phase.DIAL): Rule(Action.REROUTE, avoids=False),
    (Kind.MOVED, Phase.SENT): _MOVED,
    (Kind.MOVED, Phase.ANSWERED): _MOVED,
    (Kind.MOVED, Phase.TOKENS): _MOVED,
    (Kind.GARBAGE, Phase.SENT): _LOST,
    (Kind.GARBAGE, Phase.ANSWERED): _LOST,
    (Kind.GARBAGE, Phase.TOKENS): _LOST,
}


_ENGINES_WORDS = (Kind.BUSY, Kind.INTERRUPTED, Kind.FAILED, Kind.REFUSED, Kind.UNFIT, Kind.KEY)


@dataclass(frozen=True, slots=True)
class Failure:
    """One attempt's failure, kept in the request's history."""

    kind: Kind
    phase: Phase
    #: The id of who is to blame: a worker, or a target of it.
    worker: str
    #: One line for the client: the system's or the engine's own words.
    detail: str
    #: The id of another one that may have kept it waiting, and is not blamed for that; "" if none.
    beside: str = ""

    @property
    def words(self) -> str:
        """`detail` for logs and traces: an engine's own words may quote the prompt, so they are left out."""
        return "" if self.kind in _ENGINES_WORDS else self.detail

    @property
    def rule(self) -> Rule:
        """The row of the table that applies."""
        return RULES[self.kind, self.phase]

    def __str__(self) -> str:
        words = f"{self.worker}: {self.kind.value} ({self.phase.value})"
        return f"{words}: {self.detail}" if self.detail else words
