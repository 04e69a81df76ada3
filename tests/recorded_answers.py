"""Uninterrupted answers as SGLang 0.5.23 spells them, small, in each mode, for corrupting."""

from __future__ import annotations

import copy
import json
from typing import Any

from dyn_testkit.history import Record

PROMPT = [5, 6, 7]
IDS = [41, 42, 43, 44]
MODES = ("unary", "cumulative", "incremental", "mixed")


def row(position: int, token: int) -> list[Any]:
    return [-0.5 - position / 7, token, None]


def top(position: int, token: int) -> list[list[Any]]:
    return [row(position, token), [-3.0 - position / 7, 900 + position, None]]


def event(mode: str, low: int, high: int) -> dict[str, Any]:
    """What an engine says when tokens [low, high) are new."""
    ids_from = low if mode in ("incremental", "mixed") else 0
    rows_from = low if mode == "incremental" else 0
    last = high == len(IDS)
    meta: dict[str, Any] = {
        "id": "own",
        "finish_reason": {"type": "length", "length": len(IDS)} if last else None,
        "prompt_tokens": len(PROMPT),
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": [[None, PROMPT[0], None], [-2.5, PROMPT[1], None], [-1.25, PROMPT[2], None]],
        "output_token_logprobs": [row(i, IDS[i]) for i in range(rows_from, high)],
        "output_token_logprobs_length": high,
        "input_top_logprobs": [None, top(8, PROMPT[1]), top(9, PROMPT[2])],
        "output_top_logprobs": [top(i, IDS[i]) for i in range(rows_from, high)],
        "reasoning_tokens": 0,
        "completion_tokens": high,
        "cached_tokens": 0,
    }
    if last:
        meta |= {
            "weight_versions": [{"version": "default", "start": 0, "end": high}],
            "e2e_latency": 0.25,
            "routed_experts": "AAAAAAEAAAA=",
        }
    return {"output_ids": IDS[ids_from:high], "meta_info": meta, "prompt_token_ids": PROMPT}


def events(mode: str) -> list[dict[str, Any]]:
    """All events of an answer; a unary one is a single one."""
    if mode == "unary":
        return [event(mode, 0, len(IDS))]
    return [event(mode, low, high) for low, high in ((0, 1), (1, 2), (2, 4))]


def record(mode: str, said: list[dict[str, Any]] | None = None, **changes: Any) -> Record:
    """The record of a client that was told `said` (default: the uninterrupted answer)."""
    texts = [json.dumps(each) for each in copy.deepcopy(said if said is not None else events(mode))]
    streaming = mode != "unary"
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": len(IDS), "temperature": 0},
        "return_logprob": True,
        "rid": "own",
        "stream": streaming,
    }
    made: dict[str, Any] = {
        "key": mode,
        "body": body,
        "status": 200,
        "headers": {
            "content-type": "text/event-stream; charset=utf-8" if streaming else "application/json",
            "x-dyn-relay-migratable": "yes",
        },
        "events": texts if streaming else [],
        "done": streaming,
        "text": "" if streaming else texts[0],
    }
    return Record(**{**made, **changes})
