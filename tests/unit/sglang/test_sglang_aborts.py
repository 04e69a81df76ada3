"""Aborts of requests that no worker has, and what the proxy says of its own accord."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang_kit import opened

from dyn_relay.formats.base import End
from dyn_relay.formats.traits import Traits

ASKED: dict[str, Any] = {"rid": "mine", "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5}}
LISTS = ["token", "top", "token_ids"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("version", ["7", None])
@pytest.mark.parametrize("lists", [[], LISTS[:1], LISTS])
def test_an_abort_before_any_worker_has_the_request(stream: bool, version: str | None, lists: list[str]) -> None:
    """Stock tells empty lists of what was asked for, and the weights (0.5.23, `_handle_abort_req`)."""
    more = {"top_logprobs_num": 2, "token_ids_logprob": [5]} if len(lists) > 1 else {"top_logprobs_num": 0}
    body = {**ASKED, "stream": stream, **({"return_logprob": True, **more} if lists else {})}
    exchange = opened(body, Traits(weight_version=version))
    out = exchange.abort(1.0)
    assert out is not None
    assert exchange.end is End.ABORTED
    value = json.loads(out.split(b"\n\n")[0][6:] if stream else exchange.answer(2.0).body)
    meta = value["meta_info"]
    assert (value["text"], value["output_ids"]) == ("", [])
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    found = {name for name in meta if name.endswith("_logprobs")}
    assert found == {f"{side}_{name}_logprobs" for side in ("input", "output") for name in lists}
    assert all(meta[name] == [] for name in found)
    assert meta.get("output_token_logprobs_length") == (0 if lists else None)
    assert meta.get("weight_version") == version
    assert meta.get("weight_versions") == ([{"version": version, "start": 0, "end": 0}] if version else None)


@pytest.mark.parametrize(("reason", "retryable"), [("aborted", False), ("no_survivor", True)])
def test_what_somebody_wished_for_is_not_to_be_tried_again(reason: str, retryable: bool) -> None:
    event = opened({**ASKED, "stream": True}).failure_event(502, reason, "words")
    assert json.loads(event[6:])["error"]["retryable"] is retryable
