"""Reading the events of an attempt.

Every event goes through `Account._account`, which checks it against the one before and keeps the count. What then
happens to it depends on how the attempt is read:

- `_plain`: the client streams and has seen only this attempt: it gets the worker's own bytes;
- `_rebased`: the client streams and has tokens of earlier attempts, or knows the request by another rid: it gets the
  event as the uninterrupted answer would have it, in the dialect it knows;
- `_folded`: the client does not stream: nothing is sent, and the newest event and the gathered deltas make the answer;
- `_blind`: the request is not migratable: whole events pass, and only errors before an answer are held back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from dyn_relay.formats.base import End, Event, Outbound, Verdict
from dyn_relay.formats.sglang.account import UNREADABLE
from dyn_relay.formats.sglang.answer import IDS
from dyn_relay.formats.sglang.detection import spoken, told
from dyn_relay.formats.sglang.dialect import Dialect, deltas
from dyn_relay.formats.sglang.events import (
    DONE,
    Kind,
    as_received,
    count,
    fault,
    finish_type,
    framed,
    kind,
    total_of,
    versions_of,
    whole_decoder,
)
from dyn_relay.formats.sglang.ledger import Attempt
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.sglang.rules import Rules
from dyn_relay.formats.sglang.spans import label
from dyn_relay.formats.sglang.steady import Steady
from dyn_relay.formats.sglang.stencil import Stencil
from dyn_relay.formats.sglang.wire import (
    Foreign,
    NotJson,
    read,
)

_anything = msgspec.json.Decoder(Raw)

#: So many are made in an attempt; one whose events go on to differ in more than numbers is better off without.
STENCILS = 8


class Reader(Steady):
    """The events of one logical request's attempts, in order; the part of an exchange that looks into answers."""

    __slots__ = ("_counts", "_labels", "_one_piece", "_shown", "_stencil", "_take")

    def __init__(self, request: Request, rid: str, rules: Rules) -> None:
        super().__init__(request, rid, rules)
        #: Not bound to the exchange: one that refers to itself stays, with its body, until garbage is collected.
        self._take: Callable[[Any, bytes, bytes, float], Sequence[bytes]] = Reader._blind
        #: For events that only bring more tokens, where the client's are written here.
        self._stencil: Stencil | None = None
        #: The current attempt's worker has answered 200, in one piece.
        self._one_piece = False
        #: Something of a request that is not migratable has gone to the client.
        self._shown = False
        #: Tokens by choice, for those.
        self._counts: dict[int, int] = {}
        #: And the weights' versions that their events told.
        self._labels: defaultdict[int, set[object]] = defaultdict(set)

    def _begin(self, attempt: Attempt) -> None:
        self._attempt, self._settled = attempt, False
        self.attempt_tokens = 0
        self.end, self.detail, self.accuses, self._held, self._fault = None, "", False, b"", None
        self._finished = self._aborted = self._even = False
        self._steady = self._stencil = None
        if not self.verdict.migratable:
            self._take = Reader._blind
        elif not self.streaming:
            self._take = Reader._folded
            self._even = not self._ledger.replays
        else:
            plain = attempt.rid == self.rid and not attempt.base and not self._request.hides_prompt
            plain = plain and self._dialect in (None, attempt.hint)
            self._take = Reader._plain if plain else Reader._rebased
            self._even = plain and not self._ledger.replays

    @property
    def question(self) -> Outbound | None:
        """What the worker must be asked before more of its answer is taken."""
        seam = self._attempt.seam
        return seam.question if seam is not None and self.end is None else None

    def feed(self, events: Sequence[Event], now: float) -> bytes:
        """Take whole events; return what the client's body gets."""
        prefilled = self._attempt.prefilled
        if prefilled is not None:
            try:
                events = prefilled.take(events)
            except UNREADABLE as exc:
                self._stop(End.GARBAGE, str(exc))
                return b""
        return self._joined(events, now)

    def _joined(self, events: Sequence[Event], now: float) -> bytes:
        """Events with the prefill worker's part; of a continuation's text the seam comes first."""
        seam = self._attempt.seam
        if seam is not None:
            try:
                events = seam.take(events)
            except UNREADABLE as exc:
                self._stop(End.GARBAGE, str(exc))
                return b""
        return self._read(events, now)

    def reply(self, status: int, data: bytes, now: float) -> bytes:
        """The answer to `question`; return what the client's body gets. Raises `CannotComplete`."""
        seam = self._attempt.seam
        assert seam is not None
        try:
            events = seam.reply(status, data)
        except UNREADABLE as exc:
            self._stop(End.REFUSED, str(exc))
            return b""
        return self._read(events, now)

    def _read(self, events: Sequence[Event], now: float) -> bytes:
        out: list[bytes] = []
        try:
            for whole, data in events:
                if self.end is not None:
                    break
                # JSON has line ends between its words only; in an event that is written again they would end it.
                data = data.replace(b"\n", b" ")
                if not data or (self._steady is not None and (whole or not self.streaming) and self.passes(data)):
                    if self.streaming:
                        out.append(whole)
                elif data == DONE:
                    out.append(self._done(whole))
                else:
                    out += self._take(self, whole, data, now)
        except UNREADABLE as exc:
            # NotJson and Foreign are ValueErrors; so is a count that does not add up.
            self._stop(End.GARBAGE, str(exc))
        return b"".join(out)

    def _done(self, whole: bytes) -> bytes:
        if not self._finished and self._take is not Reader._blind:
            raise Foreign("[DONE] without a finish")
        self.end = End.ABORTED if self._aborted else End.FINISHED
        return whole if self.streaming else b""

    def _plain(self, whole: bytes, data: bytes, now: float) -> Sequence[bytes]:
        try:
            return () if self._account(data, now, whole) is None else as_received(whole, data)
        except Foreign as exc:
            return self._foreign(exc, whole, data, now)

    def _foreign(self, exc: Foreign, whole: bytes, data: bytes, now: float) -> Sequence[bytes]:
        """Another server, or another release: its answers pass, but we cannot continue them, nor continue with them."""
        if self._attempt.events or self._attempt.base:
            raise exc
        self.verdict = Verdict(IDS)
        self._take = Reader._blind
        return self._blind(whole, data, now)

    @property
    def answering(self) -> bool:
        """An event of the current attempt came: counted, waiting for the one that shows its dialect, or an echo."""
        attempt = self._attempt
        waits = bool(attempt.held) or (attempt.seam is not None and attempt.seam.waits)
        return attempt.events > 0 or waits or self._finished

    def _rebased(self, whole: bytes, data: bytes, now: float) -> Sequence[bytes]:
        attempt = self._attempt
        if self._dialect is None and self.delivered and not attempt.events:
            waits = not attempt.held and kind(read(whole_decoder, data)) is Kind.PROGRESS
            if waits and (known := told(attempt.hint, data)) is not None:
                self._dialect = self._adopted(known)
            elif waits:
                attempt.held = data
                return ()
            else:
                return self._release(whole, data, now)
        try:
            return self._show(whole, data, now)
        except Foreign as exc:
            return self._foreign(exc, whole, data, now)

    def _release(self, whole: bytes, data: bytes, now: float) -> Sequence[bytes]:
        """The second event shows the dialect (or the first is the last one, and may as well be the default's)."""
        held, self._attempt.held = self._attempt.held, b""
        event = read(whole_decoder, data)
        shown = kind(event) is not Kind.ERROR
        if not held or not shown:
            self._dialect = self._adopted(self._attempt.hint or Dialect.CUMULATIVE) if shown else None
            return self._show(whole, data, now)
        before, total = total_of(read(whole_decoder, held)), total_of(event)
        shown_deltas = bool(deltas(count(event.output_ids), before, total))
        self._dialect = self._adopted(spoken(data, held, shown_deltas, before, total))
        return [*self._show(b"", held, now), *self._show(whole, data, now)]

    def _adopted(self, dialect: Dialect) -> Dialect:
        """A continuation's dialect as the client's, unless the first worker has said that its ids are deltas."""
        return Dialect.INCREMENTAL if self._deltas_said and not dialect.ids_are_deltas else dialect

    def _show(self, whole: bytes, data: bytes, now: float) -> Sequence[bytes]:
        if self._stencil is not None and (given := self._stencilled(self._stencil, data)):
            return (b"data: ", given, b"\n\n")
        attempt, self._stencil = self._attempt, None
        before = self._account(data, now, whole)
        if before is None:
            return ()
        view = self._view(now, before)
        if not view.dialect.rows_are_deltas:
            self._gather(data)
        shown = view.event(data)
        attempt.body, attempt.shown = None if self._finished else shown, b""
        if self._foreseeable(view.dialect):
            attempt.stencils += 1
            self._stencil = Stencil.of(data, shown, attempt.base)
        return framed(*shown)

    def _foreseeable(self, dialect: Dialect) -> bool:
        """May the next events be taken by a stencil? It knows numbers, and lists that are deltas on both sides."""
        attempt, ledger = self._attempt, self._ledger
        deltas = dialect is attempt.dialect is Dialect.INCREMENTAL and attempt.deltas
        few = attempt.stencils < STENCILS
        return few and deltas and not (self._finished or ledger.text or ledger.replays or attempt.prefilled)

    def _stencilled(self, stencil: Stencil, data: bytes) -> bytes:
        """Count an event that differs from the one before in numbers alone, and give the client's; b"" for another."""
        attempt = self._attempt
        taken = stencil.event(data, attempt.tokens)
        if taken is None:
            return b""
        ids, total, shown = taken
        try:
            self._ledger.ids.extend(ids)
        except OverflowError:
            return b""  # `_account` says so
        attempt.body, attempt.shown, attempt.newest = None, shown, data
        attempt.events += 1
        attempt.last_delta = len(ids)
        attempt.tokens = self.attempt_tokens = total
        self.delivered = attempt.base + total
        return shown

    def _folded(self, whole: bytes, data: bytes, now: float) -> Sequence[bytes]:
        if self._account(data, now, whole) is not None:
            self._gather(data)
        return ()

    def _blind(self, whole: bytes, data: bytes, now: float) -> Sequence[bytes]:
        """An event of a request that is not continued: it passes, unless it says that there will be no answer."""
        try:
            event = read(whole_decoder, data)
            word = kind(event)
        except (Foreign, NotJson):
            if self._one_piece:
                read(_anything, data)  # what is no JSON at all is half an answer
            self._shown = True
            return as_received(whole, data)
        if self._attempt.rid != self.rid:
            whole = self._renamed(whole, data)
        meta = event.meta_info
        if event.index is None and word is Kind.ERROR:
            self._fail(fault(event), data, whole)
            return ()
        if meta is not None and isinstance(meta.completion_tokens, int):
            self._counts[event.index or 0] = meta.completion_tokens
            self.delivered = self.attempt_tokens = sum(self._counts.values())
            self._labels[event.index or 0].update(map(label, versions_of(meta)))
        if event.index is None and word in (Kind.FINISH, Kind.ABORT_ECHO):
            self._finished, self._aborted = True, finish_type(event) == "abort"
        self._shown = True
        return as_received(whole, data)
