"""Requests that cannot be continued: served, named, and loud when their worker dies. And everything else: bridged."""

from __future__ import annotations

import json

import pytest

from dyn_relay.formats.sglang.admission import TABLE
from dyn_testkit import faults
from dyn_testkit.engine import Model
from dyn_testkit.faults import CLOSE, KILL_WORKER, FaultPlan, at_token, every, inside_json
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import generate
from tests.relay.harness import world
from tests.relay.odd import scripted

#: reason -> what makes a request unmigratable for that reason, and what its worker needs to take it.
ROWS: dict[str, dict[str, object]] = {
    "frequency_penalty": {"sampling_params": {"frequency_penalty": 0.5}},
    "presence_penalty": {"sampling_params": {"presence_penalty": 0.5}},
    "repetition_penalty": {"sampling_params": {"repetition_penalty": 1.3}},
    "json_schema": {"sampling_params": {"json_schema": '{"type":"object"}'}},
    "regex": {"sampling_params": {"regex": "[a-z]+"}},
    "ebnf": {"sampling_params": {"ebnf": 'root ::= "a"'}},
    "structural_tag": {"sampling_params": {"structural_tag": "{}"}},
    "stop": {"sampling_params": {"stop": ["x" * 300]}},
    "stop_regex": {"sampling_params": {"stop_regex": "x+"}},
    "n": {"sampling_params": {"n": 2}},
    "max_new_tokens": {"sampling_params": {"max_new_tokens": None}},
    "batch": {"input_ids": [[5, 6], [7, 8]]},
    "custom_logit_processor": {"custom_logit_processor": "{}"},
    "session_params": {"session_params": {"id": "s"}},
    "return_hidden_states": {"return_hidden_states": True},
    "require_reasoning": {"require_reasoning": True},
    "bootstrap_room": {"bootstrap_room": 5},
    "image_data": {"image_data": "aGk="},
    "video_data": {"video_data": "aGk="},
    "audio_data": {"audio_data": "aGk="},
    "input_embeds": {"input_embeds": [[0.5]]},
    "positional_embed_overrides": {"positional_embed_overrides": [1]},
    "multi_item_delimiter_indices": {"multi_item_delimiter_indices": [1]},
    "token_indices_to_pool": {"token_indices_to_pool": [1]},
    "need_wait_for_mm_inputs": {"need_wait_for_mm_inputs": True},
    "num_items_assigned": {"num_items_assigned": {"image": [1]}},
    "encoder_urls": {"encoder_urls": ["http://e"]},
    "lora_id": {"lora_id": "1f"},
    "http_worker_ipc": {"http_worker_ipc": "ipc://x"},
    "max_thinking_tokens": {"max_thinking_tokens": 5},
    "return_flat_raw_output_top_logprobs": {"return_flat_raw_output_top_logprobs": True},
    "watermark": {"watermark": True},
    "bootstrap_host": {"bootstrap_host": "h"},
    "bootstrap_port": {"bootstrap_port": 1},
    "bootstrap_pair_key": {"bootstrap_pair_key": "k"},
    "decode_tp_size": {"decode_tp_size": 2},
    "disagg_prefill_dp_rank": {"disagg_prefill_dp_rank": 1},
    "beam_width": {"sampling_params": {"beam_width": 2}},
    "choice": {"sampling_params": {"choice": ["a", "b"]}},
    "custom_params": {"sampling_params": {"custom_params": {"a": 1}}},
}


def body(reason: str, stream: bool) -> dict[str, object]:
    extra = dict(ROWS[reason])
    sampling = {"max_new_tokens": 8, "ignore_eos": True, **extra.pop("sampling_params", {})}
    return {"input_ids": [5, 6, 7], "stream": stream, "sampling_params": sampling, **extra}


@pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
@pytest.mark.parametrize("reason", ROWS)
async def test_each_row_is_served_named_and_loud(autojump_clock, reason, stream):
    """E6, E14, C9, N2, N6: the header names the field; a kill is a loud failure and no second call is made."""
    request = body(reason, stream)
    short = WorkerOptions(model=Model(context_length=64))
    async with world(options=short, policy="round_robin") as w:
        direct = await w.ask(request)
        assert direct.header("x-dyn-relay-migratable") == f"no; reason={reason}"
        assert direct.complete
        assert [json.loads(worker.generates[0].request.body) for worker in w.workers if worker.generates] == [request]
        await w.quiet()
        assert w.metric(f'dyn_relay_refusals_total{{reason="{reason}"}}') == 1
    plan = FaultPlan.of(faults.Fault(at_token(0 if not stream else 2), CLOSE, every))
    async with world(plans=[plan, plan], options=short, upstream_pool_idle_timeout_secs=0) as w:
        response = await w.ask(request)
        if not plan.count():
            # The engine refused the request before the fault's place: its own error went to the client.
            assert direct.status == response.status
            refused = (b'"error"', b'"abort"', b"Internal Server Error")
            assert direct.status == 400 or any(word in response.body for word in refused)
            return
        assert sum(len(worker.generates) for worker in w.workers) == 1
        if stream:
            assert not response.complete
            assert b"[DONE]" not in response.events()
            assert response.values()[-1]["error"]["reason"] == reason
        else:
            assert (response.status, response.json()["reason"]) == (502, reason)


#: Rows of bodies that cannot be read, or not judged: passed on as they are, so that the engine gives its own 400.
UNREADABLE = {
    *("content-encoding", "content-type", "body", "stream", "return_prompt_token_ids", "rid"),
    *("sampling_params", "input_ids"),
    *("min_new_tokens", "stop_token_ids", "ignore_eos", "stream_interval"),
}


def test_every_admission_row_is_tried_here():
    """The table and this file speak of the same reasons; `text` has its own test."""
    assert {row.field for row in TABLE} == set(ROWS) | UNREADABLE | {"text"}


@pytest.mark.parametrize(
    "neutral",
    [
        {"frequency_penalty": 0.0},
        {"presence_penalty": 0},
        {"repetition_penalty": 1.0},
        {"n": 1},
        {"stop": None},
        {"stop": []},
        {"json_schema": None},
        {"regex": ""},
        {"stop_token_ids": None},
    ],
)
async def test_neutral_values_do_not_refuse(autojump_clock, neutral):
    """AReaL always sends frequency_penalty 0.0: admission looks at values, not at presence."""
    async with world() as w:
        response = await w.ask(generate(sampling=neutral))
        assert response.header("x-dyn-relay-migratable") == "yes"


async def test_bridge(autojump_clock):
    """Other paths: the worker's own answer, unprotected, and the header says so."""
    async with world() as w:
        response = await w.ask(None, "/model_info")
        assert response.json()["model_path"] == "mock/model"
        assert response.header("x-dyn-relay-migratable") == "no; reason=path"
        response = await w.ask(None, "/v1/models?x=1")
        assert response.json()["object"] == "list"
        assert (await w.ask(None, "/nowhere")).json() == {"detail": "Not Found"}
        response = await w.ask(None, "/v1/models", method="HEAD")
        assert (response.status, response.body) == (405, b"")
        assert (await w.ask(None, "/generate")).status == 405
        trailing = await w.ask(generate(stream=False), "/generate/")
        assert trailing.status == 200
        put = await w.ask(generate(stream=False), "/generate", method="PUT")
        assert put.status == 200
        await w.quiet()
        assert [worker.in_flight for worker in w.app.fleet.workers] == [0, 0]


async def test_a_chat_completion_is_not_imitated(autojump_clock):
    """C8: its worker dies in mid-stream: the client's stream breaks, nobody splices."""
    cut = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n"
    async with world(plans=[]) as w:
        odd = await scripted(w, cut)
        other = await scripted(w, cut, "odd2")
        response = await w.ask({"messages": []}, "/v1/chat/completions")
        assert response.status == 200
        assert response.body == b"data:"
        assert not response.complete
        assert len(odd.heads) + len(other.heads) == 1


async def test_a_bridged_answer_keeps_its_coding_and_headers(autojump_clock):
    """L4: content-encoding stays with its bytes, hop-by-hop headers go, numbers are not re-rendered."""
    payload = b"\x1f\x8b-not-really-gzip"
    answer = (
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\nconnection: x-hop\r\nx-hop: 1\r\nx-kept: 2\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(payload), payload)
    )
    async with world(plans=[]) as w:
        odd = await scripted(w, answer)
        response = await w.ask({"a": 1}, "/v1/completions", headers={"accept-encoding": "gzip", "te": "trailers"})
        assert response.body == payload
        assert response.header("content-encoding") == "gzip"
        assert response.header("x-hop") is None
        assert response.header("x-kept") == "2"
        assert b"accept-encoding: gzip\r\n" in odd.heads[0]
        assert b"\r\nte:" not in odd.heads[0]
        await w.ask({"a": 1}, "/v1/completions")
        assert b"accept-encoding: identity\r\n" in odd.heads[1]


async def test_credentials(autojump_clock):
    """L1: the client's key is for the proxy; the worker gets its own, and exactly one, on every attempt."""
    options = WorkerOptions(api_key="worker-key")
    plan = FaultPlan.in_order([(at_token(2), KILL_WORKER)])
    async with world(
        plans=[plan, None], options=options, policy="round_robin", api_key="client-key", worker_api_key="worker-key"
    ) as w:
        refused = await w.ask(generate())
        assert (refused.status, refused.json()) == (401, {"error": "Unauthorized"})
        response = await w.ask(generate(), headers={"authorization": "Bearer client-key"})
        assert response.complete
        for worker in w.workers:
            for recorded in worker.requests:
                keys = [value for name, value in recorded.request.headers if name == b"authorization"]
                assert keys == [b"Bearer worker-key"], recorded.path
        assert (await w.ask(None, "/health")).status == 200
        assert (await w.ask(None, "/metrics")).status == 200
        assert (await w.ask(None, "/workers")).status == 401


async def test_no_credentials_travel_by_default(autojump_clock):
    """L1."""
    async with world() as w:
        await w.ask(generate(), headers={"authorization": "Bearer secret", "x-request-id": "7"})
        [recorded] = [recorded for worker in w.workers for recorded in worker.generates]
        names = [name for name, _ in recorded.request.headers]
        assert b"authorization" not in names
        assert b"x-request-id" in names
    async with world(forward_authorization=True) as w:
        await w.ask(generate(), headers={"authorization": "Bearer secret"})
        [recorded] = [recorded for worker in w.workers for recorded in worker.generates]
        assert (b"authorization", b"Bearer secret") in recorded.request.headers


async def test_admin_key(autojump_clock):
    async with world(api_key="user", admin_api_key="admin") as w:
        as_user, as_admin = ({"authorization": f"bearer {key}"} for key in ("user", "admin"))
        assert (await w.ask({"rid": "x"}, "/abort_request", headers=as_user)).status == 401
        assert (await w.ask({"rid": "x"}, "/abort_request", headers=as_admin)).status == 200
        assert (await w.ask(generate(), headers=as_user)).status == 200


async def test_non_json_is_passed_on_as_it_is(autojump_clock):
    """The engine gives its own errors: malformed JSON, another media type."""
    async with world() as w:
        response = await w.ask(b'{"input_ids": [1,2')
        assert response.status == 400
        assert response.header("x-dyn-relay-migratable") == "no; reason=body"
        response = await w.ask(json.dumps(generate()).encode(), headers={"content-type": "text/plain"})
        assert response.status == 400
        assert response.header("x-dyn-relay-migratable") == "no; reason=content-type"


async def test_payload_limit(autojump_clock):
    """J2: 413 with the limit in it, and no worker is asked."""
    async with world(max_payload_size=1000) as w:
        response = await w.ask(b"x" * 1001)
        assert response.status == 413
        assert "1000" in response.json()["message"]
        assert [worker.generates for worker in w.workers] == [[], []]


@pytest.mark.parametrize("byte", range(0, 400, 3))
async def test_a_sized_answer_that_is_cut_stays_cut(autojump_clock, byte):
    """Nothing is added to a body whose length was told: it might become complete by it."""
    plan = FaultPlan.of(faults.Fault(inside_json(1, byte), CLOSE, every))
    async with world(plans=[plan], policy="round_robin") as w:
        response = await w.ask(body("frequency_penalty", False))
        plan.verify()
        assert not response.complete or response.status == 502
