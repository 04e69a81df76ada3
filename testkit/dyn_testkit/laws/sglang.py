"""SGLang's native `/generate`, as the laws about tokens see it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dyn_testkit.client import Response
from dyn_testkit.engine import DEFAULT_MAX_NEW_TOKENS
from dyn_testkit.laws.answers import ended, parsed, skim
from dyn_testkit.laws.wire import Reading
from dyn_testkit.tokenizer import PLAIN, Tokenizer

#: What a continuation may say differently from the client.
_OURS = {"rid", "stream", "input_ids", "sampling_params", "logprob_start_len", "text", "kv_hints", "routed_dp_rank"}
_OURS_IN_SAMPLING = {"max_new_tokens", "min_new_tokens", "stream_interval"}


class SGLang:
    """Implements `Wire`."""

    def __init__(self, tokenizer: Tokenizer = PLAIN) -> None:
        """`tokenizer`: the workers', for prompts that are texts."""
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return "SGLANG"

    def prompt(self, body: bytes) -> list[int]:
        value = json.loads(body)
        ids: list[int] | None = value.get("input_ids")
        return [*self._tokenizer.prefix, *self._tokenizer.encode(value["text"])] if ids is None else ids

    def budget(self, body: bytes) -> int:
        sampling = json.loads(body).get("sampling_params") or {}
        most: int = sampling.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        return most

    def own(self, body: bytes) -> Mapping[str, Any]:
        """Fields by name, `sampling_params.` before those that are there; a field that is null is not there."""
        value = json.loads(body)
        found = {name: item for name, item in value.items() if name not in _OURS}
        sampling = value.get("sampling_params") or {}
        found |= {f"sampling_params.{name}": item for name, item in sampling.items() if name not in _OURS_IN_SAMPLING}
        return {name: item for name, item in found.items() if item is not None}

    def read(self, response: Response) -> Reading:
        if response.status != 200:
            return Reading(error=response.status)
        if not (response.header("content-type") or "").startswith("text/event-stream"):
            values, tokens = [parsed(response.body)], None
        else:
            values = [parsed(data) for data in response.events() if data != b"[DONE]"]
            shown, finished = skim(response.body)
            tokens = shown if finished is None else finished
        said = [value for value in values if isinstance(value, dict)]
        ends = [end for value in said if (end := ended(value)) is not None]
        errors = [value["error"] for value in said if "error" in value]
        errors += [end for end in ends if end["type"] == "abort"]
        finish = next((end for end in reversed(ends) if end["type"] != "abort"), None)
        if tokens is None:
            tokens = said[0].get("output_ids") or [] if said else []
            closed = True
        else:
            closed = response.events()[-1:] == [b"[DONE]"]
        whole = response.complete and closed and finish is not None and not errors
        return Reading(tokens, finish, errors[0] if errors else None, whole)


#: The spelling of every case that names no other.
SGLANG = SGLang()


class OverGrpc(SGLang):
    """The same where engines are reached over gRPC: what they are sent says less, and some defaults in full."""

    def own(self, body: bytes) -> Mapping[str, Any]:
        """As `SGLang.own`, without what asks for nothing, and what the engine is not told since the gateway does it."""
        found = super().own(body).items()
        return {name: item for name, item in found if name not in _DONE_BEFORE and item not in ([], _NEUTRAL.get(name))}


_DONE_BEFORE = {"return_prompt_token_ids"}
#: What the gRPC side of an engine adds.
_NEUTRAL: dict[str, object] = {"return_logprob": False, "top_logprobs_num": 0}

OVER_GRPC = OverGrpc()
