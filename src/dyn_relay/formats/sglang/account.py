"""The account of a logical request: every event is checked against the one before, and counted.

An attempt's account moves into the ledger when the attempt has ended (`_settle`).
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw

from dyn_relay.formats.base import CannotComplete, End, Verdict
from dyn_relay.formats.sglang.answer import IDS, UNCONTINUED, Rule, may_be_rows, rule
from dyn_relay.formats.sglang.detection import spoken, told
from dyn_relay.formats.sglang.dialect import Dialect, deltas
from dyn_relay.formats.sglang.events import (
    Delta,
    Fault,
    Kind,
    Whole,
    as_received,
    count,
    delta_decoder,
    fault,
    finish_type,
    framed,
    kind,
    meta_of,
    whole_decoder,
)
from dyn_relay.formats.sglang.fold import SENT
from dyn_relay.formats.sglang.ledger import Attempt, Ledger, Rows
from dyn_relay.formats.sglang.lineup import check_finish
from dyn_relay.formats.sglang.rebase import View, add_counters, renew, snapshot, unlike
from dyn_relay.formats.sglang.replay import replays_of
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.sglang.rules import Rules
from dyn_relay.formats.sglang.spans import Span, shift, stated
from dyn_relay.formats.sglang.stops import Stops
from dyn_relay.formats.sglang.wire import (
    NULL,
    Fields,
    Foreign,
    number,
    plain,
    raw,
    read,
    read_fields,
)

_ids = msgspec.json.Decoder(list[int])

#: What an event that is none can raise, however deep one looks into it.
UNREADABLE = (ValueError, KeyError, OverflowError, RecursionError, msgspec.DecodeError)


class Account:
    """What the attempts of one logical request have told, and what the client has of it."""

    __slots__ = (
        "_aborted",
        "_attempt",
        "_deltas_said",
        "_dialect",
        "_fault",
        "_finished",
        "_held",
        "_ledger",
        "_request",
        "_rules",
        "_sent",
        "_settled",
        "_stops",
        "accuses",
        "attempt_tokens",
        "cached_tokens",
        "delivered",
        "detail",
        "end",
        "named",
        "prompt_tokens",
        "rid",
        "streaming",
        "verdict",
    )

    def __init__(self, request: Request, rid: str, rules: Rules) -> None:
        self.rid = request.rid or rid
        self.named = bool(request.rid)
        self.streaming = request.stream
        self.delivered = 0
        self.attempt_tokens = 0
        self.cached_tokens: int | None = None
        self.end: End | None = None
        self.detail = ""
        self.accuses = False
        #: Changes if the worker's answers turn out not to be continuable.
        self.verdict = Verdict(request.unreadable)
        self._request = request
        self._rules = rules
        self._ledger = Ledger({replay.name: replay for replay in replays_of(request, rules.codec)})
        self._attempt = Attempt(-1, "", 0, 0.0, None, 0)
        #: What is known of the model that the current attempt's worker runs.
        self._stops = Stops()
        #: The attempt's account is in the ledger.
        self._settled = True
        #: What the client has been shown to be spoken to in; None while all readings agree.
        self._dialect: Dialect | None = None if request.stream else Dialect.CUMULATIVE
        #: The first worker has said that its ids are deltas; whether its rows are, no event has shown.
        self._deltas_said = False
        self._finished = self._aborted = False
        self._held = b""
        self._fault: Fault | None = None
        #: The engine's wall clock, and ours at the time.
        self._sent: tuple[float, float] | None = None

    def _versions(self) -> list[object]:
        """Those of the answer's tokens, in their order."""
        spans: list[Span] = list(self._ledger.spans)
        if not self._settled:
            spans += self._attempt.spans()
        return [span.version for span in spans if span.end > span.start]

    @property
    def _newest_id(self) -> int:
        """Of the tokens that were delivered, of which there is one. Raises `msgspec.DecodeError`, `ValueError`."""
        attempt = self._attempt
        if attempt.deltas or not attempt.tokens:
            return self._ledger.ids[-1]
        return _ids.decode(read_fields(attempt.newest)[IDS])[-1]

    def _may_follow(self, version: object) -> bool:
        """Do weights of the version fit those of the tokens so far? If not, nothing of the attempt is taken."""
        policy = self._rules.weights
        if policy.fits(self._versions(), version):
            return True
        self._stop(End.REFUSED, f"weight_version {version}, by --weight-version-policy {policy.text}")
        return False

    def _stop(self, end: End, detail: str, *, accuses: bool = False) -> None:
        self.end, self.detail, self.accuses = end, detail, accuses

    def _stop_with(self, found: Fault) -> None:
        self._fault = found
        self._stop(found.end(self.attempt_tokens), found.message, accuses=found.accuses)

    def _fail(self, found: Fault, data: bytes, whole: bytes) -> None:
        if self._finished:
            return  # as in `_account`; for `_blind`
        self._stop_with(found)
        self._held = self._renamed(whole, data)

    def _renamed(self, whole: bytes, data: bytes) -> bytes:
        """An event under the rid that the client knows."""
        fields = read_fields(data) if self._attempt.rid != self.rid else {}
        if "meta_info" not in fields:
            return b"".join(as_received(whole, data))
        named = {**read_fields(fields["meta_info"]), "id": raw(self.rid)}
        return b"".join(framed(fields, named))

    def _account(self, data: bytes, now: float, whole: bytes) -> int | None:
        """Check an event and count it. Returns the attempt's tokens before it; None if it is no part of an answer.

        Raises `ValueError` if it cannot be the next event of this attempt, `CannotComplete` if it ends the answer with
        what nobody can join.
        """
        attempt = self._attempt
        if self._finished:
            return None  # what comes after the finish cannot unmake the answer
        event: Delta | Whole
        try:
            event = delta_decoder.decode(data) if attempt.deltas else whole_decoder.decode(data)
        except (msgspec.DecodeError, RecursionError):
            event = read(delta_decoder, data) if attempt.deltas else read(whole_decoder, data)
        meta = event.meta_info
        last = Kind.PROGRESS
        if meta is None or meta.finish_reason is not None:
            last = self._last(event, data, whole)
            if last is Kind.ERROR:
                return None
        assert meta is not None
        if meta.id != attempt.rid and meta.id is not UNSET:
            # Somebody else's tokens: an engine always tells the rid that it was given.
            raise ValueError(f"the answer to {meta.id!r}, not to {attempt.rid!r}")
        total, before = meta.completion_tokens, attempt.tokens
        if last is Kind.ABORT_ECHO:
            attempt.echo, self._finished, self._aborted = data, True, True
            return before
        ids = event.output_ids
        if total is UNSET or ids is UNSET:
            raise Foreign("an event without output_ids or completion_tokens")
        spans = None if meta.weight_versions is UNSET else stated(meta.weight_versions, total)
        if attempt.base and total and not before:
            version = spans[0].version if spans else meta.weight_version
            if not self._may_follow(version):
                return None
        if self._ledger.replays:
            self._note_rows(event, data, last, total)
        if last is Kind.FINISH and attempt.base:
            check_finish(self._ledger, attempt, data, before, total)
        if isinstance(ids, list):
            if len(ids) != total - before:
                raise ValueError(f"{len(ids)} ids where completion_tokens went from {before} to {total}")
            self._ledger.ids.extend(ids)
            if self._ledger.text and isinstance(event, Delta):
                attempt.say(event.text)
        else:
            if attempt.dialect is None:
                self._learn(data, ids, before, total)
            elif count(ids) != total or total < before:
                raise ValueError(f"{count(ids)} ids where completion_tokens went from {before} to {total}")
        if not attempt.events:
            self._first(data, now)
        attempt.events += 1
        if total != before:
            if meta.weight_version != attempt.version or not attempt.marks:
                attempt.change(meta.weight_version, total - before, keep=not self.streaming)
            attempt.tokens = self.attempt_tokens = total
            attempt.last_delta = total - before
            self.delivered = attempt.base + total
        if spans is not None:
            attempt.state(spans)
        if last is not Kind.FINISH or not self.streaming:
            attempt.newest = data  # a stream's finish is not needed again, and large if anything is
        if last is Kind.FINISH:
            self._finished, self._aborted = True, finish_type(event) == "abort"
            if meta.finish_reason is not None and not self._aborted:
                self._stops.learn(self._request, meta.finish_reason, before, total)
        return before

    def _last(self, event: Delta | Whole, data: bytes, whole: bytes) -> Kind:
        """What an event that is no mere progress is; an error ends the attempt and is held back."""
        word = kind(event)
        if word is Kind.ERROR:
            self._fail(fault(event), data, whole)
            return Kind.ERROR
        if self._rules.resume_aborts and finish_type(event) == "abort":
            self._fail(fault(event), data, whole)
            self.end = End.INTERRUPTED
            return Kind.ERROR
        return word

    def _note_rows(self, event: Delta | Whole, data: bytes, last: Kind, total: int) -> None:
        """Rows to replay that an event tells, or must. Raises `ValueError` if they are none, or none are there."""
        base, prompt, finish = self._attempt.base, self._request.prompt_tokens, last is Kind.FINISH
        length, first = prompt + base + total, finish and not base
        for replay in self._ledger.replays.values():
            if first and not (prompt and replay.curious(length)):  # the client's as it is
                continue
            value = meta_of(data).get(replay.name, NULL) if finish or replay.key in data else NULL
            if value == NULL:
                if finish and base and replay.owed and finish_type(event) != "abort":
                    raise ValueError(f"a finish without {replay.name}")
            elif first:
                replay.learn(value, length)
            else:
                if base:
                    replay.check(value, length)
                if not finish:
                    replay.note(value, base + total)

    def _learn(self, data: bytes, ids: Raw, before: int, total: int) -> None:
        """Tell the attempt's dialect from an event, if it shows."""
        attempt = self._attempt
        shown = deltas(count(ids), before, total)
        if shown is None:
            return
        attempt.dialect = spoken(data, attempt.newest, shown, before, total)
        attempt.deltas = shown
        if shown:
            # Its ids so far were only counted: those of the first event, which said everything there was.
            self._ledger.ids.extend(_ids.decode(read(whole_decoder, attempt.newest).output_ids))
            self._ledger.ids.extend(_ids.decode(ids))
            self._learn_text(data)
        if self._dialect is None:
            self._dialect = attempt.dialect
        for name in list(attempt.pieces):
            known = attempt.dialect.ids_are_deltas if name == IDS else attempt.dialect.rows_are_deltas
            if not known:
                del attempt.pieces[name]

    def _learn_text(self, data: bytes) -> None:
        """The second growing event has shown that ids are deltas: its text is one as well, if the worker says so."""
        attempt = self._attempt
        if not self._ledger.text:
            return
        if attempt.hint is not Dialect.INCREMENTAL:
            # There were releases that repeated the text.
            if not attempt.base:
                self.verdict = Verdict("text")
            if attempt.base or not self.streaming:
                raise ValueError("its ids are deltas, its text may be none")
        if self.streaming and (self._dialect is None or self._dialect.ids_are_deltas):
            attempt.told.forget()
        attempt.told.add(attempt.opening[attempt.told.length :])
        attempt.say(_text_of(read_fields(data)))

    def _first(self, data: bytes, now: float) -> None:
        """The first event of an attempt: the prompt's metadata, and whether the answer can be continued at all."""
        top = read_fields(data)
        meta = read_fields(top["meta_info"])
        ledger = self._ledger
        if ledger.first_token is None:
            ledger.first_token = now
        if self._attempt.base:
            sent, told = number(ledger.first or {}, "prompt_tokens"), number(meta, "prompt_tokens")
            if sent is not None and told is not None and told != sent + self._attempt.base:
                # A worker that cuts long prompts short, say, would go on with another answer.
                raise Foreign(f"a prompt of {told} tokens is not the one that was sent")
            if ("text" in top) != ledger.text:
                raise Foreign("an answer with text cannot be continued without, nor one without with it")
            if name := unlike(ledger, meta):
                raise Foreign(f"an answer with {name} cannot be continued without, nor one without with it")
            self._open(top)
            return
        ledger.text = "text" in top
        self._open(top)
        if ledger.text and (self._attempt.hint is None or not self._attempt.detokenizes):
            self.verdict = Verdict("text")
        if self._request.by_text:
            if "prompt_token_ids" in top:
                self._request.learn_prompt(top["prompt_token_ids"])
                self.prompt_tokens = self._request.prompt_tokens
            else:
                self.verdict = Verdict("text")
        if not UNCONTINUED.isdisjoint(meta):
            self.verdict = Verdict(next(name for name in meta if name in UNCONTINUED))
        snapshot(ledger, top, meta)
        self.cached_tokens = number(meta, "cached_tokens")
        clock = plain(meta[SENT]) if SENT in meta else None
        if self._sent is None and isinstance(clock, int | float):
            self._sent = clock, now

    def _open(self, top: Fields) -> None:
        attempt = self._attempt
        if self._ledger.text:
            text = _text_of(top)
            attempt.opening = text if attempt.seam is None else attempt.seam.begin(text)

    def _gather(self, data: bytes) -> None:
        """Keep an event's deltas where the client's view needs the whole lists."""
        attempt = self._attempt
        if attempt.dialect is Dialect.CUMULATIVE or attempt.echo:
            return
        top = read_fields(data)
        lists = {IDS: top[IDS]}
        if attempt.dialect is not Dialect.MIXED:
            meta = read_fields(top["meta_info"])
            lists.update({name: value for name, value in meta.items() if may_be_rows(name, value)})
        for name, value in lists.items():
            attempt.pieces.setdefault(name, Rows()).add(value)

    def _view(self, now: float, before: int) -> View:
        dialect = self._dialect or self._attempt.dialect or self._attempt.hint or Dialect.CUMULATIVE
        return View(
            *(self._ledger, self._attempt, dialect, self.rid, now, before),
            hides_prompt=self._request.hides_prompt,
            prompt_tokens=self._request.prompt_tokens,
            tells_recomputed=self._rules.tells_recomputed,
        )

    def _settle(self) -> None:
        """Move the current attempt's account into the ledger, once. Raises `CannotComplete` if it cannot be read."""
        if self._settled:
            return
        self._settled = True
        if self._attempt.go_back():
            self.attempt_tokens = self._attempt.tokens
            self.delivered = self._attempt.base + self._attempt.tokens
        # An event that broke halfway may have left ids that nobody was shown.
        del self._ledger.ids[self.delivered :]
        if self.verdict.migratable and self._attempt.tokens:
            try:
                self._absorb()
            except UNREADABLE as exc:
                raise CannotComplete(IDS) from exc
            for replay in self._ledger.replays.values():
                try:
                    replay.settle(self._request.prompt_tokens, self._attempt.base, self.delivered)
                except ValueError as exc:
                    raise CannotComplete(replay.name) from exc

    def _absorb(self) -> None:
        attempt, ledger = self._attempt, self._ledger
        ledger.draws.append(attempt.deterministic)
        top = read_fields(attempt.newest)
        meta = read_fields(top["meta_info"])
        if ledger.text and not attempt.deltas:
            attempt.told.add(attempt.since(_text_of(top))[attempt.told.length :])
        ledger.told.join(attempt.told)
        if self._dialect is None:
            self._dialect = attempt.dialect or told(attempt.hint, attempt.newest)
            self._deltas_said = self._deltas_said or attempt.hint is Dialect.INCREMENTAL
        if attempt.body is not None:
            ledger.template = attempt.body
        elif attempt.shown:
            shown = read_fields(attempt.shown)
            ledger.template = shown, read_fields(shown["meta_info"])
        elif self.streaming:
            ledger.template = top, meta
        else:
            ledger.template = self._view(attempt.started, attempt.tokens).event(attempt.newest)
        if not attempt.base:
            renew(ledger, attempt, meta, streaming=self.streaming)
        worker = attempt.dialect
        if not attempt.deltas:
            ledger.ids.extend(_ids.decode(top[IDS]))
        if self._dialect is not Dialect.INCREMENTAL:
            lists = {IDS: top[IDS], **{name: value for name, value in meta.items() if may_be_rows(name, value)}}
            for name, value in lists.items():
                self._keep(name, value, worker)
        ledger.spans.extend(shift(attempt.spans(), attempt.base))
        add_counters(ledger, meta, attempt.tokens)
        ledger.last_delta = attempt.last_delta
        if len(ledger.ids) != self.delivered:
            raise ValueError("the ids do not match their count")

    def _keep(self, name: str, value: Raw, worker: Dialect | None) -> None:
        attempt = self._attempt
        rows = Rows()
        if worker is not None and (worker.ids_are_deltas if name == IDS else worker.rows_are_deltas):
            rows = attempt.pieces.get(name, rows)
        else:
            rows.add(value)
        if rule(name) is Rule.ROWS and rows.count != attempt.tokens:
            raise CannotComplete(name)
        self._ledger.rows.setdefault(name, Rows()).extend(rows)


def _text_of(top: Fields) -> str:
    return str(plain(top["text"])) if "text" in top else ""
