"""The client's body of `/generate`, read only as far as it must be; every other field stays the client's own bytes."""

from __future__ import annotations

import enum
import hashlib

import msgspec
from msgspec import Raw

from dyn_relay.formats.base import Headers, NativeRequest
from dyn_relay.formats.sglang.wire import NULL, Fields, Foreign, NotJson, plain, raw, read_fields

#: SGLang's own default for `max_new_tokens` (SamplingParams, 0.5.23).
DEFAULT_MAX_NEW_TOKENS = 128

_ids = msgspec.json.Decoder(list[int])
_batch_ids = msgspec.json.Decoder(list[list[int]])

#: Values longer than this are not looked into when a single number or word is meant.
_SHORT = 4096

#: What cannot be why an engine dies: left out of the fingerprint.
_NAMES = frozenset({"rid", "stream", "kv_hints", "routed_dp_rank", "data_parallel_rank", "priority", "log_metrics"})
#: The same among the sampling parameters: the samples of one prompt differ in their seeds.
_SEEDS = frozenset({"sampling_seed"})


class Absent(enum.Enum):
    """The value of a field that is not there; `null` is a value of its own."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT


class Request:
    """One body. `unreadable` is "" or the name of what keeps us from judging it: it is then passed on as it is."""

    __slots__ = (
        "body",
        "by_text",
        "content_type",
        "defaults",
        "fields",
        "highest",
        "lowest",
        "method",
        "prompt",
        "prompt_tokens",
        "rid",
        "sampling",
        "stream",
        "unreadable",
    )

    def __init__(self, request: NativeRequest) -> None:
        self.method = request.method
        self.body = request.body
        self.content_type = header(request.headers, b"content-type") or b"application/json"
        #: The worker's sampling defaults, merged under the client's parameters. Set by admission.
        self.defaults: dict[str, object] = {}
        self.fields: Fields = {}
        self.sampling: Fields = {}
        self.stream = False
        #: The client's own rid, "" if it gave none.
        self.rid = ""
        #: The token ids, checked, as the client wrote them; None if there is no single prompt of ids.
        self.prompt: Raw | None = None
        self.prompt_tokens = 0
        #: The prompt is one text; the engine is asked for its ids (see `learn_prompt`).
        self.by_text = False
        #: The bounds of all token ids, those of a batch too.
        self.lowest = self.highest = 0
        self.unreadable = self._read(request.headers)

    def _read(self, headers: Headers) -> str:
        if header(headers, b"content-encoding").lower() not in (b"", b"identity"):
            return "content-encoding"
        if not is_json(self.content_type.lower()):
            return "content-type"
        try:
            # The engine's parser refuses broken UTF-8 and non-finite numbers; ours skips over what it does not read.
            self.body.decode()
            self.fields = msgspec.json.decode(self.body, type=Fields)
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
            return "body"
        stream = self.value("stream")
        self.stream = stream is True
        rid = self.value("rid")
        self.rid = rid if isinstance(rid, str) else ""
        self._read_ids()
        text = self.fields.get("text")
        self.by_text = text is not None and bytes(text)[:1] == b'"' and self.value("input_ids") in (ABSENT, None)
        if not isinstance(stream, bool | Absent):
            return "stream"
        if not isinstance(self.value("return_prompt_token_ids"), bool | Absent):
            return "return_prompt_token_ids"  # not to be overwritten: the engine refuses it
        unread = self._read_sampling()
        return "rid" if rid == "" or not isinstance(rid, str | None | Absent) else unread

    def _read_ids(self) -> None:
        value = self.fields.get("input_ids", NULL)
        try:
            ids = _ids.decode(value)
        except msgspec.DecodeError:
            self._read_batch(value)
            return
        self.prompt = value
        self.prompt_tokens = len(ids)
        self.lowest, self.highest = min(ids, default=0), max(ids, default=0)

    def _read_batch(self, value: Raw) -> None:
        try:
            prompts = [ids for ids in _batch_ids.decode(value) if ids]
        except msgspec.DecodeError:
            return
        self.lowest = min((min(ids) for ids in prompts), default=0)
        self.highest = max((max(ids) for ids in prompts), default=0)

    def _read_sampling(self) -> str:
        params = self.fields.get("sampling_params", NULL)
        if bytes(params) == b"null":
            return ""
        try:
            self.sampling = read_fields(params)
        except (Foreign, NotJson):
            return "batch" if bytes(params)[:1] == b"[" else "sampling_params"
        return ""

    def value(self, name: str) -> object:
        """A top-level field as a Python value, `ABSENT` if missing; a very long or deep one comes as its `Raw`."""
        value = self.fields.get(name)
        if value is None:
            return ABSENT
        return _value(value) if len(bytes(value)) <= _SHORT else value

    def parameter(self, name: str) -> object:
        """A sampling parameter, the worker's default where the client gave none (explicit `null` counts as given)."""
        if name in self.sampling:
            return _value(self.sampling[name])
        return self.defaults.get(name, ABSENT)

    def number(self, name: str, default: int) -> int | None:
        """An integer sampling parameter; None if it is `null` or not an integer."""
        value = self.parameter(name)
        if value is ABSENT:
            return default
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def max_new_tokens(self) -> int | None:
        """The budget; None if it has no bound or cannot be told."""
        return self.number("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)

    @property
    def min_new_tokens(self) -> int:
        """Tokens before which no stop token counts."""
        return self.number("min_new_tokens", 0) or 0

    @property
    def greedy(self) -> bool:
        """The most likely token is always taken (SGLang 0.5.23, sampling_params.py:236)."""
        temperature = self.parameter("temperature")
        return (isinstance(temperature, int | float) and temperature < 1e-6) or self.parameter("top_k") == 1

    def asks(self, name: str) -> bool:
        """True if a top-level switch is on."""
        return self.value(name) is True

    @property
    def ignore_eos(self) -> bool:
        """No token ends the answer, those of `stop_token_ids` neither."""
        return self.parameter("ignore_eos") is True

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; empty ones stop nothing."""
        stop = self.parameter("stop")
        listed = stop if isinstance(stop, list) else [stop]
        return tuple(one for one in listed if isinstance(one, str) and one)

    @property
    def keeps_stops(self) -> bool:
        """What ended the answer stays in its text."""
        return self.parameter("no_stop_trim") is True

    @property
    def hides_prompt(self) -> bool:
        """The ids of its text are asked for here; the client has not asked."""
        return self.by_text and not self.asks("return_prompt_token_ids")

    def learn_prompt(self, ids: Raw) -> None:
        """The ids of the text, as the engine told them. Raises `msgspec.DecodeError`."""
        self.prompt_tokens = len(_ids.decode(ids))
        self.prompt = ids.copy()

    def last_ids(self, count: int) -> list[int]:
        """The prompt's last ids."""
        return _ids.decode(self.prompt)[-count:] if self.prompt is not None else []

    @property
    def stop_ids(self) -> set[int]:
        """The `stop_token_ids`."""
        stops = self.parameter("stop_token_ids")
        return {one for one in stops if isinstance(one, int)} if isinstance(stops, list) else set()

    def names_stop(self, token: int) -> bool:
        """True if `token` is among them."""
        return token in self.stop_ids

    def named(self, rid: str) -> bytes:
        """The client's body with another `rid`; nothing else changes, not a byte if it had none."""
        return self.given({"rid": raw(rid)})

    def given(self, fields: Fields, drop: frozenset[str] = frozenset()) -> bytes:
        """The body with these fields, without those of `drop`; not a byte else changes if it had none of them."""
        if not fields:
            return self.body
        if (fields.keys() | drop) & self.fields.keys() or not self.fields:
            return self.edited(fields, {}, drop)
        start = self.body.index(b"{") + 1
        return b"".join((self.body[:start], bytes(raw(fields))[1:-1], b",", self.body[start:]))

    def edited(self, fields: Fields, sampling: Fields, drop: frozenset[str] = frozenset()) -> bytes:
        """The body with these fields and sampling parameters replaced or added, and those of `drop` left out."""
        result = {name: value for name, value in self.fields.items() if name not in drop}
        result.update(fields)
        if sampling:
            result["sampling_params"] = raw({**self.sampling, **sampling})
        return bytes(raw(result))

    def fingerprint(self) -> bytes:
        """32 bytes, equal for two bodies that ask the same of an engine, under whatever rid."""
        digest = hashlib.sha256()
        if not self.fields:
            digest.update(self.body)
        fields = dict(self.fields)
        if self.sampling.keys() & _SEEDS:
            kept = {name: value for name, value in self.sampling.items() if name not in _SEEDS}
            fields["sampling_params"] = raw(kept)
        for name in sorted(fields.keys() - _NAMES):
            digest.update(b"%d:%b=%b;" % (len(name), name.encode(), bytes(fields[name])))
        return digest.digest()


def _value(value: Raw) -> object:
    try:
        return plain(value)
    except (RecursionError, msgspec.DecodeError):  # too deep, or a number out of all bounds
        return value


def header(headers: Headers, name: bytes) -> bytes:
    """A header's value, `b""` if missing."""
    for key, value in headers:
        if key == name:
            return value.strip()
    return b""


def is_json(content_type: bytes) -> bool:
    """What FastAPI reads as JSON: `application/json`, `application/*+json`, or no content type at all."""
    if content_type == b"application/json":
        return True
    media = content_type.partition(b";")[0].strip()
    return not media or media == b"application/json" or (media.startswith(b"application/") and media.endswith(b"+json"))
