"""A `/generate` body as the message that asks the same of an engine over gRPC, or the name of what cannot be carried.

Sans-IO. Every field of stock's body (SGLang 0.5.23) is in one of the tables: `SCALARS`, `SAMPLING` and those that
`translate` names are carried, `NEUTRAL` and `NEUTRAL_SAMPLING` say which values ask for nothing and are dropped,
`HINTS` are dropped whatever they are. All else is refused: an engine that does not hear of a field would give another
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dyn_relay.direct.numbers import CannotCarry, float32, int32, int64, integer, uint32
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.messages import MAX_MESSAGE

#: Checks a value and gives the one that goes into the message. Raises `CannotCarry`.
Check = Callable[[str, object], Any]


def boolean(name: str, value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise CannotCarry(name, "must be true or false")
    return value


def string(name: str, value: object) -> str:
    """One string."""
    if not isinstance(value, str):
        raise CannotCarry(name, "must be a string; gRPC carries one request, no batch")
    return value


def strings(name: str, value: object) -> list[str]:
    """One string or several."""
    return [string(name, one) for one in (value if isinstance(value, list) else [value])]


def ids(name: str, value: object) -> list[int]:
    """A flat list of token ids."""
    if not isinstance(value, list):
        raise CannotCarry(name, "must be a list of token ids")
    if value and isinstance(value[0], list):
        raise CannotCarry(name, "gRPC carries one request, no batch")
    return [int32(name, one) for one in value]


#: What goes into the message as it is: its name there, and what it must be.
SCALARS: dict[str, tuple[str, Check]] = {
    "rid": ("rid", string),
    "stream": ("stream", boolean),
    "return_logprob": ("return_logprob", boolean),
    "logprob_start_len": ("logprob_start_len", int32),
    "top_logprobs_num": ("top_logprobs_num", int32),
    "lora_path": ("lora_path", string),
    "routing_key": ("routing_key", string),
    "session_id": ("session_id", string),
    "routed_dp_rank": ("routed_dp_rank", int32),
    "priority": ("priority", int32),
    "require_reasoning": ("require_reasoning", boolean),
    "max_thinking_tokens": ("max_thinking_tokens", uint32),
}
#: Media: strings (URLs, Base64), if the engine has said that it hears of them (`grpc_features` in its server info).
MEDIA: dict[str, str] = {"image_data": "image_inputs", "video_data": "video_inputs", "audio_data": "audio_inputs"}

SAMPLING: dict[str, tuple[str, Check]] = {
    "temperature": ("temperature", float32),
    "top_p": ("top_p", float32),
    "top_k": ("top_k", int32),
    "min_p": ("min_p", float32),
    "frequency_penalty": ("frequency_penalty", float32),
    "presence_penalty": ("presence_penalty", float32),
    "repetition_penalty": ("repetition_penalty", float32),
    "max_new_tokens": ("max_new_tokens", int32),
    "min_new_tokens": ("min_new_tokens", int32),
    "stop": ("stop", strings),
    "stop_token_ids": ("stop_token_ids", ids),
    "ignore_eos": ("ignore_eos", boolean),
    "n": ("n", int32),
    "sampling_seed": ("seed", int64),
}
#: At most one of them; an empty string is none.
GUIDED = ("json_schema", "regex", "ebnf", "structural_tag", "choice")

#: What a null says (SGLang 0.5.23, `SamplingParams`): said in full, so that no --preferred-sampling-params count.
NULLS: dict[str, object] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
}
#: Nulls that cannot be said.
NO_NULLS = {
    "max_new_tokens": "null, which is no limit, cannot be said over gRPC; absent it is 128 there",
    "n": "null is no number",
}

#: Values that ask for nothing; null is one for every field.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "input_embeds": (),
    "mm_hashes": (),
    "mm_content_hashes": (),
    "use_audio_in_video": (False,),
    "video_config": (),
    "watermark": (),
    "token_ids_logprob": ([],),
    "return_sampling_mask": (False,),
    "sampling_logprobs_mode": ("selected",),
    "return_text_in_logprobs": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (False,),
    "log_metrics": (True,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "return_indexer_topk": (False,),
    "modalities": (),
    "session_params": (),
    "lora_id": (),
    "custom_logit_processor": (),
    "positional_embed_overrides": (),
    "bootstrap_pair_key": (),
    "decode_tp_size": (),
    "disagg_prefill_dp_rank": (),
    "conversation_id": (),
    "http_worker_ipc": (),
    "background": (False,),
    "extra_key": ("",),
    "no_logs": (False,),
    "custom_labels": (),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "external_trace_header": (),
    "received_time": (),
    "need_wait_for_mm_inputs": (False,),
    "num_items_assigned": (),
    "encoder_urls": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "image_max_dynamic_patch": (),
    "video_max_dynamic_patch": (),
    "images_config": (),
    "mm_processor_kwargs": (),
    "multi_item_delimiter_indices": (),
    "token_indices_to_pool": (),
    "cache_salt": ("",),
}
NEUTRAL_SAMPLING: dict[str, tuple[object, ...]] = {
    "stop_regex": ([], ""),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "no_stop_trim": (False,),
    "logit_bias": ({},),
    "custom_params": (),
    "beam_width": (),
    "watermark": (),
}
#: Booleans that are about text alone: of engines without a tokenizer they ask for nothing.
ABOUT_TEXT = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"})
#: Sampling keys that change no token: how many of them an event brings. The gateway does that (`generate.py`).
HINTS = frozenset({"stream_interval"})

#: Objects and lists within each other. Readers of protobuf give up at a hundred messages; each of these is three.
_MAX_DEPTH = 30
_BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
#: Headers that are told as `trace_headers`.
TRACES = (b"traceparent", b"tracestate")


@dataclass(slots=True)
class Asked:
    """One request, as gRPC has it, and what the gateway itself has to do about it."""

    #: `input_ids` is empty if the prompt is a `text`: tokenize that first.
    message: pb.GenerateRequest
    text: str | None
    #: Each event says the prompt's ids.
    prompt_ids: bool
    #: Answers; above 1 never a stream.
    samples: int
    #: Tokens between two events of a cumulative stream, at least.
    interval: int
    #: Fields of `MEDIA` that are there.
    media: tuple[str, ...]


def translate(
    body: Mapping[str, object], headers: Sequence[tuple[bytes, bytes]] = (), *, tokenizer: bool = True
) -> Asked:
    """The message. `tokenizer`: the engine has one. Raises `CannotCarry`, which names the field."""
    message = pb.GenerateRequest(return_text=True, stream=False)
    asked = Asked(message, None, False, 1, 0, ())
    try:
        _fill(asked, body, tokenizer)
        for name, value in headers:
            if name in TRACES:
                message.trace_headers[name.decode()] = value.decode("latin-1")
    except UnicodeEncodeError as exc:
        raise CannotCarry("body", "half a surrogate pair is no text") from exc
    if message.ByteSize() > MAX_MESSAGE:
        raise CannotCarry("body", f"{message.ByteSize()} bytes; gRPC carries at most {MAX_MESSAGE}")
    return asked


def _fill(asked: Asked, body: Mapping[str, object], tokenizer: bool) -> None:
    message = asked.message
    for name, value in body.items():
        if value is None or name in ("sampling_params", *_BOOTSTRAP):
            continue
        if name in SCALARS:
            field, check = SCALARS[name]
            setattr(message, field, check(name, value))
        elif name in MEDIA:
            getattr(message, name).extend(strings(name, value))
            asked.media += (name,)
        elif name in _SPECIAL:
            _SPECIAL[name](asked, name, value)
        else:
            _drop(name, value, NEUTRAL)
    if body.get("routed_dp_rank") is None and body.get("data_parallel_rank") is not None:
        message.routed_dp_rank = int32("data_parallel_rank", body["data_parallel_rank"])
    if body.get("input_ids") is not None:
        asked.text = None  # ids win where both are given
    elif asked.media:
        raise CannotCarry("text", "gRPC carries media only beside input_ids")
    _sample(asked, body.get("sampling_params"), tokenizer)
    _meet(message, body)


def _drop(name: str, value: object, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """A value that asks for nothing. 0 is not false, nor 1 true."""
    if name not in neutral:
        raise CannotCarry(name, "is not known here, and gRPC carries no fields that are not")
    if not any(type(value) is type(one) and value == one for one in neutral[name]):
        raise CannotCarry(name, "cannot be carried over gRPC")


def _take_ids(asked: Asked, name: str, value: object) -> None:
    asked.message.input_ids.extend(ids(name, value))


def _take_text(asked: Asked, name: str, value: object) -> None:
    asked.text = string(name, value)


def _take_prompt_ids(asked: Asked, name: str, value: object) -> None:
    asked.prompt_ids = boolean(name, value)


def _take_hints(asked: Asked, name: str, value: object) -> None:
    try:
        given = msgspec.convert(value, _Hints, strict=True)
    except msgspec.ValidationError as exc:
        raise CannotCarry(name, str(exc)) from None
    asked.message.kv_hints.protocol_version = given.protocol_version
    asked.message.kv_hints.message_id = given.message_id
    for action in given.actions:
        made = asked.message.kv_hints.actions.add(
            action_id=action.action_id, action_type=action.action_type, action_version=action.action_version
        )
        _check_struct(f"{name}.payload", action.payload)
        made.payload.update(action.payload)


class _Action(msgspec.Struct, forbid_unknown_fields=True):
    action_id: str = ""
    action_type: str = ""
    action_version: str = ""
    payload: dict[str, Any] = {}


class _Hints(msgspec.Struct, forbid_unknown_fields=True):
    protocol_version: str = ""
    message_id: str = ""
    actions: list[_Action] = []


def _check_struct(name: str, value: object, depth: int = 0) -> None:
    """Numbers of a `Struct` are doubles, and a whole one arrives as an integer."""
    if depth > _MAX_DEPTH:
        raise CannotCarry(name, f"is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_struct(name, one, depth + 1)
    elif isinstance(value, float) and value.is_integer():
        raise CannotCarry(name, f"{value} would arrive as an integer")
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        raise CannotCarry(name, f"{value} would arrive as another number")


_SPECIAL: dict[str, Callable[[Asked, str, object], None]] = {
    "input_ids": _take_ids,
    "text": _take_text,
    "return_prompt_token_ids": _take_prompt_ids,
    "kv_hints": _take_hints,
    "data_parallel_rank": lambda asked, name, value: None,
}


def _sample(asked: Asked, given: object, tokenizer: bool) -> None:
    if given is None:
        return
    if not isinstance(given, dict):
        raise CannotCarry("sampling_params", "must be an object; gRPC carries one request, no batch")
    params = asked.message.sampling_params
    params.SetInParent()
    guided = ""
    for name, value in given.items():
        if value is None:
            if name in NO_NULLS:
                raise CannotCarry(name, NO_NULLS[name])
            if name in NULLS:
                setattr(params, SAMPLING[name][0], NULLS[name])
        elif name in SAMPLING:
            field, check = SAMPLING[name]
            checked = check(name, value)
            if isinstance(checked, list):
                getattr(params, field).extend(checked)
            else:
                setattr(params, field, checked)
        elif name in GUIDED:
            guided = _guide(params.guided_decoding, name, value, guided)
        elif name in ABOUT_TEXT and not tokenizer:
            boolean(name, value)
        elif name in HINTS:
            asked.interval = max(integer(name, value), 0)
        else:
            _drop(name, value, NEUTRAL_SAMPLING)
    asked.samples = max(params.n, 1)
    if asked.samples > 1 and asked.message.stream:
        raise CannotCarry("n", "in a stream over gRPC nobody says which of several answers a token belongs to")


def _guide(guided: pb.GuidedDecoding, name: str, value: object, other: str) -> str:
    """Set a constraint; gives the name of the one that is set."""
    if value in ("", []):
        return other
    if other:
        raise CannotCarry(name, f"only one constraint can be set, and there is {other}")
    if name == "choice":
        guided.choice.values.extend(strings(name, value))
    else:
        setattr(guided, name, string(name, value))
    return name


def _meet(message: pb.GenerateRequest, body: Mapping[str, object]) -> None:
    """Where the legs of a pair meet: all of it, or nothing."""
    given = {name: body[name] for name in _BOOTSTRAP if body.get(name) is not None}
    if not given:
        return
    for name in _BOOTSTRAP:
        if name not in given:
            raise CannotCarry(name, f"must be given: over gRPC {', '.join(given)} cannot be alone")
    meeting = message.disaggregated_params
    meeting.bootstrap_host = string("bootstrap_host", given["bootstrap_host"])
    meeting.bootstrap_port = int32("bootstrap_port", given["bootstrap_port"])
    meeting.bootstrap_room = int64("bootstrap_room", given["bootstrap_room"])
