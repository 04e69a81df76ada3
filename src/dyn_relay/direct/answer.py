"""A message of `Generate` as the event, or unary answer, that SGLang's HTTP server makes of the same.

`meta_info` is a map on the wire: its order is lost, and its values are JSON text as Python spells it. Here they are put
into stock's order (0.5.23, `tokenizer_manager.py`) and spelled as its HTTP server does, compact and in UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Raw

from dyn_relay.grpc import sglang_pb2 as pb

#: Those that are there come in this order; then all others, by name.
_ORDER = (
    "id",
    "finish_reason",
    "prompt_tokens",
    "weight_version",
    "num_retractions",
    "input_token_logprobs",
    "output_token_logprobs",
    "output_token_logprobs_length",
    "input_top_logprobs",
    "output_top_logprobs",
    "input_token_ids_logprobs",
    "output_token_ids_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
    "output_token_sampling_mask_length",
    "reasoning_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_versions",
    "cached_tokens_details",
    "image_tokens",
    "audio_tokens",
    "video_tokens",
    "hidden_states",
    "routed_experts",
    "indexer_topk",
    "beam_results",
    "sequence_score",
    "dp_rank",
    "e2e_latency",
    "response_sent_to_client_ts",
    "storage_prefetch_wait",
    "storage_staging_wait",
    "forward_entry_time",
    "prefill_finished_time",
    "queue_time",
    "request_received_ts",
    "first_token_latency",
    "api_server_dispatch_finish_ts",
    "request_finished_ts",
    "decode_throughput",
    "spec_accept_rate",
    "spec_accept_length",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_verify_ct",
    "spec_cap_length",
    "spec_block_accept_length",
    "spec_correct_drafts_histogram",
    "spec_cap_lens_histogram",
)
_PLACE = {name: place for place, name in enumerate(_ORDER)}
#: An aborted request that had not begun has these alone, in this order.
_ECHO_ORDER = ("id", "finish_reason", "weight_version", "e2e_latency", "weight_versions")
_LOGPROBS = ("input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length")
_ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
_ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}
#: What is a delta, of an incremental stream.
ROWS = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)
#: Values that are spelled alike everywhere.
_PLAIN = frozenset(b"0123456789")


class NotAnAnswer(ValueError):
    """A message that is none of `Generate`'s: its `meta_info` is no JSON."""


def spelled(text: str) -> Raw:
    """JSON as Python's `json` spells it, as orjson would; NaN and the infinities are null. Raises `NotAnAnswer`."""
    if text == "null" or (text and _PLAIN.issuperset(text.encode())):
        return Raw(text.encode())
    try:
        return Raw(msgspec.json.encode(msgspec.json.decode(text)))
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return Raw(msgspec.json.encode(json.loads(text)))
    except (ValueError, RecursionError) as exc:
        raise NotAnAnswer(f"meta_info has {text[:40]!r}, which is no JSON") from exc


def finished(message: pb.GenerateResponse) -> bool:
    """The last message of one answer."""
    return message.meta_info.get("finish_reason", "null") != "null"


def told_as_deltas(message: pb.GenerateResponse) -> bool:
    """It has fewer ids than the answer has tokens so far, or does not say: the others were told before."""
    total = message.meta_info.get("completion_tokens", "")
    return not total.isdecimal() or len(message.output_ids) < int(total)


def render(message: pb.GenerateResponse, prompt_ids: Raw | None, seconds: float) -> bytes:
    """The JSON of a message. `prompt_ids`: if each event is to say them. `seconds`: since the request came.

    The engine's own `e2e_latency` over gRPC is the difference of two clocks (0.5.23), so ours takes its place.
    Raises `NotAnAnswer`.
    """
    meta = {name: spelled(text) for name, text in message.meta_info.items()}
    if "e2e_latency" in meta:
        meta["e2e_latency"] = Raw(msgspec.json.encode(seconds))
    return _written(message, list(message.output_ids), _in_order(meta), prompt_ids)


def aborted(
    last: pb.GenerateResponse | None, rid: str, prompt_ids: Raw | None, *, incremental: bool, logprobs: bool
) -> bytes:
    """The event that ends an answer which was aborted after the message `last`; over gRPC the engine says nothing.

    It has the tokens of `last`, since it is not known whether there were more. Raises `NotAnAnswer`.
    """
    if last is None:
        lists: Mapping[str, object] = {name: 0 if name.endswith("length") else [] for name in _LOGPROBS}
        echo: dict[str, object] = {"id": rid, "finish_reason": _ABORTED_WAITING, **(lists if logprobs else {})}
        value: dict[str, object] = {"text": "", "output_ids": [], "meta_info": {**echo, "completion_tokens": 0}}
        return msgspec.json.encode(value if prompt_ids is None else {**value, "prompt_token_ids": prompt_ids})
    meta = {name: spelled(text) for name, text in last.meta_info.items()}
    meta["finish_reason"] = Raw(msgspec.json.encode(_ABORTED))
    if not incremental:
        return _written(last, list(last.output_ids), _in_order(meta), prompt_ids)
    meta |= {name: Raw(b"[]") for name in ROWS if name in meta}
    nothing = pb.GenerateResponse(text="") if last.HasField("text") else pb.GenerateResponse()
    return _written(nothing, [], _in_order(meta), prompt_ids)


def _written(
    message: pb.GenerateResponse, ids: Sequence[int], meta: Mapping[str, Raw], prompt_ids: Raw | None
) -> bytes:
    value: dict[str, object] = {"text": message.text} if message.HasField("text") else {}
    value |= {"output_ids": ids, "meta_info": meta}
    if prompt_ids is not None:
        value["prompt_token_ids"] = prompt_ids
    return msgspec.json.encode(value)


def _in_order(meta: Mapping[str, Raw]) -> dict[str, Raw]:
    if "prompt_tokens" not in meta:  # the echo of one that never ran
        named = [name for name in _ECHO_ORDER if name in meta]
        rest = sorted(meta.keys() - set(named), key=lambda name: (_PLACE.get(name, len(_PLACE)), name))
        return {name: meta[name] for name in (*named, *rest)}
    return {name: meta[name] for name in sorted(meta, key=lambda name: (_PLACE.get(name, len(_PLACE)), name))}
