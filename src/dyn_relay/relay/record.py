"""What is remembered of a logical request, for its one trace row, its one log line and the metrics."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from dyn_relay.observe.trace import TraceFile
from dyn_relay.relay.reader import AnswerReader
from dyn_relay.relay.state import State, Step, advance

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("relay")


#: Attempts that a log line lists, the last ones; the trace row has them all.
SHOWN = 10


class Outcome(enum.Enum):
    """How a logical request ended; the label in metrics, logs and trace rows."""

    DONE = "done"  #: the engine's own complete answer
    COMPLETED = "completed_here"  #: nothing was left to generate at the cut; the finish was made here
    ABORTED = "aborted"  #: an abort request named it, or the engine aborted it on somebody's wish
    CLIENT_GONE = "client_gone"
    GIVEN_UP = "given_up"  #: another answer of its split request failed, and so the whole request did
    ENGINE_ERROR = "engine_error"  #: the engine's own error went to the client
    REJECTED = "rejected"  #: refused here, in the engine's words, before any worker saw it
    FAILED = "failed"  #: our loud error
    SHUTDOWN = "shutdown"  #: the proxy's grace period was over


@dataclass(slots=True)
class AttemptRecord:
    """One attempt. Times on the loop's clock, in seconds."""

    worker: str
    url: str
    rid: str
    started: float
    #: Tokens that were delivered before it, and those that it gave.
    resumed_from: int
    tokens: int = 0
    ended: float = 0.0
    first_token: float | None = None
    last_token: float | None = None
    #: Id and URL of the worker that computed the prompt for it, where that is another one.
    prefill: str | None = None
    prefill_url: str | None = None
    #: It was placed without a prefill worker, since none is left (`--decode-fallback`).
    aggregated: bool = False
    #: The failure's kind, "left" if it was given up without one (client gone, abort); None if it ended well.
    cause: str | None = "left"
    #: The failure in our own words; an engine's may quote the prompt.
    detail: str = ""

    def close(self, now: float, reader: AnswerReader | None) -> None:
        """The attempt has ended."""
        self.ended = now
        if reader is not None:
            self.first_token, self.last_token = reader.first_token, reader.last_token

    def row(self, number: int, since: float) -> dict[str, object]:
        """For the trace file, nested in the request's row."""
        return {
            "number": number,
            "worker": self.worker,
            "url": self.url,
            "prefill": self.prefill,
            "prefill_url": self.prefill_url,
            "aggregated": self.aggregated,
            "rid": self.rid,
            "started": self.started - since,
            "first_token": None if self.first_token is None else self.first_token - since,
            "last_token": None if self.last_token is None else self.last_token - since,
            "ended": self.ended - since,
            "tokens": self.tokens,
            "resumed_from": self.resumed_from,
            "cause": self.cause,
            "detail": self.detail,
        }


@dataclass(slots=True)
class RequestRecord:
    """One logical request. `wall`: its beginning in seconds since 1970; `started`: the same on the loop's clock."""

    rid: str
    path: str
    streaming: bool
    wall: float
    started: float
    state: State = State.OPEN
    #: Seconds that it waited for its turn.
    queued: float = 0.0
    #: A worker may have begun to work on it.
    started_work: bool = False
    #: One answer of a split request: the whole's name, and which one it is.
    bundle: str | None = None
    index: int | None = None
    attempts: list[AttemptRecord] = field(default_factory=list)
    outcome: Outcome = Outcome.FAILED
    #: client, proxy or worker.
    closed_by: str = ""
    #: The status that the client saw; 499 if it left before, 0 if it saw none for another reason.
    status: int = 0
    migratable: bool = True
    #: The field that forbids migration; "" if none does.
    refusal: str = ""
    #: Why it failed, or which error was relayed: a bounded label.
    error: str = ""
    prompt_tokens: int = 0
    #: None if the answer was only forwarded.
    completion_tokens: int | None = 0
    cached_tokens: int | None = None
    #: Tokens of more than one weight version are in the answer; None if that is not known.
    crossed_versions: bool | None = False
    #: An uninterrupted run might have drawn other tokens.
    resampled: bool = False
    #: Rows to replay that a later attempt than the first to have them has computed, by field: intervals of positions.
    recomputed_rows: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    ended: float = 0.0

    def settle(self, delivered: int) -> None:
        """So many tokens are delivered, now that the format has gone back to those that it is sure of."""
        gave = next((attempt for attempt in reversed(self.attempts) if attempt.tokens), None)
        if gave is not None:
            gave.tokens = delivered - gave.resumed_from

    def step(self, step: Step) -> None:
        """Move by the table. Raises `IllegalStep`."""
        self.state = advance(self.state, step)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None if there was none."""
        times = [attempt.first_token for attempt in self.attempts if attempt.first_token is not None]
        return times[0] - self.started if times else None

    def row(self) -> dict[str, object]:
        """For the trace file. Times in seconds since the request began, but `time`: since 1970."""
        return {
            "time": self.wall,
            "rid": self.rid,
            "bundle": self.bundle,
            "index": self.index,
            "path": self.path,
            "streaming": self.streaming,
            "outcome": self.outcome.value,
            "status": self.status,
            "migratable": self.migratable,
            "reason": self.refusal,
            "error": self.error,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "crossed_versions": self.crossed_versions,
            "resampled": self.resampled,
            "recomputed_rows": self.recomputed_rows,
            "closed_by": self.closed_by,
            "queued": self.queued,
            "ttft": self.ttft,
            "duration": self.ended - self.started,
            "attempts": [attempt.row(number, self.started) for number, attempt in enumerate(self.attempts)],
        }


def publish(record: RequestRecord, trace: TraceFile | None) -> None:
    """Write the request's one log line, and its one row if there is a trace file."""
    if trace is not None:
        trace.write(record.row())
    loud = record.outcome in (Outcome.FAILED, Outcome.SHUTDOWN)
    if not log.is_enabled_for(logging.WARNING if loud else logging.INFO):
        return
    write = log.warning if loud else log.info
    shown = record.attempts[-SHOWN:]
    paired = any(attempt.prefill or attempt.aggregated for attempt in shown)
    prefills = {"prefills": [attempt.prefill for attempt in shown]} if paired else {}
    write(
        "request end",
        rid=record.rid,
        outcome=record.outcome.value,
        status=record.status,
        migratable=record.migratable,
        reason=record.refusal,
        error=record.error,
        tokens=record.completion_tokens,
        attempts=len(record.attempts),
        workers=[attempt.worker for attempt in shown],
        **prefills,
        cuts=[
            f"{attempt.cause}@{attempt.resumed_from + attempt.tokens}" for attempt in shown if attempt.cause is not None
        ],
        closed_by=record.closed_by,
        seconds=round(record.ended - record.started, 3),
    )
