"""Several answers in one request: how many a body asks for, and the body that asks for each of them alone.

Stock SGLang (0.5.23, `GenerateReqInput.normalize_batch_and_arguments` and `__getitem__`) makes requests of its own of
the prompts of a batch, and of the samples of an `n` above 1. `shares` does the same by the same rules. What cannot be
spread with certainty, and what stock refuses, is not spread: the engine shall see it as the client wrote it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from dyn_relay.formats.base import NativeRequest
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.sglang.wire import NULL, Fields, Foreign, NotJson, plain, raw, read_fields, read_rows

#: More answers, or more bytes in all of their bodies, are not taken apart: each answer costs a connection and a task.
MOST_ANSWERS = 1024
MOST_BYTES = 1 << 28


class Spread(enum.Enum):
    """What a field's value means for the answers."""

    EACH = "one value for all, or a list with one for each prompt"
    SINGLY = "the same, but a list only without samples: stock refuses both together"
    WHOLE = "not spread, unless it is null"


#: By the field's name; any other is the same for all answers, unless it is a list.
SPREAD: dict[str, Spread] = {
    **dict.fromkeys(
        ("lora_path", "return_hidden_states", "watermark", "extra_key", "cache_salt", "kv_hints"), Spread.EACH
    ),
    **dict.fromkeys(
        (
            *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
            *("return_sampling_mask", "sampling_logprobs_mode", "custom_logit_processor"),
        ),
        Spread.SINGLY,
    ),
    **dict.fromkeys(
        (
            # Wrapped, counted and repeated by rules of their own.
            *("image_data", "video_data", "audio_data", "modalities", "mm_hashes", "mm_content_hashes"),
            # A room used twice can crash both workers of a pair.
            *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
            *("decode_tp_size", "disagg_prefill_dp_rank"),
            # One session is not for several answers at a time.
            "session_params",
            *("input_embeds", "positional_embed_overrides", "multi_item_delimiter_indices", "token_indices_to_pool"),
            *("lora_id", "need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls"),
        ),
        Spread.WHOLE,
    ),
}
#: Spread below.
_OWN = frozenset({"rid", "text", "input_ids", "sampling_params"})


class Unsplit(Exception):
    """The request must stay whole; `reason` is the field's name, or `batch`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Asked:
    """So many prompts, each with so many samples. `several`: the answer is a list, be it of one."""

    prompts: int = 1
    samples: int = 1
    several: bool = False

    @property
    def generations(self) -> int:
        """Answers in all."""
        return self.prompts * self.samples


@dataclass(frozen=True, slots=True)
class Share:
    """One answer's own request; `alias`: the client's name for it, where its rid is not that."""

    request: Request
    rid: str
    alias: str


_ALONE = Asked()


def asked(request: Request) -> Asked:
    """How many answers a body asks for; one where that cannot be told."""
    fields = request.fields
    plain = "text" not in fields and "n" not in request.sampling and not _listed(fields.get("sampling_params", NULL))
    if plain and request.prompt is not None:
        return _ALONE  # as almost always
    if request.unreadable not in ("", "batch", "rid"):
        return _ALONE
    try:
        several = _listed(fields.get("text", NULL))
        prompts = len(read_rows(fields["text"])) if several else 1
        if fields.get("text", NULL) == NULL and _nested(fields.get("input_ids", NULL)):
            several, prompts = True, len(read_rows(fields["input_ids"]))
        samples = max((_count(params) for params in _params(request)), default=1)
    except (Foreign, NotJson):
        return _ALONE
    return Asked(prompts, samples, several or samples > 1)


def shares(request: Request, fresh: Callable[[], str]) -> list[Share]:
    """The requests of the single answers, prompt by prompt, as stock orders them; none if only one is asked for.

    `fresh` makes the rids that stock would make up. Raises `Unsplit`.
    """
    want = asked(request)
    if not want.several:
        return []
    if not 0 < want.generations <= MOST_ANSWERS:
        raise Unsplit("batch")
    columns = {**_prompts(request, want), **_sampling(request, want), **_values(request, want)}
    rids = _rids(request, want)
    found = []
    size = 0
    for at in range(want.prompts):
        fields = {name: columns[name][at] if name in columns else value for name, value in request.fields.items()}
        rid = rids[at] if rids and want.samples == 1 else ""
        fields.pop("rid", None)
        body = bytes(raw({"rid": raw(rid), **fields} if rid else fields))
        size += len(body) * want.samples
        if size > MOST_BYTES:
            raise Unsplit("batch")
        native = NativeRequest(request.method, "", [(b"content-type", request.content_type)], body)
        for _ in range(want.samples):
            alone = Request(native)
            if alone.unreadable or not (alone.prompt_tokens or alone.by_text):
                raise Unsplit(alone.unreadable or "input_ids")
            found.append(Share(alone, rid or fresh(), rids[at] if rids and not rid else ""))
    return found


def _prompts(request: Request, want: Asked) -> dict[str, list[Raw]]:
    columns = {}
    for name in ("text", "input_ids"):
        value = request.fields.get(name, NULL)
        if _listed(value) if name == "text" else _nested(value):
            columns[name] = read_rows(value)
            if len(columns[name]) != want.prompts:
                raise Unsplit(name)
    if columns and any(request.fields.get(name, NULL) != NULL for name in {"text", "input_ids"} - columns.keys()):
        raise Unsplit("input_ids")  # one of them a list, the other for all
    return columns


def _sampling(request: Request, want: Asked) -> dict[str, list[Raw]]:
    params = _params(request)
    if any(_count(one) != want.samples for one in params) or any("n" in one and not _counts(one) for one in params):
        raise Unsplit("n")
    if any(one.get("beam_width", NULL) not in (NULL, Raw(b"0"), Raw(b"1")) for one in params):
        raise Unsplit("beam_width")
    listed = _listed(request.fields.get("sampling_params", NULL))
    if listed and len(params) != want.prompts:
        raise Unsplit("sampling_params")
    if want.samples == 1 and not listed:
        return {}
    alone = [raw({name: value for name, value in one.items() if want.samples == 1 or name != "n"}) for one in params]
    return {"sampling_params": alone if listed else alone * want.prompts}


def _values(request: Request, want: Asked) -> dict[str, list[Raw]]:
    columns = {}
    for name, value in request.fields.items():
        rule = SPREAD.get(name)
        if name in _OWN or value == NULL:
            continue
        if rule is Spread.WHOLE:
            if name == "image_data" and value == Raw(b"[]"):
                continue  # as null
            raise Unsplit(name)
        if not (_nested(value) if name == "token_ids_logprob" else _listed(value)):
            continue
        rows = read_rows(value)
        if rule is None:
            raise Unsplit("batch")
        if len(rows) != want.prompts or (rule is Spread.SINGLY and want.samples > 1):
            raise Unsplit(name)
        if name != "lora_path" and NULL in rows:
            raise Unsplit(name)
        columns[name] = rows
    return columns


def _rids(request: Request, want: Asked) -> list[str]:
    """The client's own names, one a prompt; none if it gave none."""
    try:
        value = plain(request.fields.get("rid", NULL))
    except (msgspec.DecodeError, RecursionError):  # a number out of all bounds, say
        raise Unsplit("rid") from None
    if value is None:
        return []
    if isinstance(value, str) and value:
        return [value if want.samples > 1 else f"{value}_{at}" for at in range(want.prompts)]
    strings = isinstance(value, list) and all(isinstance(one, str) and one for one in value)
    if isinstance(value, list) and strings and len(value) == want.prompts == len(set(value)):
        return value
    raise Unsplit("rid")


def _params(request: Request) -> list[Fields]:
    """The sampling parameters: one for all prompts, or one each. Raises `Foreign`, `NotJson`."""
    value = request.fields.get("sampling_params", NULL)
    return [read_fields(one) for one in read_rows(value)] if _listed(value) else [request.sampling]


def _count(params: Fields) -> int:
    return int(bytes(params["n"])) if _counts(params) else 1


def _counts(params: Fields) -> bool:
    """Its `n` is a number of samples."""
    value = bytes(params.get("n", NULL))
    return len(value) < 10 and value.isdigit() and int(value) > 0


def _listed(value: Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b"["


def _nested(value: Raw) -> bool:
    """A list of lists, to go by its first element."""
    return _listed(value) and bytes(memoryview(value)[1:64]).lstrip()[:1] == b"["
