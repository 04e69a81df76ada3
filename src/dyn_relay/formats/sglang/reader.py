"""Reading the events of an attempt.

Every event goes through `_account`, which checks it against the one before and keeps the count. What then happens to it
depends on how the attempt is read:

- `_plain`: the client streams and has seen only this attempt: it gets the worker's own bytes;
- `_rebased`: the client streams and has tokens of earlier attempts, or knows the request by another rid: it gets the
  event as the uninterrupted answer would have it, in the dialect it knows;
- `_folded`: the client does not stream: nothing is sent, and the newest event and the gathered deltas make the answer;
- `_blind`: the request is not migratable: whole events pass, and only errors before an answer are held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, Raw

from dyn_relay.formats.base import CannotComplete, End, Event, Outbound, Verdict
from dyn_relay.formats.sglang.detection import spoken, told
from dyn_relay.formats.sglang.dialect import Dialect, deltas
from dyn_relay.formats.sglang.events import (
    DONE,
    Delta,
    Fault,
    Kind,
    Whole,
    count,
    delta_decoder,
    fault,
    finish_type,
    kind,
    meta_of,
    total_of,
    whole_decoder,
)
from dyn_relay.formats.sglang.fold import SENT
from dyn_relay.formats.sglang.ledger import Attempt, Ledger, Rows
from dyn_relay.formats.sglang.rebase import IDS, View, add_counters, may_be_rows, snapshot
from dyn_relay.formats.sglang.replay import replays_of
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.sglang.spans import Span, shift, stated
from dyn_relay.formats.sglang.stops import Stops
from dyn_relay.formats.sglang.wire import (
    Fields,
    Foreign,
    NotJson,
    number,
    parts,
    plain,
    raw,
    read,
    read_fields,
)
from dyn_relay.formats.weights import WeightPolicy

_ids = msgspec.json.Decoder(list[int])

#: What an event that is none can raise, however deep one looks into it.
UNREADABLE = (ValueError, KeyError, OverflowError, RecursionError, msgspec.DecodeError)


class Reader:
    """The events of one logical request's attempts, in order; the part of an exchange that looks into answers."""

    def __init__(
        self, request: Request, rid: str, *, resume_aborts: bool, weights: WeightPolicy, tells_recomputed: bool
    ) -> None:
        self.rid = request.rid or rid
        self.named = bool(request.rid)
        self.streaming = request.stream
        self.delivered = 0
        self.attempt_tokens = 0
        self.cached_tokens: int | None = None
        self.end: End | None = None
        self.detail = ""
        #: Changes if the worker's answers turn out not to be continuable.
        self.verdict = Verdict(request.unreadable)
        self._request = request
        self._resume_aborts = resume_aborts
        self._weights = weights
        self._tells_recomputed = tells_recomputed
        self._ledger = Ledger({replay.name: replay for replay in replays_of(request)})
        self._attempt = Attempt(-1, "", 0, 0.0, None, 0)
        #: What is known of the model that the current attempt's worker runs.
        self._stops = Stops()
        #: The attempt's account is in the ledger.
        self._settled = True
        #: What the client has been shown to be spoken to in; None while all readings agree.
        self._dialect: Dialect | None = None if request.stream else Dialect.CUMULATIVE
        #: The first worker has said that its ids are deltas; whether its rows are, no event has shown.
        self._deltas_said = False
        self._take: Callable[[bytes, bytes, float], Sequence[bytes]] = self._blind
        self._finished = self._aborted = False
        #: Something of a request that is not migratable has gone to the client.
        self._shown = False
        #: Tokens by choice, for those.
        self._counts: dict[int, int] = {}
        self._held = b""
        self._fault: Fault | None = None
        #: The engine's wall clock, and ours at the time.
        self._sent: tuple[float, float] | None = None

    def _begin(self, attempt: Attempt) -> None:
        self._attempt, self._settled = attempt, False
        self.attempt_tokens = 0
        self.end, self.detail, self._held, self._fault = None, "", b"", None
        self._finished = self._aborted = False
        if not self.verdict.migratable:
            self._take = self._blind
        elif not self.streaming:
            self._take = self._folded
        else:
            plain = attempt.rid == self.rid and not attempt.base and not self._request.hides_prompt
            self._take = self._plain if plain else self._rebased

    @property
    def question(self) -> Outbound | None:
        """What the worker must be asked before more of its answer is taken."""
        seam = self._attempt.seam
        return seam.question if seam is not None and self.end is None else None

    def feed(self, events: Sequence[Event], now: float) -> bytes:
        """Take whole events; return what the client's body gets."""
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
            before, after = seam.reply(status, data)
        except UNREADABLE as exc:
            self._stop(End.REFUSED, str(exc))
            return b""
        out = self._read(before, now)
        seam.meet()
        return out + self._read(after, now)

    def _read(self, events: Sequence[Event], now: float) -> bytes:
        out: list[bytes] = []
        try:
            for whole, data in events:
                if self.end is not None:
                    break
                if not data:
                    if self.streaming:
                        out.append(whole)
                elif data == DONE:
                    out.append(self._done(whole))
                else:
                    # JSON has line ends between its words only; in an event that is written again they would end it.
                    out += self._take(whole, data.replace(b"\n", b" "), now)
        except UNREADABLE as exc:
            # NotJson and Foreign are ValueErrors; so is a count that does not add up.
            self._stop(End.GARBAGE, str(exc))
        return b"".join(out)

    def _stop(self, end: End, detail: str) -> None:
        self.end, self.detail = end, detail

    def _done(self, whole: bytes) -> bytes:
        if not self._finished and self._take != self._blind:
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
        self._take = self._blind
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
        attempt = self._attempt
        before = self._account(data, now, whole)
        if before is None:
            return ()
        view = self._view(now, before)
        if not view.dialect.rows_are_deltas:
            self._gather(data)
        shown = view.event(data)
        attempt.body = None if self._finished else shown
        return framed(*shown)

    def _folded(self, whole: bytes, data: bytes, now: float) -> Sequence[bytes]:
        if self._account(data, now, whole) is not None:
            self._gather(data)
        return ()

    def _view(self, now: float, before: int) -> View:
        dialect = self._dialect or self._attempt.dialect or self._attempt.hint or Dialect.CUMULATIVE
        return View(
            *(self._ledger, self._attempt, dialect, self.rid, now, before),
            hides_prompt=self._request.hides_prompt,
            prompt_tokens=self._request.prompt_tokens,
            tells_recomputed=self._tells_recomputed,
        )

    def _account(self, data: bytes, now: float, whole: bytes) -> int | None:
        """Check an event and count it. Returns the attempt's tokens before it; None if it is no part of an answer.

        Raises `ValueError` if it cannot be the next event of this attempt.
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
            if not self._weights.fits(self._versions(), version):
                self._stop(End.REFUSED, f"weight_version {version}, by --weight-version-policy {self._weights.text}")
                return None
        if self._ledger.replays:
            self._note_rows(event, data, last, total)
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
            if meta.weight_version != attempt.version:
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

    def _note_rows(self, event: Delta | Whole, data: bytes, last: Kind, total: int) -> None:
        """Rows to replay that an event tells, or must. Raises `ValueError` if they are none, or none are there."""
        base, finish = self._attempt.base, last is Kind.FINISH
        if finish and not base:
            return  # the client's as it is
        for replay in self._ledger.replays.values():
            value = meta_of(data).get(replay.name) if finish or replay.key in data else None
            if value is None:
                if finish and replay.owed and finish_type(event) != "abort":
                    raise ValueError(f"a finish without {replay.name}")
                continue
            if base:
                replay.check(value, self._request.prompt_tokens + base + total)
            if not finish:
                replay.note(value, base + total)

    def _versions(self) -> list[object]:
        """Those of the answer's tokens, in their order."""
        spans: list[Span] = list(self._ledger.spans)
        if not self._settled:
            spans += self._attempt.spans()
        return [span.version for span in spans if span.end > span.start]

    def _last(self, event: Delta | Whole, data: bytes, whole: bytes) -> Kind:
        """What an event that is no mere progress is; an error ends the attempt and is held back."""
        word = kind(event)
        if word is Kind.ERROR or (self._resume_aborts and finish_type(event) == "abort"):
            self._fail(fault(event), data, whole)
            return Kind.ERROR
        return word

    def _fail(self, found: Fault, data: bytes, whole: bytes) -> None:
        if self._finished:
            return  # as in `_account`; for `_blind`
        self._fault = found
        self._stop(found.end(self.attempt_tokens), found.message)
        self._held = self._renamed(whole, data)

    def _renamed(self, whole: bytes, data: bytes) -> bytes:
        """An event under the rid that the client knows."""
        fields = read_fields(data) if self._attempt.rid != self.rid else {}
        if "meta_info" not in fields:
            return b"".join(as_received(whole, data))
        named = {**read_fields(fields["meta_info"]), "id": raw(self.rid)}
        return b"".join(framed(fields, named))

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
            if attempt.base:
                raise ValueError("its ids are deltas, its text may be none")
            self.verdict = Verdict("text")
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
            self._open(top)
            return
        ledger.text = "text" in top
        self._open(top)
        if ledger.text and self._attempt.hint is None:
            self.verdict = Verdict("text")
        if self._request.by_text:
            if "prompt_token_ids" in top:
                self._request.learn_prompt(top["prompt_token_ids"])
                self.prompt_tokens = self._request.prompt_tokens
            else:
                self.verdict = Verdict("text")
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

    def _blind(self, whole: bytes, data: bytes, now: float) -> Sequence[bytes]:
        """An event of a request that is not continued: it passes, unless it says that there will be no answer."""
        try:
            event = read(whole_decoder, data)
            word = kind(event)
        except (Foreign, NotJson):
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
        if event.index is None and word in (Kind.FINISH, Kind.ABORT_ECHO):
            self._finished, self._aborted = True, finish_type(event) == "abort"
        self._shown = True
        return as_received(whole, data)

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
        elif self.streaming:
            ledger.template = top, meta
        else:
            ledger.template = self._view(attempt.started, attempt.tokens).event(attempt.newest)
        if self.streaming and ledger.first is not None:
            # What the worker told once, the client has; it is not told again.
            ledger.first = {name: value for name, value in ledger.first.items() if name in meta}
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
        self._ledger.rows.setdefault(name, Rows()).extend(rows)


def as_received(whole: bytes, data: bytes) -> Sequence[bytes]:
    """An event as it came, in parts."""
    return (whole,) if whole else (b"data: ", data, b"\n\n")


def framed(top: Fields, meta: Fields) -> Sequence[bytes]:
    """An event that is written here, in parts."""
    return (b"data: ", *parts(top, meta), b"\n\n")


def _text_of(top: Fields) -> str:
    return str(plain(top["text"])) if "text" in top else ""
