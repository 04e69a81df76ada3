"""One server-sent event of SGLang, read no further than the hot path needs, and what kind of word it is."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from dyn_relay.formats.base import End
from dyn_relay.formats.sglang.spans import parse
from dyn_relay.formats.sglang.wire import Fields, Foreign, inside, parts, read, read_fields

DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"

#: What becomes of a stream's framing.
FRAMING: dict[str, str] = {
    "status": "the worker's; a unary client gets the status that stock gives to unary requests",
    "content-type": "the worker's, of the first one that answers",
    "data": "one event: the worker's own bytes until the first cut (unless it knows the request by another rid, or "
    "tells prompt ids that only the proxy asked for); then JSON on one line, each value in the worker's own bytes",
    "[DONE]": "the worker's; made with a finish that is made here; never after an error of the proxy's own",
    "comments": "passed to streams; no sign of life",
    "events": "as many as the workers send; one may bring several tokens, or none",
}

_EMPTY = Raw(b"")


class Finish(msgspec.Struct, gc=False):
    """`meta_info.finish_reason`. Queue aborts leave out `status_code` and `err_type` (SGLang 0.5.23)."""

    type: str
    message: str | None = None
    matched: Any = None
    status_code: int | None = None


class Meta(msgspec.Struct, gc=False):
    """What every event is asked for of its `meta_info`."""

    #: The rid that the engine knows the request by.
    id: Any = UNSET
    finish_reason: Finish | None = None
    completion_tokens: int | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    weight_version: Any = None
    #: Of stock, in the finish alone.
    weight_versions: Raw | UnsetType = UNSET


class Delta(msgspec.Struct, gc=False):
    """An event whose token ids are wanted one by one: those of incremental streams are few."""

    output_ids: list[int] | UnsetType = UNSET
    meta_info: Meta | None = None
    error: Raw = _EMPTY
    text: str = ""


class Whole(msgspec.Struct, gc=False):
    """An event whose token ids are only counted: those of a cumulative stream are all that there are so far."""

    output_ids: Raw = _EMPTY
    meta_info: Meta | None = None
    error: Raw = _EMPTY
    #: Which of several answers; single requests have none.
    index: int | None = None


class ErrorObject(msgspec.Struct):
    """The object under `error`; a plain string is the message alone."""

    message: str = ""
    code: int | None = 400


_error = msgspec.json.Decoder(ErrorObject | str)
delta_decoder = msgspec.json.Decoder(Delta)
whole_decoder = msgspec.json.Decoder(Whole)

#: 503s of the scheduler that say "not now" rather than "broken": another worker may take the request.
BUSY_MESSAGES = (
    "The request queue is full",
    "The request is aborted by a higher priority request",
    "Request waiting timeout reached",
)


#: How 0.5.23 says that a leg of a pair was aborted on somebody's wish before its cache was handed over: as a 500
#: (disaggregation/{prefill,decode}.py).
_HANDOVER_ABORTED = re.compile(r"KVTransferError\(bootstrap_room=-?\d+\): Aborted by AbortReq\.?$")


#: How its prefill leg says that something has ended the transfer of which this process knows no reason: its decode leg,
#: which was aborted or has waited too long, has told it so (common/conn.py, `AbortNotification`).
_ENDED_BY_THE_OTHER = re.compile(
    r"KVTransferError\(bootstrap_room=-?\d+\): Failed due to an unknown reason from another rank\.?$"
)


def ended_by_the_other(message: str) -> bool:
    """Do a prefill worker's words leave the reason of a failure to its decode worker?"""
    return _ENDED_BY_THE_OTHER.search(message) is not None


class Kind(enum.Enum):
    """What an event says."""

    PROGRESS = "progress"
    FINISH = "finish"  #: the engine's own end: stop, length, or an abort that somebody asked for
    ABORT_ECHO = "abort echo"  #: an abort of a request that was not running: its lists are no deltas
    ERROR = "error"  #: an error object, or an abort with a status code: never part of an answer


class Fault(msgspec.Struct, frozen=True):
    """An engine's error, however it was wrapped. `code` is an HTTP status."""

    code: int
    message: str

    def end(self, tokens: int) -> End:
        """What it does to an attempt that had generated `tokens`."""
        if self.code == 429 and tokens == 0:
            return End.BUSY  # what stands before an engine says so
        if 400 <= self.code < 500:
            return End.REFUSED
        if self.code == 500 and _HANDOVER_ABORTED.search(self.message):
            return End.INTERRUPTED
        if self.code == 503 and tokens == 0 and self.message.startswith(BUSY_MESSAGES):
            return End.BUSY
        return End.FAILED


def count(ids: Raw) -> int:
    """Number of elements of a flat array of numbers, without reading them. Raises `Foreign` if it is no array."""
    body = bytes(ids)
    if body[:1] != b"[":
        raise Foreign("output_ids is no list")
    commas = body.count(b",")
    return commas + 1 if commas or inside(body) else 0


def kind(event: Delta | Whole) -> Kind:
    """Classify an event. Raises `Foreign` if it has neither `meta_info` nor `error`."""
    meta = event.meta_info
    if meta is None:
        if not bytes(event.error):
            raise Foreign("neither meta_info nor error")
        return Kind.ERROR
    finish = meta.finish_reason
    if finish is None:
        return Kind.PROGRESS
    if finish.type != "abort":
        return Kind.FINISH
    if finish.status_code is not None:
        return Kind.ERROR
    return Kind.ABORT_ECHO if meta.prompt_tokens is UNSET else Kind.FINISH


def fault(event: Delta | Whole) -> Fault:
    """The error that a `Kind.ERROR` event carries. Raises `Foreign`, `NotJson`."""
    if event.meta_info is not None and event.meta_info.finish_reason is not None:
        finish = event.meta_info.finish_reason
        return Fault(_status(finish.status_code), finish.message or "")
    return error_object(event.error)


def error_object(error: bytes | Raw) -> Fault:
    """Read `{"message", "code"}` or a string. Raises `Foreign`, `NotJson`."""
    body = read(_error, error)
    return Fault(400, body) if isinstance(body, str) else Fault(_status(body.code), body.message)


def _status(code: int | None) -> int:
    """A code as the status of an error answer; what is none, 200 above all, must not read as success."""
    return code if code is not None and 400 <= code <= 599 else 500


def finish_type(event: Delta | Whole) -> str:
    """The type of its finish reason, "" if it has none."""
    meta = event.meta_info
    return meta.finish_reason.type if meta is not None and meta.finish_reason is not None else ""


def total_of(event: Whole) -> int:
    """Its `completion_tokens`. Raises `Foreign`."""
    if event.meta_info is None or not isinstance(event.meta_info.completion_tokens, int):
        raise Foreign("an event without completion_tokens")
    return event.meta_info.completion_tokens


def versions_of(meta: Meta) -> list[object]:
    """The weights' versions that an event tells, None for one that it does not: its spans', or else its own."""
    spans = None if meta.weight_versions is UNSET else parse(meta.weight_versions)
    return [span.version for span in spans if span.end > span.start] if spans else [meta.weight_version]


def meta_of(data: bytes) -> Fields:
    """An event's `meta_info`, unread. Raises `Foreign`, `NotJson`, `KeyError`."""
    return read_fields(read_fields(data)["meta_info"])


def as_received(whole: bytes, data: bytes) -> Sequence[bytes]:
    """An event as it came, in parts."""
    return (whole,) if whole else (b"data: ", data, b"\n\n")


def framed(top: Fields, meta: Fields) -> Sequence[bytes]:
    """An event that is written here, in parts."""
    return (b"data: ", *parts(top, meta), b"\n\n")
