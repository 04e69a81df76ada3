"""What each field of an answer becomes once the answer has more than one attempt, as a table.

Source: SGLang 0.5.23; the `spec_*` names are those of all releases since 0.4. Recent releases send speculative counters
with the finish only, so those of an attempt that was cut are not known: the counters then describe the attempts that
told theirs, and a ratio is recomputed only if all did.
"""

from __future__ import annotations

import enum

from msgspec import Raw

from dyn_relay.formats.sglang.replay import SWITCHES
from dyn_relay.formats.sglang.wire import Fields, is_list


class Rule(enum.Enum):
    """What a field of `meta_info` becomes once the answer has more than one attempt."""

    NAME = "the client's own rid"
    FIRST = "the first attempt's value; left out if it had none"
    SHIFT = "plus the tokens delivered before this attempt"
    SUM = "summed over the attempts that told it"
    RATIO = "recomputed from its summed parts, if all attempts told them"
    ROWS = "joined, one row a token"
    REASON = "`length` plus the tokens delivered before"
    SPANS = "the earlier attempts' spans, then this one's, shifted"
    MEASURED = "measured here, over all attempts"
    REPLAY = "all rows; those of an earlier attempt's tokens are that one's, if it told them"
    SENT = "kept where an uninterrupted stream would have it"
    LATEST = "this attempt's value"
    UNCONTINUED = "an answer that has it is not continued"


_BY_RULE: dict[Rule, tuple[str, ...]] = {
    Rule.NAME: ("id",),
    Rule.FIRST: (
        "prompt_tokens",
        "cached_tokens",
        "cached_tokens_details",
        "image_tokens",
        "audio_tokens",
        "video_tokens",
        "queue_time",
        "forward_entry_time",
        "prefill_finished_time",
        "storage_prefetch_wait",
        "storage_staging_wait",
    ),
    Rule.SHIFT: (
        "completion_tokens",
        "output_token_logprobs_length",
        "output_token_sampling_length",
        "output_token_sampling_mask_length",
        "output_token_sampling_logprobs_length",
    ),
    Rule.SUM: (
        "num_retractions",
        "reasoning_tokens",
        "spec_num_correct_drafts",
        "spec_num_proposed_drafts",
        "spec_verify_ct",
        "spec_correct_drafts_histogram",
        "spec_cap_lens_histogram",
        "spec_accept_token_num",
        "spec_draft_token_num",
        "spec_accept_histogram",
    ),
    Rule.RATIO: ("spec_accept_rate", "spec_accept_length"),
    Rule.ROWS: (
        "output_token_logprobs",
        "output_top_logprobs",
        "output_token_ids_logprobs",
        "output_token_sampling_mask",
        "output_token_sampling_logprobs",
    ),
    Rule.REASON: ("finish_reason",),
    Rule.SPANS: ("weight_versions",),
    Rule.MEASURED: (
        "e2e_latency",
        "first_token_latency",
        "decode_throughput",
        "request_received_ts",
        "api_server_dispatch_finish_ts",
    ),
    Rule.REPLAY: tuple(SWITCHES),
    Rule.SENT: ("response_sent_to_client_ts",),
    Rule.LATEST: (
        "weight_version",
        "dp_rank",
        "request_finished_ts",
        "spec_cap_length",
        "spec_block_accept_length",
    ),
    Rule.UNCONTINUED: (
        "hidden_states",
        "beam_results",
        "sequence_score",
        "output_top_logprobs_val_flat",
        "output_top_logprobs_idx_flat",
        "output_top_logprobs_shape",
        "output_top_logprobs_null_prefix",
        "output_top_logprobs_val_flat_b64",
        "output_top_logprobs_idx_flat_b64",
        "output_top_logprobs_val_flat_b64_dtype",
        "output_top_logprobs_idx_flat_b64_dtype",
    ),
}

RULES: dict[str, Rule] = {name: rule for rule, names in _BY_RULE.items() for name in names}

#: Whoever has one of these is not continued.
UNCONTINUED = frozenset(_BY_RULE[Rule.UNCONTINUED])

#: A ratio's parts: (numerator, denominator), by release; the first pair of which both are there counts.
RATIOS: dict[str, tuple[tuple[str, str], ...]] = {
    "spec_accept_rate": (
        ("spec_num_correct_drafts", "spec_num_proposed_drafts"),
        ("spec_accept_token_num", "spec_draft_token_num"),
    ),
    "spec_accept_length": (("completion_tokens", "spec_verify_ct"),),
}

IDS = "output_ids"

#: What becomes of the fields around `meta_info`, once the answer has more than one attempt.
ANSWER: dict[str, str] = {
    "text": "what was told, then what the ids around the cut add to it; a delta where the client's are deltas",
    IDS: "joined, one a token; a delta where the client's are deltas",
    "meta_info": "field by field, see below",
    "prompt_token_ids": "the first attempt's; left out if only the proxy asked for it",
    "index": "only in answers that are not continued (`batch`, `n`)",
    "error": "the engine's last word on an attempt: survived if another attempt may follow, else relayed as it came",
}
#: The same for the fields of `finish_reason`.
FINISH_REASON: dict[str, str] = {
    "type": "the last attempt's; `length` or `stop` if the finish was lost and nothing was left to generate",
    "matched": "the last attempt's",
    "length": "plus the tokens delivered before",
    "message": "the last attempt's",
    "status_code": "an abort that has one is an error, see `error`; without one it is relayed as the end",
    "err_type": "the last attempt's",
}
#: A key of ours in `meta_info`, only where it is asked for: by field, intervals [start, end) of positions.
RECOMPUTED = "dyn_relay_recomputed_rows"


def rule(name: str) -> Rule | None:
    """The rule for a field; None for one that is not known: joined if it is a list with one element a token."""
    return RULES.get(name) or (Rule.FIRST if name.startswith("input_") else None)


def of_prompt(fields: Fields) -> Fields:
    """Those of `Rule.FIRST`, as values of their own."""
    first = Rule.FIRST
    return {
        name: value.copy()
        for name, value in fields.items()
        if RULES.get(name) is first or (name not in RULES and name.startswith("input_"))
    }


def may_be_rows(name: str, value: Raw) -> bool:
    """May the field hold one element a token (known lists, and unknown ones: SGLang's `customized_info`)?"""
    found = rule(name)
    return (found is Rule.ROWS or found is None) and is_list(value)
