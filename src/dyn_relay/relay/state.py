"""The life of a logical request, as a table.

Two rules. Whatever changes the state of a logical request goes through `advance`; and the table knows nothing of
sockets, workers or formats. A transition that is not in the table is a bug of ours and raises.

A request is OPEN from its first byte. Each attempt is DISPATCHED before its worker is dialled and STREAMING once the
worker has given a token. An attempt that ends without the engine's own last word, or with a failure that another worker
may do better at, is a CUT; from there the request is dispatched again or it ends. It ends exactly once:

- DONE: the client has a complete answer, the engine's own or finished here because nothing was left to generate;
- ABORTED: somebody wished it: the client left, or an abort request named it;
- FAILED: the client was told, loudly, that there is no complete answer.

DISPATCH is possible only from OPEN and CUT, so a logical request never has two live attempts. The diagram in
`docs/relay.md` is generated from `TRANSITIONS`.
"""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Where a logical request stands."""

    OPEN = "open"
    DISPATCHED = "dispatched"
    STREAMING = "streaming"
    CUT = "cut"
    DONE = "done"
    ABORTED = "aborted"
    FAILED = "failed"


class Step(enum.Enum):
    """What happens to it."""

    DISPATCH = "dispatch"  #: an attempt begins
    PROGRESS = "progress"  #: the attempt has given its first token
    CUT = "cut"  #: the attempt ended and another may follow
    FINISH = "finish"  #: the answer is complete
    ABORT = "abort"  #: somebody wished it to end
    FAIL = "fail"  #: nothing can continue


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.OPEN, Step.DISPATCH): State.DISPATCHED,
    (State.OPEN, Step.ABORT): State.ABORTED,
    (State.OPEN, Step.FAIL): State.FAILED,
    (State.DISPATCHED, Step.PROGRESS): State.STREAMING,
    (State.DISPATCHED, Step.CUT): State.CUT,
    (State.DISPATCHED, Step.FINISH): State.DONE,
    (State.DISPATCHED, Step.ABORT): State.ABORTED,
    (State.DISPATCHED, Step.FAIL): State.FAILED,
    (State.STREAMING, Step.CUT): State.CUT,
    (State.STREAMING, Step.FINISH): State.DONE,
    (State.STREAMING, Step.ABORT): State.ABORTED,
    (State.STREAMING, Step.FAIL): State.FAILED,
    (State.CUT, Step.DISPATCH): State.DISPATCHED,
    (State.CUT, Step.FINISH): State.DONE,
    (State.CUT, Step.ABORT): State.ABORTED,
    (State.CUT, Step.FAIL): State.FAILED,
}

FINAL = frozenset({State.DONE, State.ABORTED, State.FAILED})


class IllegalStep(AssertionError):
    """A transition that the table does not have."""


def advance(state: State, step: Step) -> State:
    """The state after `step`. Raises `IllegalStep`."""
    try:
        return TRANSITIONS[state, step]
    except KeyError:
        raise IllegalStep(f"{step.value} is not possible when {state.value}") from None


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.OPEN.name}"]
    lines += [f"    {before.name} --> {after.name}: {step.value}" for (before, step), after in TRANSITIONS.items()]
    lines += [f"    {state.name} --> [*]" for state in State if state in FINAL]
    return "\n".join(lines)
