"""One logical request to native `/generate`: what the relay drives. `Reader` looks into the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dyn_relay.formats.base import Answer, CannotComplete, End, Event, Headers, Outbound, Reading, Verdict
from dyn_relay.formats.sglang import affinity, continuation, errors, fold
from dyn_relay.formats.sglang.account import UNREADABLE
from dyn_relay.formats.sglang.admission import judge
from dyn_relay.formats.sglang.answer import RECOMPUTED
from dyn_relay.formats.sglang.batch import asked
from dyn_relay.formats.sglang.demands import DEMANDS, Standing
from dyn_relay.formats.sglang.dialect import Dialect, hinted
from dyn_relay.formats.sglang.events import (
    DONE,
    DONE_EVENT,
    Kind,
    fault,
    framed,
    kind,
    meta_of,
    total_of,
    whole_decoder,
)
from dyn_relay.formats.sglang.ledger import Attempt
from dyn_relay.formats.sglang.needs import needs_of
from dyn_relay.formats.sglang.pair import legs
from dyn_relay.formats.sglang.paired import Paired
from dyn_relay.formats.sglang.rebase import recomputed, restored
from dyn_relay.formats.sglang.replay import meet
from dyn_relay.formats.sglang.request import Request, header
from dyn_relay.formats.sglang.rules import Rules
from dyn_relay.formats.sglang.seam import CONTEXT, Seam
from dyn_relay.formats.sglang.spans import label
from dyn_relay.formats.sglang.wire import Fields, plain, raw, read
from dyn_relay.formats.traits import UNKNOWN, Pairing, Traits

PATH = "/generate"

#: Seconds that a token may take before its silence counts, for engines that were asked to say less.
_SECONDS_A_TOKEN = 0.1


class SglangExchange(Paired):
    """See `dyn_relay.formats.base.Exchange`."""

    __slots__ = (
        "_as_is",
        "_content_type",
        "_local",
        "_needs",
        "_owed_finish",
        "_status",
        "_traits",
        "cache_space",
        "generations",
        "pinned",
        "session",
        "unsplit",
    )

    def __init__(self, request: Request, rid: str, rules: Rules) -> None:
        """`rid`: for a client that gave none."""
        super().__init__(request, rid, rules)
        self.prompt_tokens = request.prompt_tokens
        self._needs = needs_of(request)
        self.generations = asked(request).generations
        self.pinned = affinity.pinned(request)
        self.session = affinity.session(request)
        self.cache_space = affinity.cache_space(request)
        #: Of a request for several answers that was to be split: the field because of which it was not.
        self.unsplit = ""
        #: Those of the worker that attempt 0 was admitted for.
        self._traits = Traits()
        self._status = 0
        self._content_type = b""
        #: The current attempt's worker was sent the client's own body.
        self._as_is = False
        #: The finish that was made here.
        self._local: tuple[Fields, Fields] | None = None
        #: The reason of one that is made as soon as its rows to replay are there; {} for none.
        self._owed_finish: dict[str, object] = {}

    @property
    def request(self) -> Request:
        """What the client asked for, of a split request for this answer."""
        return self._request

    def admit(self, traits: Traits) -> Verdict:
        """Judge, once, before the first dispatch, given the worker chosen for attempt 0."""
        self._traits = traits
        for name, replay in self._ledger.replays.items():
            replay.owed = getattr(traits, name) is not False
        self.verdict = judge(self._request, traits)
        if self.unsplit and self.verdict.reason in ("batch", "n"):
            self.verdict = Verdict(self.unsplit)
        return self.verdict

    def know(self, traits: Traits) -> None:
        """What the worker of attempt 0 says by now; it counts if it had said nothing."""
        if self._traits == UNKNOWN:
            self._traits = traits

    def fingerprint(self) -> bytes:
        """32 bytes; see `Request.fingerprint`."""
        return self._request.fingerprint()

    def prefix(self) -> Sequence[int] | str | None:
        """Prompt and delivered tokens, as far as they are known."""
        return affinity.prefix(self._request, self._ledger.ids)

    def lacks(self, traits: Traits) -> str:
        """What the request asks for and a worker with these traits has not said to have; "" if it has all."""
        for need in self._needs:
            if not need.met(self._request, traits):
                return need.name
        return ""

    def unfit(self, traits: Traits) -> str:
        """Why no later attempt may go to a worker with these traits; "" if one may."""
        now = self._standing()
        unmet = (demand for demand in DEMANDS if not demand.met(now, traits))
        return next((demand.name.format(now=now, traits=traits) for demand in unmet), "")

    def demands(self) -> tuple[str, ...]:
        """What `unfit` asks for now, in words."""
        now = self._standing()
        return tuple(words for demand in DEMANDS if (words := demand.words(now)))

    def _standing(self) -> Standing:
        text = self._traits.text if self._ledger.text is None else self._ledger.text
        owed = tuple(name for name, replay in self._ledger.replays.items() if replay.owed)
        had = self._versions() if self.delivered else []
        return Standing(
            self._request, self._traits, self.verdict.migratable, self.delivered, text, owed, self._rules.weights, had
        )

    def dispatch(
        self, traits: Traits, rid: str, now: float, rank: int | None = None, pairing: Pairing | None = None
    ) -> Outbound:
        """Begin the next attempt, under the name `rid` if the request is migratable.

        Raises `CannotComplete` if something was delivered that cannot be continued.
        """
        request, number = self._request, self._attempt.number + 1
        self._require_continuable()
        self._settle()
        if number == 0:
            self._ledger.opened = now
        self._computed |= self._prompt_version()
        if not self.verdict.migratable:
            rid = self.rid
        self._stops = self._rules.stops[traits.model, traits.text]
        hint = hinted(traits.incremental)
        pace = continuation.interval(request, traits, self.delivered) if self.verdict.migratable else 0
        self._whole, self._one_piece = None, False
        attempt = Attempt(number, rid, self.delivered, now, hint, pace)
        attempt.detokenizes = continuation.detokenizes(traits)
        attempt.deterministic, attempt.expected = traits.deterministic is True, traits.weight_version
        if self.delivered and self._ledger.text:
            before, ids = request.last_ids(CONTEXT), self._ledger.ids
            attempt.seam = Seam(request, before, ids, self._ledger.told, deltas=traits.incremental is True)
        self._begin(attempt)
        meet(self._ledger.replays.values(), self._rules.widths, traits, alone=pairing is None)
        if number == 0 and rank == self.pinned and pairing is None:
            rank = None  # the client's own body says so
        self._as_is = not self.verdict.migratable
        if self._owed_finish:
            self._take = SglangExchange._take_rows
        place, self.beside = continuation.placed(traits, rank), None
        if pairing is not None:
            attempt.prefilled = self._beside(pairing, rid if self.named or not self._as_is else "")
            place, prefill = legs(request, pairing, place, first=number == 0, whole=self._as_is)
            self.beside = self._outbound(pairing.traits, prefill)
        return self._outbound(traits, place)

    def _outbound(self, traits: Traits, place: Fields) -> Outbound:
        """The current attempt's request for one worker, which `place` names."""
        request, attempt, ids = self._request, self._attempt, self._ledger.ids
        if self._as_is:
            return Outbound(request.method, PATH, continuation.whole(request, place), request.content_type)
        if self._owed_finish:
            body = continuation.rows_alone(request, attempt.rid, ids, place, budget=int(attempt.prefilled is not None))
        elif attempt.number == 0:
            body = continuation.first(request, traits, attempt.rid, place)
        else:
            body = continuation.later(request, traits, attempt.rid, ids, place)
        return Outbound(request.method, PATH, body)

    def stall_allowance(self) -> float:
        """Seconds that the asked-for cadence explains."""
        return self._attempt.interval * _SECONDS_A_TOKEN

    def head(self, status: int, headers: Headers) -> Reading:
        """The head of the current attempt's answer is there."""
        self._status = status
        self._content_type = header(headers, b"content-type") or b"application/json"
        if 200 <= status < 300:
            if not self.verdict.migratable and not self.streaming:
                # Whole, so that half an answer, or none, is not handed on as one.
                return Reading.WHOLE if status == 200 else Reading.OPAQUE
            if self._content_type.lower().startswith(b"text/event-stream"):
                return Reading.EVENTS
            if not self.verdict.migratable:
                return Reading.OPAQUE
        return Reading.WHOLE

    def body(self, data: bytes, now: float) -> None:
        """The whole body of an error, or of a worker that answers a stream's request in one piece. Sets `end`."""
        if self._status >= 400:
            self._refused(Answer(self._status, data, self._content_type))
            return
        if self._status == 200 and not self.streaming and data:
            self._one_piece = True
            self.feed(((b"", data), (b"", DONE)), now)
            return
        self._stop(End.GARBAGE, f"status {self._status}, {self._content_type.decode('latin-1')}")

    def _read(self, events: Sequence[Event], now: float) -> bytes:
        out = super()._read(events, now)
        own = self._attempt.rid == self.rid and not self._attempt.base and not self._request.hides_prompt
        aborted = self.end is End.ABORTED and self._as_is
        if self._one_piece and (aborted or (self.end is End.FINISHED and (own or self._as_is))):
            self._whole = Answer(200, events[0][1], self._content_type)
        return out

    def last_words(self) -> bytes:
        """The held-back error event and the terminator that stock sends after it."""
        return self._held + DONE_EVENT if self._held else b""

    def complete(self, now: float) -> bytes | None:
        """After a cut: can the answer be finished without a worker? Raises `CannotComplete`."""
        if self._finished:
            self.end = End.ABORTED if self._aborted else End.FINISHED
            return DONE_EVENT if self.streaming else b""
        self._require_continuable()
        if not self.verdict.migratable:
            return None
        self._settle()
        self._owed_finish = {}
        reason = self._own_finish()
        if reason is None and self._stops.may_have_ended(self._request, len(self._ledger.ids)):
            raise CannotComplete("eos")
        if reason is None or self._ledger.template is None:
            return None
        if self._ledger.text:
            raise CannotComplete("text")  # an engine tells what it has withheld, and takes back what ended the answer
        if self._owes_rows:
            self._owed_finish = reason  # once an engine, asked for nothing else, has told them
            return None
        return self._finish(self._ledger.template, reason, now)

    @property
    def leavable(self) -> bool:
        """May the current attempt be taken from its worker now?

        Not while its finish is all that lacks: of a text only an engine can make it. Nor if a text has stop strings:
        one may have begun, also in half a character that the worker still owes, and only that worker knows.
        """
        if self.end is not None or self._finished or not self.verdict.migratable:
            return False
        if not self.delivered:
            return True
        if self._ledger.text and self._request.stops:
            return False
        try:
            ended = self._finish_after(self.delivered, self._newest_id)
        except UNREADABLE:
            return False
        return ended is None and not self._stops.may_have_ended(self._request, self.delivered)

    def abort(self, now: float) -> bytes | None:
        """Somebody aborted the request while no worker had it: end the answer as the engine would have."""
        if self._finished:
            return self.complete(now)
        if not self.verdict.migratable:
            alone = not self._request.unreadable and not asked(self._request).several
            return self._finish(self._unbegun(), fold.ABORTED_IN_QUEUE, now) if alone and not self._shown else None
        self._settle()
        if self._ledger.template is None:
            return self._finish(self._unbegun(), fold.ABORTED_IN_QUEUE, now)
        return None if self._owes_rows else self._finish(self._ledger.template, fold.ABORTED, now)

    def _unbegun(self) -> tuple[Fields, Fields]:
        return fold.abort_echo(self._request, self.rid, self._traits.weight_version)

    @property
    def _owes_rows(self) -> bool:
        return any(replay.owed for replay in self._ledger.replays.values())

    def _take_rows(self, whole: bytes, data: bytes, now: float) -> Sequence[bytes]:
        """An event of an attempt that was asked for rows alone. Raises `ValueError` if it is not its finish."""
        event = read(whole_decoder, data)
        if kind(event) is Kind.ERROR:
            self._fail(fault(event), data, whole)
            return ()
        meta, again = meta_of(data), self._attempt.prefilled is not None
        if again and kind(event) is Kind.PROGRESS:
            return ()
        if kind(event) is not Kind.FINISH or total_of(event) != again or plain(meta["id"]) != self._attempt.rid:
            raise ValueError("more than the rows that it was asked for")
        assert event.meta_info is not None
        if not self._may_follow(event.meta_info.weight_version):
            return ()
        rows: Fields = {}
        for name, replay in self._ledger.replays.items():
            if name in meta:
                rows[name] = replay.shown(meta[name], self.prompt_tokens, self.delivered, self.delivered)
            elif replay.owed:
                raise ValueError(f"a finish without {name}")
        if self._rules.tells_recomputed:
            rows[RECOMPUTED] = raw(recomputed(self._ledger))
        assert self._ledger.template is not None
        return (self._finish(self._ledger.template, self._owed_finish, now, rows),)

    def _finish(
        self, template: tuple[Fields, Fields], reason: dict[str, object], now: float, rows: Fields | None = None
    ) -> bytes:
        self._local = fold.finish(
            template,
            reason,
            self._ledger.spans,
            now - self._ledger.opened,
            self._dialect or self._attempt.hint or Dialect.CUMULATIVE,
            self._ledger.last_delta,
            rows or {},
        )
        self.end = End.ABORTED if reason["type"] == "abort" else End.FINISHED
        self._whole = self._fault = None
        self._held = b""
        return b"".join((*framed(*self._local), DONE_EVENT)) if self.streaming else b""

    def answer(self, now: float) -> Answer:
        """The whole answer, after `end` or `complete`; also for streams whose worker answered with a status.

        Raises `CannotComplete` if it holds what cannot be read.
        """
        if self._whole is not None:
            return self._whole
        if self._fault is not None:
            return errors.unary(self._fault)
        attempt = self._attempt
        sent = self._sent[0] + now - self._sent[1] if self._sent is not None else None
        try:
            body, meta = self._local or self._view(now, attempt.tokens).event(attempt.echo or attempt.newest)
            whole = meta if attempt.echo and not attempt.base else restored(self._ledger, meta)
            return Answer(200, fold.unary(body, whole, sent))
        except UNREADABLE as exc:
            raise CannotComplete("meta_info") from exc

    def failure(self, status: int, reason: str, message: str, started: bool) -> Answer:
        """The relay's own error. Says `delivered` and `started`."""
        return errors.failure(status, reason, message, self.delivered, started)

    def failure_event(self, status: int, reason: str, message: str) -> bytes:
        """The relay's own error inside a started stream."""
        return errors.failure_event(status, reason, message, self.delivered)

    def crossed_versions(self) -> bool | None:
        """True if an answer's tokens come from more than one weight version; None if not all that made them told."""
        told = set(map(label, self._versions()))
        if len(told) == 1 and None not in told and not (self._labels or self._computed or self._attempt.prefilled):
            return False  # as almost always
        answers = [told | self._labels[0], *self._labels.values()]
        # The first token, and what all others build upon, are the prefill worker's.
        computed = self._computed | self._prompt_version()
        if any(len((labels | computed) - {None}) > 1 for labels in answers):
            return True
        unseen = not self.verdict.migratable and not any(answers)
        return None if unseen or any(None in labels for labels in answers) else False

    def resampled(self) -> bool:
        """True if several attempts drew the tokens, and not all by their positions."""
        draws = list(self._ledger.draws)
        if not self._settled and self._attempt.tokens:
            draws.append(self._attempt.deterministic)
        return len(draws) > 1 and not all(draws) and not self._request.greedy

    def recomputed(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Rows to replay that were computed again, by field."""
        return recomputed(self._ledger)

    def _require_continuable(self) -> None:
        if not self.verdict.migratable and (self._shown or self._ledger.first is not None):
            raise CannotComplete(self.verdict.reason)

    def _own_finish(self) -> dict[str, object] | None:
        """The finish reason that the delivered tokens call for, if any; the order is the engine's."""
        ids = self._ledger.ids
        return self._finish_after(len(ids), ids[-1]) if ids else None

    def _finish_after(self, tokens: int, newest: int) -> dict[str, object] | None:
        if self._stops.ends(self._request, tokens, newest):
            return {"type": "stop", "matched": newest}
        if self._request.max_new_tokens is not None and tokens >= self._request.max_new_tokens:
            return {"type": "length", "length": tokens}
        return None
