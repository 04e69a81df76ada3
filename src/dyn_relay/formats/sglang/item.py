"""One answer of several: an exchange of its own whose client is a list, or a stream that it shares with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dyn_relay.formats.base import Answer, CannotComplete, End, Event, Outbound, Verdict
from dyn_relay.formats.sglang.batch import Share
from dyn_relay.formats.sglang.dialect import Dialect, hinted
from dyn_relay.formats.sglang.events import DONE, DONE_EVENT
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.sglang.rules import Rules
from dyn_relay.formats.sglang.wire import Foreign, read_fields
from dyn_relay.formats.traits import UNKNOWN, Pairing, Traits

_ERRORS = (End.REFUSED, End.BUSY, End.FAILED)


#: Why an answer that is not rebased cannot be part of a stream in another dialect.
_DIALECT = "incremental_streaming_output"


@dataclass(slots=True)
class Common:
    """What the answers of one stream have in common."""

    #: The first worker that was chosen for one of them.
    first: Traits | None = None

    def adopt(self, traits: Traits) -> Dialect:
        """The stream's dialect, if need be this worker's."""
        self.first = self.first or traits
        return hinted(self.first.incremental) or Dialect.CUMULATIVE

    def speaks(self, traits: Traits) -> bool:
        """Is it what the worker speaks?"""
        return self.first is None or self.first.incremental == traits.incremental


class Item(SglangExchange):
    """See `dyn_relay.formats.base.Item`. Its events say which it is, at their end, where stock says it."""

    __slots__ = ("_common", "_index", "alias")

    def __init__(self, share: Share, index: int, rules: Rules, common: Common) -> None:
        super().__init__(share.request, share.rid, rules)
        self.alias = share.alias
        self._index = b',"index":%d}' % index
        self._common = common

    def admit(self, traits: Traits) -> Verdict:
        """As any exchange; the first worker's dialect is that of all."""
        if self.streaming and traits != UNKNOWN:
            self._common.adopt(traits)
        return super().admit(traits)

    def lacks(self, traits: Traits) -> str:
        """Also the dialect, of an answer that goes on as it comes."""
        other = not self.verdict.migratable and not self._common.speaks(traits)
        return super().lacks(traits) or (_DIALECT if other else "")

    def dispatch(
        self, traits: Traits, rid: str, now: float, rank: int | None = None, pairing: Pairing | None = None
    ) -> Outbound:
        """As any exchange; what comes is told in the dialect of all. Raises `CannotComplete` if it cannot be."""
        if self.streaming:
            common = self._common.adopt(traits)
            if not self._common.speaks(traits):
                if not self.verdict.migratable:
                    raise CannotComplete(_DIALECT)
                self._dialect = self._dialect or common
        return super().dispatch(traits, rid, now, rank, pairing)

    @property
    def outright(self) -> bool:
        """The engine would not even begin: its error is no part of an answer, and has no index."""
        held = self._held.removeprefix(b"data: ")
        return self.end in _ERRORS and bool(held) and "meta_info" not in read_fields(held)

    def prefilled(self, answer: Answer, events: Sequence[Event] | None, now: float) -> bytes:
        """As any exchange."""
        return self._placed(super().prefilled(answer, events, now))

    def feed(self, events: Sequence[Event], now: float) -> bytes:
        """As any exchange; the terminator is not for one answer alone to give."""
        return self._placed(super().feed([_spelled(event) for event in events], now))

    def reply(self, status: int, body: bytes, now: float) -> bytes:
        """As `feed`."""
        return self._placed(super().reply(status, body, now))

    def last_words(self) -> bytes:
        """The held-back event."""
        return self._held if self.outright else self._placed(super().last_words())

    def complete(self, now: float) -> bytes | None:
        """As `feed`."""
        rest = super().complete(now)
        return None if rest is None else self._placed(rest)

    def abort(self, now: float) -> bytes | None:
        """As `feed`."""
        rest = super().abort(now)
        return None if rest is None else self._placed(rest)

    def failure(self, status: int, reason: str, message: str, started: bool) -> Answer:
        """The relay's own error says which answer it is about."""
        answer = super().failure(status, reason, message, started)
        return Answer(answer.status, answer.body.removesuffix(b"}") + self._index)

    def failure_event(self, status: int, reason: str, message: str) -> bytes:
        """As `failure`."""
        return self._placed(super().failure_event(status, reason, message))

    def _done(self, whole: bytes) -> bytes:
        if not self._finished:
            raise Foreign("[DONE] without a finish")  # of a stream for all it would be missed by nobody
        return super()._done(whole)

    def _placed(self, out: bytes) -> bytes:
        # No line ends stand in the JSON of an event: where a brace comes before two of them, the event ends.
        return out.removesuffix(DONE_EVENT).replace(b"}\n\n", self._index + b"\n\n")


def joined(answers: Sequence[Answer]) -> Answer:
    """The whole answers as the list that stock makes of them."""
    return Answer(200, b"[" + b",".join([answer.body for answer in answers]) + b"]")


def _spelled(event: Event) -> Event:
    """An event as SGLang spells it, however it came."""
    data = event[1]
    if not data:
        return event
    return (DONE_EVENT if data == DONE else b"data: " + data.replace(b"\n", b" ").strip() + b"\n\n"), data
