"""What the prefill worker's answer adds to the decode worker's: see `pair.py`.

Source: SGLang 0.5.23. The decode worker tells nothing of the prompt (`input_*`: output_streamer.py:566), has rows in
the place of the prompt's that it never computed, and nothing, null, in the place of the first token's
`token_ids_logprob` (decode.py:2757).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Raw

from dyn_relay.formats.base import Event
from dyn_relay.formats.sglang.batch import asked
from dyn_relay.formats.sglang.codec import Codec
from dyn_relay.formats.sglang.events import (
    DONE,
    Fault,
    Kind,
    Whole,
    fault,
    finish_type,
    kind,
    meta_of,
    whole_decoder,
)
from dyn_relay.formats.sglang.replay import Replay
from dyn_relay.formats.sglang.request import ABSENT, Request
from dyn_relay.formats.sglang.wire import (
    NULL,
    Fields,
    Foreign,
    NotJson,
    number,
    plain,
    raw,
    read,
    read_fields,
    read_rows,
    write,
)

#: What begins so, under `meta_info`, is of the prompt.
_INPUT = "input_"
_INPUT_LOGPROBS = "input_token_logprobs"
_IDS_LOGPROBS = "output_token_ids_logprobs"
_NOTHING = (b"null", b"[]")


class Prefilled:
    """The prefill worker's part in an answer. Events of the decode worker wait for it, if they need it."""

    __slots__ = ("_answers", "_codec", "_held", "_ids", "_inputs", "_parts", "_replays", "_request", "_rid", "version")

    def __init__(self, request: Request, rid: str, replays: Mapping[str, Replay], codec: Codec, *, begun: bool) -> None:
        """`rid`: the attempt's name at both workers, "" if they make up their own. `replays`: rows that both have a
        part of. `begun`: tokens were delivered, and with them what there is to tell of the prompt.
        """
        self._request = request
        self._rid = rid
        self._replays = replays
        self._codec = codec
        self._answers = asked(request).prompts
        logprobs = request.value("return_logprob") not in (ABSENT, None, False)
        self._ids = logprobs and request.value("token_ids_logprob") not in (ABSENT, None)
        start = request.value("logprob_start_len")
        # Asked for single ids, an engine tells one position of the prompt even if it was asked for none.
        self._inputs = logprobs and not begun and (self._ids or start not in (ABSENT, None, -1))
        #: The weights that it computed the prompt with, as far as is known.
        self.version: object = None
        #: By the answer's number in a batch; None until it is there.
        self._parts: dict[int, Fields] | None = None
        #: Events that wait, and the numbers of the answers that they are of.
        self._held: list[Event] = []

    @property
    def adds(self) -> bool:
        """Something of the decode worker's events is to be joined with it."""
        return self._inputs or self._ids or bool(self._replays)

    @property
    def waits(self) -> bool:
        """Nothing more can be taken before it is there."""
        return bool(self._held)

    def take(self, events: Sequence[Event]) -> Sequence[Event]:
        """The decode worker's events as the client may see them; those that have to wait come with `told`."""
        if not self.adds:
            return events
        if self._parts is not None:
            return [self._merged(event, self._parts) for event in events]
        return [self._merged(event, {}) for event in events if not self._waits(event)]

    def told(self, bodies: Sequence[bytes]) -> tuple[Fault | None, Sequence[Event]]:
        """The prefill worker's whole answer: the data of its events, or its body. Its error, else what had waited.

        Raises as events that cannot be read, and `Foreign` for an answer to anything else than was asked.
        """
        parts: dict[int, Fields] = {}
        for body in bodies:
            if body == DONE:
                continue
            answers = [bytes(row) for row in read_rows(body)] if body[:1] == b"[" else [body]
            for at, answer in enumerate(answers):
                event = read(whole_decoder, answer)
                if (found := _fault(event)) is not None:
                    return found, ()
                index, meta = at if event.index is None else event.index, meta_of(answer)
                self._check(index, meta)
                part = parts.setdefault(index, {})
                # A finish without a token of its own has nothing to say in deltas; that takes nothing back.
                for name, value in meta.items():
                    if self._wants(name) and not (name in part and bytes(value) in _NOTHING):
                        part[name] = value.copy()
        if parts.keys() != set(range(self._answers)):
            raise Foreign(f"the prefill worker has answered {len(parts)} of {self._answers} prompts")
        for replay in self._replays.values():
            # What it does not tell of the prompt no finish can be asked for.
            replay.owed = replay.owed and all(replay.name in part for part in parts.values())
        self._parts = parts
        held, self._held = self._held, []
        return None, self.take(held)

    def _wants(self, name: str) -> bool:
        if name.startswith(_INPUT):
            return self._inputs
        return name in self._replays or name == "prompt_tokens" or (name == _IDS_LOGPROBS and self._ids)

    def _waits(self, event: Event) -> bool:
        """Hold the event back, unless it says that an answer has failed: for that nobody has to wait.

        The prefill worker may not be told that the decode worker has failed, and wait for that for minutes.
        """
        _, data = event
        if not data or (data == DONE and not self._held):
            return False
        if data != DONE and data[:1] != b"[":
            try:
                read_event = read(whole_decoder, data)
                failed = kind(read_event) in (Kind.ERROR, Kind.ABORT_ECHO)
            except NotJson:
                return False
            except Foreign:
                failed = False
            if failed and not self._held_of(read_event.index):
                return False
        self._held.append(event)
        return True

    def _held_of(self, index: int | None) -> bool:
        """Is something of this answer held back?"""
        held = (data for _, data in self._held if data != DONE and data[:1] != b"[")
        return any(read(whole_decoder, data).index == index for data in held)

    def _check(self, index: int, meta: Fields) -> None:
        """Is it an answer to this request, with all that it must tell of the prompt? Raises `Foreign`."""
        if self._rid and plain(meta["id"]) != self._rid:
            raise Foreign("the prefill worker's answer is another request's")
        if "weight_version" in meta:
            self.version = plain(meta["weight_version"])
        if not self._inputs or self._request.value("return_logprob") is not True:
            return
        rows = read_rows(meta.get(_INPUT_LOGPROBS, Raw(b"null")))
        start, prompt = self._request.value("logprob_start_len"), number(meta, "prompt_tokens")
        if isinstance(start, list):
            start = start[index] if index < len(start) else None
        if type(start) is int and start >= 0 and prompt is not None and len(rows) != max(prompt - start, 0):
            raise Foreign(f"{len(rows)} {_INPUT_LOGPROBS} of {prompt} from {start}")

    def _merged(self, event: Event, parts: Mapping[int, Fields]) -> Event:
        _, data = event
        if data in (b"", DONE):
            return event
        if data[:1] == b"[":
            answers = [self._with(row, parts.get(at, {})) for at, row in enumerate(read_rows(data))]
            return b"", b"[%b]" % b",".join(answers)
        fields = read_fields(data)
        index = int(bytes(fields["index"])) if "index" in fields else 0
        whole = self._with(data, parts.get(index, {}))
        return event if whole == data else (b"", whole)

    def _with(self, data: bytes | Raw, part: Fields) -> bytes:
        """An answer of the decode worker with what the prefill worker has said of the same."""
        fields = read_fields(data)
        if "meta_info" not in fields:
            return bytes(data)
        meta = read_fields(fields["meta_info"])
        before = dict(meta)
        if part and bytes(part["prompt_tokens"]) != bytes(meta.get("prompt_tokens", part["prompt_tokens"])):
            raise Foreign("the two workers were given other prompts")
        if self._inputs and part:
            meta = _with_inputs(meta, {name: value for name, value in part.items() if name.startswith(_INPUT)})
        if self._ids and _IDS_LOGPROBS in meta and _IDS_LOGPROBS in part:
            _tell_first(meta, part[_IDS_LOGPROBS])
        for name, replay in self._replays.items():
            if name in meta:
                # A finish is the last to need them, and they may be most of the memory that is left.
                last = meta.get("finish_reason", NULL) != NULL
                self._join(replay, meta, part.pop(name, None) if last else part.get(name))
        return bytes(data) if meta == before else write(fields, meta)

    def _join(self, replay: Replay, meta: Fields, prefill: Raw | None) -> None:
        """Rows of the prompt are the prefill worker's; what does not fit is left out."""
        name, prompt, tokens = replay.name, number(meta, "prompt_tokens"), number(meta, "completion_tokens")
        decode, joined = meta.pop(name), None
        if prompt is not None and tokens is not None:
            rows = replay.rows(prompt + tokens)
            joined = self._codec.join(name, prefill, decode, replay.rows(prompt + 1), rows, replay.widths)
        if joined is not None:
            meta[name] = joined


def _fault(event: Whole) -> Fault | None:
    """What of the prefill worker's answer is none: an error, or an abort that somebody has wished."""
    what = kind(event)
    if what is Kind.ERROR:
        return fault(event)
    aborted = what is Kind.ABORT_ECHO or finish_type(event) == "abort"
    return Fault(500, "aborted", wished=True) if aborted else None


def _with_inputs(meta: Fields, inputs: Fields) -> Fields:
    """`inputs` in the place of whatever the decode worker says of the prompt: nothing, in another shape if need be."""
    if _INPUT_LOGPROBS not in meta:
        return meta
    merged: Fields = {}
    for name, value in meta.items():
        if not name.startswith(_INPUT):
            merged[name] = value
        elif name in inputs:
            merged[name] = inputs[name]
    return {**merged, **inputs}


def _tell_first(meta: Fields, prefill: Raw) -> None:
    """The row of the first token, which the prefill worker has drawn, where an event has it."""
    rows, tokens, theirs = read_rows(meta[_IDS_LOGPROBS]), number(meta, "completion_tokens"), read_rows(prefill)
    if rows and len(rows) == tokens and bytes(rows[0]) in _NOTHING and theirs:
        meta[_IDS_LOGPROBS] = raw([theirs[0], *rows[1:]])
