"""Where two answers of one worker to one request differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dyn_testkit.contract.table import number, same, short

#: What must be the same; everything else in an answer is measured, or depends on caches.
SAME = ("text", "output_ids", "prompt_token_ids")
SAME_META = (
    "finish_reason",
    "prompt_tokens",
    "weight_version",
    "reasoning_tokens",
    "completion_tokens",
    "weight_versions",
    "input_token_logprobs",
    "input_top_logprobs",
    "input_token_ids_logprobs",
    "output_token_logprobs",
    "output_token_logprobs_length",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "routed_experts",
)


def differences(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> list[str]:
    """In words, one a field. Numbers that are no integers may differ by `tolerance`."""
    one, other = ({**answer, **answer.get("meta_info", {})} for answer in (one, other))
    found = []
    for name in (*SAME, *SAME_META):
        if (name in one) != (name in other):
            found.append(f"{name} is in one of them only")
        elif not alike(one.get(name), other.get(name), tolerance):
            found.append(f"{name}: {short(one[name], 120)} and {short(other[name], 120)}")
    return found


def alike(one: Any, other: Any, tolerance: float) -> bool:
    """Equal, floats up to the tolerance."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(alike(a, b, tolerance) for a, b in zip(one, other, strict=True))
    if number(one) and number(other) and float in (type(one), type(other)):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    return same(one, other)
