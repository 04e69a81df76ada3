"""Prefill and decode: what each of the two workers of an attempt is sent, and what is made of the two answers.

Source: SGLang 0.5.23. Both get the same request, with the same room: the prefill worker computes the prompt and one
token, hands the cache over, and then answers with that token and all `input_*` of the prompt (prefill.py:1014, :1219).
The decode worker answers with every token, and has no `input_*` (output_streamer.py:566). So the client gets decode's
answer with prefill's `input_*` in it. Of the first token decode was told the logprob and the top ones, but not those of
chosen ids: where they are to be it says null (decode.py:2757).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Raw

from dyn_relay.formats.base import Event
from dyn_relay.formats.sglang.affinity import pinned
from dyn_relay.formats.sglang.batch import asked
from dyn_relay.formats.sglang.codec import Codec
from dyn_relay.formats.sglang.continuation import BOOTSTRAP, placed
from dyn_relay.formats.sglang.events import DONE, Fault, Kind, ended_by_the_other, fault, kind, whole_decoder
from dyn_relay.formats.sglang.replay import Replay
from dyn_relay.formats.sglang.request import ABSENT, Request
from dyn_relay.formats.sglang.wire import Fields, Foreign, NotJson, number, raw, read, read_fields, read_rows
from dyn_relay.formats.traits import Pairing

#: What only the prefill worker knows of the prompt, under `meta_info`.
INPUTS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
#: What only it knows of the first token.
CHOSEN = "output_token_ids_logprobs"
#: Bytes of a list in which its first element begins.
_BEGINNING = 16


def legs(request: Request, pairing: Pairing, decode: Fields, *, first: bool) -> tuple[Fields, Fields]:
    """What the decode worker's request has beside its rank's fields, `decode`, and what the prefill worker's has.

    A batch names a room for each of its prompts. The `first` attempt may have the client's own room; a worker that
    still has it would crash of it, so that no later one has. It may also name a rank to both, of which decode must be
    told: without that it looks where the room says, and waits there for its timeout.
    """
    want = asked(request)
    fields: Fields = {}
    if not first or all(request.value(name) in (ABSENT, None) for name in BOOTSTRAP):
        rooms = [pairing.room() for _ in range(want.prompts)]
        many = want.several
        fields = {
            "bootstrap_host": raw([pairing.host] * len(rooms) if many else pairing.host),
            "bootstrap_port": raw([pairing.port] * len(rooms) if many else pairing.port),
            "bootstrap_room": raw(rooms if many else rooms[0]),
        }
    if pairing.rank is None:
        named = pinned(request) if first else None
        follows = named is not None and named >= 0 and request.value("disagg_prefill_dp_rank") in (ABSENT, None)
        there: Fields = {"disagg_prefill_dp_rank": raw(named), **placed(pairing.traits, named)} if follows else {}
        return {**decode, **there, **fields}, fields
    return (
        {**decode, "disagg_prefill_dp_rank": raw(pairing.rank), **fields},
        {**placed(pairing.traits, pairing.rank), **fields},
    )


def inputs_of(request: Request) -> Sequence[str]:
    """What of its answer only the prefill worker knows: nothing, unless logprobs of the prompt are asked for."""
    start = request.value("logprob_start_len")
    asked_for = start is not ABSENT and start is not None and start != -1
    return INPUTS if asked_for and _has_logprobs(request) else ()


def asks_for_chosen(request: Request) -> bool:
    """Are logprobs of chosen ids asked for, of which those of an attempt's first token are the prefill worker's?"""
    return _has_logprobs(request) and request.value("token_ids_logprob") not in (ABSENT, None, [])


def _has_logprobs(request: Request) -> bool:
    return request.value("return_logprob") not in (ABSENT, None, False)


class Prefilled:
    """The prefill worker's part in an answer. Events of the decode worker wait for it, if they need it."""

    __slots__ = ("_chosen", "_codec", "_held", "_names", "_parts", "_replays")

    def __init__(self, names: Sequence[str], replays: Mapping[str, Replay], codec: Codec, *, chosen: bool) -> None:
        """`names`: what of `meta_info` is the prefill worker's alone; `replays`: rows that both have a part of.

        `chosen`: it has the first of `CHOSEN`.
        """
        self._names = names
        self._chosen = chosen
        self._replays = replays
        self._codec = codec
        #: By the answer's number in a batch; None until it is there.
        self._parts: dict[int, Fields] | None = None
        self._held: list[Event] = []

    @property
    def waits(self) -> bool:
        """Nothing more can be taken before it is there."""
        return bool(self._held)

    def take(self, events: Sequence[Event]) -> Sequence[Event]:
        """The decode worker's events as the client may see them; those that have to wait come with `told`."""
        if not self._names and not self._replays and not self._chosen:
            return events
        if self._parts is None:
            if not self._held and _unanswered(events):
                return events
            self._held += events
            return ()
        return [self._merged(event) for event in events]

    def told(self, bodies: Sequence[bytes]) -> tuple[Fault | None, Sequence[Event]]:
        """The prefill worker's whole answer: the data of its events, or its body. Its error, else what had waited.

        Raises as events that cannot be read.
        """
        parts: dict[int, Fields] = {}
        wanted = (*self._names, *self._replays, *((CHOSEN,) if self._chosen else ()))
        for body in bodies:
            if body == DONE:
                continue
            answers = [bytes(row) for row in read_rows(body)] if body[:1] == b"[" else [body]
            for at, answer in enumerate(answers):
                event = read(whole_decoder, answer)
                if kind(event) is Kind.ERROR:
                    return fault(event), ()
                meta = read_fields(read_fields(answer)["meta_info"])
                part = parts.setdefault(at if event.index is None else event.index, {})
                part |= {name: meta[name].copy() for name in wanted if name in meta}
        if not parts:
            raise Foreign("the prefill worker's answer is empty")
        self._parts = parts
        held, self._held = self._held, []
        return None, self.take(held)

    def _merged(self, event: Event) -> Event:
        _, data = event
        if data in (b"", DONE):
            return event
        if data[:1] == b"[":
            answers = [self._with(row, at) for at, row in enumerate(read_rows(data))]
            return b"", bytes(raw(answers))
        return b"", bytes(self._with(Raw(data), -1))

    def _with(self, data: Raw, index: int) -> Raw:
        """An answer with the prompt's metadata; it is the `index`-th of a batch, -1: it says itself which one."""
        assert self._parts is not None
        fields = read_fields(data)
        if "meta_info" not in fields:
            return data
        if index < 0:
            index = int(bytes(fields["index"])) if "index" in fields else 0
        meta = read_fields(fields["meta_info"])
        part = self._parts.get(index, {})
        meta |= {name: part[name] for name in self._names if name in meta and name in part}
        for name, replay in self._replays.items():
            if name in meta:
                self._join(replay, meta, part.get(name))
        if CHOSEN in meta and CHOSEN in part:
            meta[CHOSEN] = _with_first(meta[CHOSEN], part[CHOSEN])
        return raw({**fields, "meta_info": raw(meta)})

    def _join(self, replay: Replay, meta: Fields, prefill: Raw | None) -> None:
        """Rows of the prompt are the prefill worker's; what does not fit is left out."""
        name, prompt, tokens = replay.name, number(meta, "prompt_tokens"), number(meta, "completion_tokens")
        decode, joined = meta.pop(name), None
        if prompt is not None and tokens is not None:
            rows = replay.rows(prompt + tokens)
            joined = self._codec.join(name, prefill, decode, replay.rows(prompt + 1), rows)
        if joined is not None:
            meta[name] = joined


def _with_first(decode: Raw, prefill: Raw) -> Raw:
    """Decode's list with prefill's only element in the place of a null at its beginning."""
    body = bytes(decode)
    at = body.find(b"null", 0, _BEGINNING)
    if at < 0 or body[:at].strip() != b"[":
        return decode
    first = read_rows(prefill)
    return Raw(body[:at] + bytes(first[0]) + body[at + 4 :]) if first else decode


def secondhand(events: Sequence[Event]) -> bool:
    """Does a prefill worker's answer, a stream, leave the reason of its failure to the decode worker?"""
    for _, data in events:
        if data in (b"", DONE):
            continue
        try:
            event = read(whole_decoder, data)
            if kind(event) is Kind.ERROR:
                return ended_by_the_other(fault(event).message)
        except (Foreign, NotJson):
            return False
    return False


def _unanswered(events: Sequence[Event]) -> bool:
    """Are the decode worker's first events no answer, for which nobody has to wait: an error, or nothing yet?

    The prefill worker may not be told that the decode worker has failed: it may wait for that for minutes.
    """
    said = [data for _, data in events if data not in (b"", DONE)]
    for data in said:
        if data[:1] == b"[":
            continue
        try:
            if kind(read(whole_decoder, data)) in (Kind.ERROR, Kind.ABORT_ECHO):
                return True
        except NotJson:
            return True
        except Foreign:
            continue
    return not said
