"""From one attempt's event to the client's view of it: what each field becomes after a cut, by `rules`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from msgspec import Raw

from dyn_relay.formats.sglang.answer import IDS, RATIOS, RECOMPUTED, Rule, may_be_rows, of_prompt, rule
from dyn_relay.formats.sglang.dialect import Dialect
from dyn_relay.formats.sglang.ledger import Attempt, Count, Counter, Ledger
from dyn_relay.formats.sglang.spans import known, parse, render, shift
from dyn_relay.formats.sglang.wire import (
    NULL,
    Fields,
    Foreign,
    is_list,
    joined,
    plain,
    raw,
    read_fields,
    read_rows,
    write,
)
from dyn_relay.formats.sglang.wire import inside as _inside

_NONE = Raw(b"[]")


def added(one: Count, other: Count) -> Count:
    """The sum of two counters, of histograms bin by bin."""
    if isinstance(one, list) and isinstance(other, list):
        return [left + right for left, right in zip_longest(one, other, fillvalue=0)]
    if isinstance(one, list) or isinstance(other, list):
        return other
    return one + other


def counter(value: Raw) -> Count | None:
    """A counter's value; None if it is neither a number nor a list of integers."""
    found = plain(value)
    if isinstance(found, list) and all(isinstance(one, int) for one in found):
        return found
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


@dataclass(slots=True)
class View:
    """How the client sees the events of one attempt."""

    ledger: Ledger
    attempt: Attempt
    #: What the client sees.
    dialect: Dialect
    rid: str
    now: float
    #: The attempt's tokens before this event.
    before: int = 0
    #: The client has not asked for the prompt's ids.
    hides_prompt: bool = False
    prompt_tokens: int = 0
    #: Say in `RECOMPUTED` which rows were computed again.
    tells_recomputed: bool = False

    def event(self, data: bytes) -> tuple[Fields, Fields]:
        """An event's (top level, meta_info) in the client's view, for `write`. Raises `Foreign`, `NotJson`."""
        top = read_fields(data)
        meta = read_fields(top["meta_info"])
        attempt = self.attempt
        if self.hides_prompt:
            top.pop("prompt_token_ids", None)
        if not attempt.number and not attempt.echo and self.dialect is attempt.dialect is Dialect.CUMULATIVE:
            # The whole lists of a first attempt are what the client sees; only the name is not.
            if "id" in meta:
                meta["id"] = raw(self.rid)
            return top, meta
        meta = self.meta(meta)
        body = dict(top)
        if "text" in body:
            body["text"] = raw(self._text(str(plain(body["text"]))))
        body[IDS] = self._ids(top[IDS])
        if attempt.base:
            body.pop("prompt_token_ids", None)
            body.update({} if self.hides_prompt else self.ledger.first_body)
        return body, meta

    def meta(self, meta: Fields) -> Fields:
        """`meta_info` in the client's view, in the order of the event."""
        result: Fields = {}
        for name, value in meta.items():
            new = self._field(name, value, meta)
            if new is not None:
                result[name] = new
        for name, pairs in RATIOS.items():
            if name in result:
                result[name] = self._ratio(pairs, result) or result[name]
        if self.attempt.base:
            result = restored(self.ledger, result)
            if "weight_version" in result and not self.attempt.tokens and self.ledger.spans:
                version = self.ledger.spans[-1].version  # whoever made no token has no say in it
                result["weight_version"] = raw(version)
                if version is None:
                    del result["weight_version"]
        if self.tells_recomputed and (again := recomputed(self.ledger)):
            result[RECOMPUTED] = raw(again)
        return result

    def _field(self, name: str, value: Raw, meta: Fields) -> Raw | None:
        base, kind = self.attempt.base, rule(name)
        match kind:
            case Rule.NAME:
                return raw(self.rid)
            case Rule.FIRST:
                return value if self.ledger.first is None else self.ledger.first.get(name)
            case Rule.SHIFT:
                total = plain(value)
                return raw(total + base) if base and isinstance(total, int) else value
            case Rule.SUM:
                return self._sum(name, value)
            case Rule.REASON:
                return self._reason(value)
            case Rule.SPANS:
                spans = parse(value)
                if not self.ledger.spans or spans is None:
                    return value if not base else None
                spans = [*self.ledger.spans, *shift(spans, base)]
                return render(spans) if known(spans) else None
            case Rule.REPLAY:
                return self._replayed(name, value)
            case Rule.MEASURED:
                return self._measured(name, value, meta) if self.attempt.number else value
            case Rule.SENT:
                # Uninterrupted streams have it in their first event; with metrics on, in their last one too.
                return value if not base or "request_finished_ts" in meta else None
            case Rule.ROWS | None:
                return self._rows(name, value, known=kind is Rule.ROWS) if is_list(value) else value
        return value

    def _text(self, text: str) -> str:
        attempt, earlier = self.attempt, self.ledger.told
        if attempt.deltas and not attempt.echo:
            return attempt.fresh if self.dialect.ids_are_deltas else earlier.whole + attempt.told.whole
        since = attempt.since(text)
        if not self.dialect.ids_are_deltas:
            return earlier.whole + since
        attempt.fresh = since[attempt.told.length :]
        attempt.told.add(attempt.fresh)
        return attempt.fresh

    def _ids(self, value: Raw) -> Raw:
        worker = self.attempt.dialect or self.dialect
        if self.attempt.echo and (self.attempt.newest or self.attempt.base):
            newest = self.attempt.newest
            value = _NONE if self.dialect.ids_are_deltas or not newest else read_fields(newest)[IDS]
        return self._list(IDS, value, worker.ids_are_deltas, self.dialect.ids_are_deltas)

    def _rows(self, name: str, value: Raw, known: bool) -> Raw | None:
        attempt = self.attempt
        worker = (attempt.dialect or self.dialect).rows_are_deltas and not attempt.echo
        client = self.dialect.rows_are_deltas
        if not known and attempt.events == 1 and len(read_rows(value)) != attempt.tokens:
            attempt.not_rows.add(name)
        if client and worker:
            if known and attempt.base and len(read_rows(value)) != attempt.tokens - self.before:
                raise Foreign(f"{name} has not one element a token")
            return value
        if name in attempt.not_rows:
            return value
        tail = attempt.pieces.get(name) if worker else None
        if worker:
            rows = tail.count if tail is not None else -1
        else:
            rows = attempt.tokens if known else len(read_rows(value))
        fits = rows == attempt.tokens
        if not fits and not known:
            attempt.not_rows.add(name)
        if not client:
            prefix = self.ledger.rows.get(name)
            fits = fits and (prefix.count if prefix is not None else 0) == attempt.base
        if not fits and known:
            raise Foreign(f"{name} has not one element a token")  # half of it would be taken for the whole
        return self._list(name, value, worker, client) if fits else value

    def _list(self, name: str, value: Raw, worker: bool, client: bool) -> Raw:
        if client:
            return value if worker else joined([bytes(one) for one in read_rows(value)[self.before :]])
        prefix, tail = self.ledger.rows.get(name), self.attempt.pieces.get(name)
        if prefix is None and not worker:
            return value
        parts: list[bytes | bytearray] = [prefix.text] if prefix is not None else []
        if not worker:
            parts.append(_inside(value))
        elif tail is not None:
            parts.append(tail.text)
        return joined(parts)

    def _replayed(self, name: str, value: Raw) -> Raw:
        replay, base = self.ledger.replays.get(name), self.attempt.base
        if replay is None or not base or value == NULL:
            return value
        return replay.shown(value, self.prompt_tokens, base, base + self.attempt.tokens)

    def _sum(self, name: str, value: Raw) -> Raw:
        earlier, own = self.ledger.sums.get(name), counter(value)
        return value if earlier is None or own is None else raw(added(earlier.value, own))

    def _ratio(self, pairs: tuple[tuple[str, str], ...], meta: Fields) -> Raw | None:
        def told(name: str) -> bool:
            earlier = self.ledger.sums.get(name)
            whole = rule(name) is Rule.SHIFT or (earlier is not None and earlier.tokens == self.attempt.base)
            return whole and name in meta

        for over, under in pairs:
            if told(over) and told(under):
                top, bottom = plain(meta[over]), plain(meta[under])
                if isinstance(top, int | float) and isinstance(bottom, int | float) and bottom:
                    return raw(top / bottom)
        return None

    def _reason(self, value: Raw) -> Raw:
        if not self.attempt.base or bytes(value) == b"null":
            return value
        reason = read_fields(value)
        length = plain(reason["length"]) if "length" in reason else None
        if not isinstance(length, int):
            return value
        return Raw(write({**reason, "length": raw(length + self.attempt.base)}))

    def _measured(self, name: str, value: Raw, meta: Fields) -> Raw:
        ledger, old = self.ledger, plain(value)
        elapsed = self.now - ledger.opened
        to_first = (ledger.first_token if ledger.first_token is not None else self.now) - ledger.opened
        if name == "e2e_latency":
            return raw(elapsed)
        if name == "first_token_latency":
            return raw(to_first)
        if name == "decode_throughput":
            total = self.attempt.base + self.attempt.tokens
            return raw((total - 1) / (elapsed - to_first)) if elapsed > to_first and total > 1 else value
        # Wall-clock times of this attempt's arrival: the request arrived earlier, by the time between the dispatches.
        return raw(old - (self.attempt.started - ledger.opened)) if isinstance(old, int | float) else value


def snapshot(ledger: Ledger, top: Fields, meta: Fields) -> None:
    """Keep the prompt's metadata of the first event there is; later attempts' prompts are longer than the client's."""
    ledger.first = of_prompt(meta)
    ledger.first_body = {"prompt_token_ids": top["prompt_token_ids"].copy()} if "prompt_token_ids" in top else {}


def renew(ledger: Ledger, attempt: Attempt, meta: Fields, *, streaming: bool) -> None:
    """The same of the newest event of the first attempt that had tokens, and which lists a continuation must have.

    A stream's client is not told again what its worker told once; it is no part of later events.
    """
    kept = {} if streaming else ledger.first or {}
    ledger.first = {**kept, **of_prompt(meta)}
    deltas = attempt.dialect is Dialect.INCREMENTAL
    tokens = attempt.last_delta if deltas else attempt.tokens

    def is_rows(name: str, value: Raw) -> bool:
        fits = may_be_rows(name, value) and name not in attempt.not_rows
        return fits and (rule(name) is Rule.ROWS or len(read_rows(value)) == tokens)

    ledger.lists = frozenset(name for name, value in meta.items() if is_rows(name, value))


def unlike(ledger: Ledger, meta: Fields) -> str:
    """A per-token list that only one of the client's answer and a continuation has; "" if there is none."""
    mine = {name for name, value in meta.items() if may_be_rows(name, value)}
    known = {name for name in mine if rule(name) is Rule.ROWS}
    return min((ledger.lists - mine) | (known - ledger.lists), default="")


def restored(ledger: Ledger, meta: Fields) -> Fields:
    """With what earlier attempts told and this one does not: prompt metadata and counters, before the output's lists.

    Releases that tell the prompt's logprobs in the first event only have them there, too.
    """
    told = {**(ledger.first or {}), **{name: raw(counter.value) for name, counter in ledger.sums.items()}}
    missing = {name: value for name, value in told.items() if name not in meta}
    if not missing:
        return meta
    at = next((at for at, name in enumerate(meta) if name.startswith("output_")), len(meta))
    fields = list(meta.items())
    return dict([*fields[:at], *missing.items(), *fields[at:]])


def recomputed(ledger: Ledger) -> dict[str, list[tuple[int, int]]]:
    """The rows that were computed again, by field, as far as the client was shown any."""
    return {name: replay.recomputed for name, replay in ledger.replays.items() if replay.recomputed}


def add_counters(ledger: Ledger, meta: Fields, tokens: int) -> None:
    """Add an ended attempt's counters, as its newest event told them."""
    for name, value in meta.items():
        own = counter(value) if rule(name) is Rule.SUM else None
        if own is None:
            continue
        earlier = ledger.sums.get(name)
        if earlier is None:
            ledger.sums[name] = Counter(own, tokens)
        else:
            ledger.sums[name] = Counter(added(earlier.value, own), earlier.tokens + tokens)
