"""What a format is to the relay.

A `Format` is one backend's wire format. For each logical request it opens an `Exchange`: a sans-IO object that holds
the client's body, judges it, makes the body of every attempt, reads the answers of the engines, keeps the ledger of
what was delivered, and renders what the client sees. The relay moves bytes and decides where attempts go; it never
looks into a body. Times are passed in (seconds on a monotonic clock), random names too.

One attempt goes like this::

    outbound = exchange.dispatch(traits, rid, now)      # what to send to the chosen worker
    reading  = exchange.head(status, headers)           # its answer's head: how to read the body
    out      = exchange.feed(events, now)               # Reading.EVENTS: whole SSE events in, client bytes out
    exchange.body(data, now)                            # Reading.WHOLE: the whole body, once it is complete
    exchange.end                                        # not None once the engine has said its last word

While `exchange.question` is not None after a `feed` or `body`, the worker is asked that first, beside the answer::

    out      = exchange.reply(status, body, now)        # and then `question` and `end` again

and when the attempt was cut before the engine's own last word, `exchange.complete(now)` tells whether the answer can be
finished without another worker; if not, the next `dispatch` is a continuation.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from dyn_relay.formats.traits import Pairing, Traits

#: Lower-case names, in the order of the wire.
Headers = list[tuple[bytes, bytes]]

#: One server-sent event: (its bytes as received, the blank line included; its data, lines joined, `b""` for a comment).
#: A large one in the usual framing (`data: `, its data, LF LF) comes without the first.
Event = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """A client's request on one of the format's own paths, body complete."""

    method: str
    path: str
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: Headers = field(default_factory=list)

    @classmethod
    def of(cls, status: int, value: object) -> Answer:
        """One whose body is the value, as JSON."""
        return cls(status, msgspec.json.encode(value))


@dataclass(frozen=True, slots=True)
class Outbound:
    """A request to a worker."""

    method: str
    path: str
    body: bytes
    content_type: bytes = b"application/json"


class Rejected(Exception):
    """The request is refused here, with the answer that the engine would give. No worker sees it."""

    def __init__(self, reason: str, answer: Answer, rid: str = "") -> None:
        super().__init__(reason)
        #: The client's own name for it, if it gave one.
        self.rid = rid
        #: A bounded label: the name of the field or rule.
        self.reason = reason
        #: For a streaming client the body is the SSE body and the status 200, as the engine does it.
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Verdict:
    """May the request be continued on another worker? `reason` is the name of the field that forbids it, else ""."""

    reason: str = ""

    @property
    def migratable(self) -> bool:
        """True if a cut attempt may be continued."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would become of a request (`Format.explain`). Texts are for people; what they quote is the wire's."""

    verdict: Verdict
    #: What is asked of the field that decides, and why; "" if the request is migratable.
    rule: str = ""
    because: str = ""
    #: What it asks for and the worker has not said to have; "" if it has all.
    lacks: str = ""
    #: The whole answer, if no worker would see the request (see `Rejected`).
    answer: Answer | None = None
    #: Of a request that is split: which of the answers this is about, counted from 0, and how many there are.
    index: int | None = None
    answers: int = 1
    #: Tokens of the prompt; 0 where unknown.
    prompt_tokens: int = 0
    #: What the worker of the next attempt would be sent, if the one before were cut now.
    continuation: Outbound | None = None
    #: What happens instead of a continuation; "" if there is one.
    instead: str = ""
    #: What in the continuation is made up, since no engine has spoken.
    stand_ins: tuple[str, ...] = ()
    #: What a worker must have, or say of itself, to get the continuation.
    needs: tuple[str, ...] = ()
    #: What would be otherwise with other workers.
    depends: tuple[str, ...] = ()


class Reading(enum.Enum):
    """How the relay reads the body of an attempt's answer."""

    EVENTS = "events"  #: server-sent events, each passed to `Exchange.feed` when whole
    WHOLE = "whole"  #: collected (bounded) and passed to `Exchange.body` once complete: an error, or a short answer
    OPAQUE = "opaque"  #: forwarded as it comes; the format takes no interest. Only if refused (not migratable)


class End(enum.Enum):
    """How an engine itself ended an attempt."""

    FINISHED = "finished"  #: the answer is complete (also: a client's or operator's abort, relayed)
    ABORTED = "aborted"  #: complete; somebody asked the engine to abort (status_code null)
    REFUSED = "refused"  #: the engine's 4xx: the client's mistake. Relayed, never retried, no penalty
    BUSY = "busy"  #: 503 or 429, queue full: nothing was generated; another worker may take it. No penalty
    INTERRUPTED = "interrupted"  #: somebody asked the engine to abort, and the rules are to go on elsewhere
    FAILED = "failed"  #: 5xx in any shape: the attempt failed, the worker says so itself
    GARBAGE = "garbage"  #: what came is not the format's language; the connection must not be used again


class CannotComplete(Exception):
    """Nothing is left to generate but the answer's last part cannot be made here. `reason` is a bounded label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Exchange(Protocol):
    """One logical request, as its format sees it."""

    #: The name the client knows the request by: its own rid, or the one it was given at `open`.
    rid: str
    #: The client itself has named it. A request that is not migratable goes to its worker with no other name.
    named: bool
    #: The client asked for server-sent events.
    streaming: bool
    #: Answers that it asks for: a worker's load by it.
    generations: int
    #: The data-parallel rank that the client asks for; -1 for what can be none, None if any will do.
    pinned: int | None
    #: What its client calls the session that it belongs to; "" if nothing.
    session: str
    #: Engines share cached prefixes only between requests for which this is the same (adapters, salts).
    cache_space: bytes
    #: What `admit` said; an answer may show later that no continuation can be exact, and then it changes.
    verdict: Verdict
    #: Tokens of the prompt; 0 where unknown.
    prompt_tokens: int
    #: Tokens delivered to the client (streams) or safely in the ledger (unary), over all attempts. Unary: after a cut,
    #: `complete` may take some back, for a continuation to make them again.
    delivered: int
    #: Of these, those of the current attempt; `complete` may take some back.
    attempt_tokens: int
    #: `cached_tokens` of the first attempt, None until known.
    cached_tokens: int | None
    #: The engine's last word on the current attempt; None while there is none.
    end: End | None
    #: A line about `end` for logs: the engine's message.
    detail: str
    #: It says that the other worker of the attempt's pair is at fault.
    accuses: bool
    #: What the prefill worker of the current attempt is to be sent; None if it has none.
    beside: Outbound | None

    @property
    def question(self) -> Outbound | None:
        """What the attempt's worker must be asked before more of its answer can be taken."""

    @property
    def leavable(self) -> bool:
        """The current attempt may be taken from its worker now: another one is sure to go on with it exactly.

        False also when the answer is all but at its end.
        """

    @property
    def answering(self) -> bool:
        """An event of the current attempt's answer has come; it may be held back, or have no tokens."""

    def admit(self, traits: Traits) -> Verdict:
        """Judge, once, before the first dispatch, given the worker chosen for attempt 0."""

    def know(self, traits: Traits) -> None:
        """What that worker says by now; it counts if it had said nothing when the request was judged."""

    def fingerprint(self) -> bytes:
        """The same for two requests that would do the same to an engine, whatever their rid."""

    def prefix(self) -> Sequence[int] | str | None:
        """Prompt and delivered tokens, or the prompt's text while its ids are not known; of a batch, its first prompt.

        None if neither is known.
        """

    def lacks(self, traits: Traits) -> str:
        """What the request asks for and a worker with these traits has not said to have; "" if it has all.

        Such a worker gets no attempt while there is one that lacks nothing.
        """

    def unfit(self, traits: Traits) -> str:
        """Why no attempt after the first may go to a worker with these traits, in a word or two; "" if one may."""

    @property
    def waits_for_prefill(self) -> bool:
        """No more of the current attempt's answer can be taken before `prefilled` is called."""

    def dispatch(
        self, traits: Traits, rid: str, now: float, rank: int | None = None, pairing: Pairing | None = None
    ) -> Outbound:
        """Begin the next attempt, under the name `rid`; the first gives the client's request, later ones continuations.

        `rid` is the exchange's own for attempt 0, unless aborts would take that for another live one. A request that is
        not migratable keeps the client's body, and so its rid. `rank`: the data-parallel rank that is to take it, which
        the request then names; None: the first attempt names what its client does, later ones none.

        `pairing`: the worker has one for the prompt beside it, which is sent `beside` at the same time.

        Not to be called once `complete` has given bytes.
        """

    def prefilled(self, answer: Answer, events: Sequence[Event] | None, now: float) -> bytes:
        """The prefill worker's whole answer, and its `events` if it is a stream of them; return as `feed`.

        Sets `end` if it is an error, also if there was one already. Raises `CannotComplete`.
        """

    def refers(self, answer: Answer, events: Sequence[Event] | None) -> bool:
        """Is the prefill worker's answer an error of which the decode worker may say more?"""

    def mismatch(self, decode: Traits, prefill: Traits) -> str:
        """Why two workers with these traits can be no pair for the next attempt, in a word or two; "" if they can."""

    def stall_allowance(self) -> float:
        """Seconds of silence that the current attempt's cadence explains, on top of the relay's own limit."""

    def head(self, status: int, headers: Headers) -> Reading:
        """The head of the current attempt's answer is there."""

    def feed(self, events: Sequence[Event], now: float) -> bytes:
        """Take whole events; return what the client's body gets (always `b""` for a unary client).

        Sets `end` when the engine has said its last word. The events of an end other than FINISHED/ABORTED are held
        back: see `last_words`. After `end` is set, further events are ignored. Raises `CannotComplete`.
        """

    def passes(self, data: bytes) -> bool:
        """Is an event with this payload only more of the same, which the client of a stream gets as it is?

        If so, it has been taken. Else nothing was done: `feed` it.
        """

    def body(self, data: bytes, now: float) -> None:
        """The whole body of a `Reading.WHOLE` answer. Sets `end`, unless there is a `question`."""

    def reply(self, status: int, body: bytes, now: float) -> bytes:
        """The worker's answer to `question`; return what the client's body gets. Sets `end` as `feed` does.

        Raises `CannotComplete`.
        """

    def last_words(self) -> bytes:
        """Streams: the engine's own held-back final events (REFUSED, BUSY, FAILED), for relaying them after all."""

    def complete(self, now: float) -> bytes | None:
        """After a cut: can the answer be finished without a worker (finish seen, budget spent, stop token delivered)?

        Streams: the bytes that finish it. Unary: `b""`; `answer` then gives it. None: it needs a continuation.
        Raises `CannotComplete`.
        """

    def abort(self, now: float) -> bytes | None:
        """Somebody aborted the request while no worker had it: end the answer as the engine would have.

        Streams: the abort's event and the terminator. Unary: `b""`; `answer` then gives it. None: it cannot be made.
        """

    def answer(self, now: float) -> Answer:
        """Unary: the whole answer to the client, after `end` or `complete`."""

    def failure(self, status: int, reason: str, message: str, started: bool) -> Answer:
        """The relay's own error, for unary clients and streams without a head yet. Says `delivered` and `started`."""

    def failure_event(self, status: int, reason: str, message: str) -> bytes:
        """The relay's own error inside a started stream: one SSE event, no terminator. Says `delivered`."""

    def crossed_versions(self) -> bool | None:
        """True if an answer's tokens come from more than one weight version; None if that is not known."""

    def resampled(self) -> bool:
        """True if an uninterrupted run might have drawn other tokens: the answer is a valid sample, not that one."""

    def recomputed(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Rows to replay that the client has from a later attempt than the one that computed them first.

        By field, half-open intervals of positions in prompt and answer; fields without any are missing.
        """


class Item(Exchange, Protocol):
    """One of the answers that a split request asks for. Its stream has no terminator: that is the whole's."""

    #: What the client calls it, where its rid is not that; else "".
    alias: str

    @property
    def outright(self) -> bool:
        """It has ended with an engine's error that is no part of an answer, but a stream's only event."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A request for several answers, as one request for each."""

    #: The client's own rid for the whole, or one that was made up.
    name: str
    #: In the order of the answer; there is at least one.
    items: Sequence[Item]
    #: What ends the stream that the items' events make.
    terminator: bytes
    #: The answer that the items' whole answers make.
    join: Callable[[Sequence[Answer]], Answer]


#: A verdict on a prompt of so many tokens, within the limits that the relay sets itself.
Limits = Callable[[Verdict, int], Verdict]


class Format(Protocol):
    """One backend's wire format."""

    name: str
    #: Paths whose requests get an exchange, without trailing slash; all others are bridged.
    paths: frozenset[str]
    #: Methods accepted on these paths.
    methods: frozenset[str]
    #: Endpoints that describe a worker, asked with GET when it joins and when it comes back.
    info_paths: tuple[str, ...]
    #: Endpoint that gives 503 while somebody has paused the worker.
    ready_path: str
    #: A worker of the release that the format was written for, started with its default options.
    stock: Traits

    def open(self, request: NativeRequest, rid: str) -> Exchange:
        """Begin a logical request; `rid` is used if the client named none. Raises `Rejected`."""

    def split(self, request: NativeRequest, fresh: Callable[[], str]) -> Exchange | Bundle:
        """As `open`, but a request for several answers gives one for each, where that is the same for its client.

        `fresh` makes rids. What is not split says so: its verdict's reason is the field that forbids it.
        """

    def traits(self, infos: dict[str, bytes]) -> Traits:
        """Read a worker's answers to `info_paths`; paths that it did not answer with 200 are missing."""

    def explain(
        self, request: NativeRequest, traits: Traits, after: int, limited: Limits, *, split: bool = False
    ) -> Explanation:
        """What `admit` would say of it, and what would follow a cut after `after` tokens, at workers with `traits`.

        With `split`, of a request that is split: about the first answer whose verdict, within `limited`, is a refusal,
        since the whole is only as safe as each of them; if there is none, about the first.

        Raises `ValueError` for what cannot be explained: "FIELD: what is wrong".
        """

    def abort(self, rid: str) -> Outbound:
        """The request that makes a worker drop the attempt `rid`."""

    def abort_all(self) -> Outbound:
        """The request that makes a worker drop everything."""

    def duplicate(self, request: NativeRequest, rid: str) -> Answer:
        """The answer to a request whose rid is still live."""
