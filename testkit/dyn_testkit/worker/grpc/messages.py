"""SGLang's own translation: protobuf requests to the bodies that its HTTP would have got, values to messages.

As its Rust server does it (SGLang 0.5.23, strings and behaviour of its binary): what a request leaves out is left to
the engine, but for a few fields that are always given; `meta_info` is a map of JSON texts, whose order on the wire
means nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from random import Random
from typing import Any

from google.protobuf.message import Message

from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.status import Code
from dyn_testkit.grpc import Status

#: protobuf name -> the body's name; the rest are the same.
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "ignore_eos": "ignore_eos",
    "n": "n",
    "seed": "sampling_seed",
}
#: Given to the engine in any case.
_ALWAYS = {"stream": False, "return_logprob": False, "top_logprobs_num": 0, "logprob_start_len": -1}
_IF_GIVEN = (
    "lora_path",
    "routing_key",
    "routed_dp_rank",
    "session_id",
    "priority",
    "require_reasoning",
    "max_thinking_tokens",
)
_MEDIA = ("image_data", "video_data", "audio_data")
#: Characters that mean something in a regular expression.
_SPECIAL = re.compile(r"[.+*?^$()\[\]{}|\\]")


def body_of(request: pb.GenerateRequest | pb.TextGenerateRequest, rid: str) -> dict[str, Any]:
    """The body of `/generate` that a request means. Raises `Status` (INVALID_ARGUMENT)."""
    body: dict[str, Any] = {"rid": rid}
    if isinstance(request, pb.TextGenerateRequest):
        body["text"] = request.text
    else:
        body["input_ids"] = list(request.input_ids)
    body["sampling_params"] = _sampling(request.sampling_params) if request.HasField("sampling_params") else {}
    body |= {name: _given(request, name, default) for name, default in _ALWAYS.items()}
    if isinstance(request, pb.TextGenerateRequest):
        body["return_text_in_logprobs"] = _given(request, "return_text_in_logprobs", False)
    body |= {name: getattr(request, name) for name in _IF_GIVEN if request.HasField(name)}
    if request.HasField("disaggregated_params"):
        pair = request.disaggregated_params
        body["bootstrap_host"] = pair.bootstrap_host
        body["bootstrap_port"] = pair.bootstrap_port
        body["bootstrap_room"] = pair.bootstrap_room
    if request.trace_headers:
        body["external_trace_header"] = dict(request.trace_headers)
    if isinstance(request, pb.GenerateRequest):
        body |= {name: list(getattr(request, name)) for name in _MEDIA if getattr(request, name)}
    return body


def _given(message: Message, name: str, default: Any) -> Any:
    return getattr(message, name) if message.HasField(name) else default


def _sampling(params: pb.SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {key: getattr(params, name) for name, key in _SAMPLING.items() if params.HasField(name)}
    body |= {name: list(getattr(params, name)) for name in ("stop", "stop_token_ids") if getattr(params, name)}
    legacy = {name: getattr(params, name) for name in ("json_schema", "regex") if params.HasField(name)}
    if params.HasField("guided_decoding"):
        if legacy:
            raise _wrong("legacy json_schema/regex cannot be combined with guided_decoding")
        return body | _guided(params.guided_decoding)
    for name, value in legacy.items():
        if not value:
            raise _wrong(f"legacy {name} must not be empty")
    return body | legacy


def _guided(guided: pb.GuidedDecoding) -> dict[str, str]:
    kind = guided.WhichOneof("constraint")
    if kind is None:
        raise _wrong("guided decoding constraint must be specified")
    if kind == "choice":
        values = list(guided.choice.values)
        if not all(values) or not values:
            raise _wrong("guided choice must contain only non-empty values")
        return {"regex": "(?:" + "|".join(_SPECIAL.sub(r"\\\g<0>", value) for value in values) + ")"}
    value: str = getattr(guided, kind)
    if not value:
        raise _wrong("guided decoding constraint must not be empty")
    return {kind: value}


def _wrong(message: str) -> Status:
    return Status(Code.INVALID_ARGUMENT, message)


def spell(
    value: Mapping[str, Any], kind: type[pb.GenerateResponse | pb.TextGenerateResponse], *, finished: bool, text: bool
) -> bytes:
    """One message of an answer; `text`: with its text, which a text answer has in any case.

    The map's order is by chance, the same chance for the same value.
    """
    pieces: list[Message] = []
    if kind is pb.GenerateResponse:
        pieces.append(pb.GenerateResponse(output_ids=value.get("output_ids", ())))
    else:
        pieces.append(pb.TextGenerateResponse(text=value.get("text", "")))
    entries = [(name, json.dumps(item)) for name, item in value.get("meta_info", {}).items()]
    Random(repr(entries)).shuffle(entries)
    # Messages written one after the other are one message with all their fields.
    pieces += [kind(meta_info={name: item}) for name, item in entries]
    pieces.append(kind(finished=finished))
    if text and kind is pb.GenerateResponse and "text" in value:
        pieces.append(pb.GenerateResponse(text=value["text"]))
    return b"".join(piece.SerializeToString() for piece in pieces)
