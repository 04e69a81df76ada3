"""Text of engines that are not what one expects, and of requests that are not continued."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dyn_testkit.client import fetch
from dyn_testkit.detokenizer import Detokenizer
from tests.relay.harness import judged, world
from tests.relay.test_texts import WITH, both, plain_request, recital, stopped

REFUSED = {
    "frequency_penalty": {"sampling_params": {"max_new_tokens": 3, "frequency_penalty": 0.5}},
    "max_new_tokens": {"sampling_params": {"max_new_tokens": None, "stop_token_ids": list(range(41))}},
    "session_params": {"session_params": {}},
    "n": {"sampling_params": {"max_new_tokens": 3, "n": 2}},
    "return_prompt_token_ids": {"return_prompt_token_ids": None},
}


@both
@pytest.mark.parametrize("field", [*REFUSED, "migration_limit"])
async def test_a_text_as_prompt_that_is_not_continued(autojump_clock, stream, field):
    """The worker's own answer, or its own error, whole."""
    body = plain_request(stream, rid="mine") | REFUSED.get(field, {})
    config = {} if field in REFUSED else {"migration_limit": 0}
    async with world(plans=[None], options=replace(WITH, radix_cache=False), **config) as w:
        response = await w.ask(body)
        direct = await fetch(w.network, w.workers[0].url, "/generate", body | {"rid": "other"})
        assert response.header("x-dyn-relay-migratable") == f"no; reason={field}"
        assert response.status == direct.status
        assert texts_of(response) == texts_of(direct)
        assert w.workers[0].generates[0].json() == body


def texts_of(response):
    streamed = response.header("content-type").startswith("text/event-stream")
    values = response.values() if streamed else response.json()
    return [one.get("text", one) for one in (values if isinstance(values, list) else [values])]


@both
async def test_a_token_that_ends_a_tool_call_is_told(autojump_clock, monkeypatch, stream):
    """SGLang 0.5.23 trims a matched stop token, but not one that its tool-call parser needs (`trim_matched_stop`)."""
    monkeypatch.setattr(Detokenizer, "_untail", lambda self, ids, finish: ids)
    text = "ab 中é the"
    model, _, count = recital("byte-level", text)
    for cut_at in range(1, count):
        for interval in (1, 9):
            asked = {"stop_token_ids": [model.recites[-1]], "ignore_eos": False, "stream_interval": interval}
            response, body, oracle = await stopped("byte-level", text, cut_at, stream, **asked)
            assert judged(response, body, oracle) == [], (cut_at, interval)
