"""The admission table: by value, not by presence; one case a row at least."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang_kit import JSON_HEAD, SSE_HEAD, TOLD, Engine, opened, request

from dyn_relay.formats.base import Rejected, Verdict
from dyn_relay.formats.sglang.admission import TABLE, Row, page
from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.sglang.request import Request
from dyn_relay.formats.traits import UNKNOWN, Traits

PLAIN: dict[str, Any] = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}

TOP: list[tuple[str, Any]] = [
    ("stream", "true"),
    ("stream", 1),
    ("stream", None),
    ("return_prompt_token_ids", None),
    ("return_prompt_token_ids", 1),
    ("rid", 7),
    ("rid", ["a"]),
    ("rid", ""),
    ("sampling_params", "x"),
    ("input_embeds", [[0.1]]),
    ("image_data", "b64"),
    ("image_data", ["b64"]),
    ("video_data", ["b64"]),
    ("audio_data", ["b64"]),
    ("positional_embed_overrides", {}),
    ("multi_item_delimiter_indices", [1]),
    ("token_indices_to_pool", [1]),
    ("need_wait_for_mm_inputs", True),
    ("num_items_assigned", {"image": [1]}),
    ("encoder_urls", ["http://e"]),
    ("lora_id", "1f"),
    ("http_worker_ipc", "ipc://x"),
    ("session_params", {"id": "s"}),
    ("custom_logit_processor", "code"),
    ("require_reasoning", True),
    ("max_thinking_tokens", 5),
    ("return_hidden_states", True),
    ("return_hidden_states", [True]),
    ("return_flat_raw_output_top_logprobs", True),
    ("watermark", {"key": 1}),
    ("bootstrap_host", "h"),
    ("bootstrap_port", 8998),
    ("bootstrap_room", 0),
    ("bootstrap_pair_key", "k"),
    ("decode_tp_size", 2),
    ("disagg_prefill_dp_rank", 0),
    ("input_ids", [1.5, 2.0]),
    ("input_ids", "abc"),
    ("input_ids", ["a"]),
    ("input_ids", [True]),
    ("input_ids", None),
]

SAMPLING: list[tuple[str, Any]] = [
    ("n", 2),
    ("n", None),
    ("beam_width", 2),
    ("json_schema", "{}"),
    ("regex", "a*"),
    ("ebnf", "root ::= x"),
    ("structural_tag", "{}"),
    ("choice", ["a"]),
    ("frequency_penalty", 0.5),
    ("frequency_penalty", -1),
    ("presence_penalty", 0.1),
    ("repetition_penalty", 1.1),
    ("repetition_penalty", 0),
    ("stop", "a"),
    ("stop", ["a"]),
    ("stop_regex", "a+"),
    ("custom_params", {"thinking_budget": 3}),
    ("watermark", {"key": 1}),
    ("max_new_tokens", None),
    ("max_new_tokens", -1),
    ("max_new_tokens", "8"),
    ("max_new_tokens", True),
    ("max_new_tokens", 8.0),
    ("min_new_tokens", "1"),
    ("min_new_tokens", True),
    ("stop_token_ids", "1"),
    ("ignore_eos", 1),
    ("stream_interval", 1.5),
]

NEUTRAL_TOP: list[tuple[str, Any]] = [
    ("input_embeds", None),
    ("image_data", None),
    ("image_data", []),
    ("session_params", None),
    ("session_id", "s"),
    ("custom_logit_processor", None),
    ("require_reasoning", False),
    ("max_thinking_tokens", None),
    ("return_hidden_states", False),
    ("return_routed_experts", True),
    ("return_indexer_topk", False),
    ("bootstrap_room", None),
    ("rid", None),
    ("text", "ids win"),
    ("text", None),
    ("lora_path", "a-v1"),
    ("extra_key", "a:v1"),
    ("priority", 3),
    ("kv_hints", {"actions": []}),
    ("unknown", {"any": [1]}),
    ("return_logprob", True),
    ("input_ids", []),
    ("sampling_params", None),
]

NEUTRAL_SAMPLING: list[tuple[str, Any]] = [
    ("frequency_penalty", 0.0),
    ("frequency_penalty", None),
    ("presence_penalty", 0),
    ("repetition_penalty", 1.0),
    ("n", 1),
    ("n", 0),
    ("stop", None),
    ("stop", []),
    ("stop_regex", None),
    ("json_schema", None),
    ("json_schema", ""),
    ("custom_params", None),
    ("custom_params", {}),
    ("beam_width", None),
    ("temperature", 1.3),
    ("sampling_seed", 7),
    ("logit_bias", {"5": 1.0}),
    ("ignore_eos", True),
    ("stop_token_ids", [5]),
    ("stop_token_ids", None),
    ("min_new_tokens", 3),
    ("stream_interval", 4),
]


def verdict(body: object, traits: Traits = UNKNOWN) -> str:
    return opened(body, traits).verdict.reason


def sampling(name: str, value: Any) -> dict[str, Any]:
    return {**PLAIN, "sampling_params": {**PLAIN["sampling_params"], name: value}}


@pytest.mark.parametrize(("name", "value"), TOP)
def test_forbidden_top(name: str, value: Any) -> None:
    """C9, E6, E14, I1."""
    assert verdict({**PLAIN, name: value}) == name


@pytest.mark.parametrize(("name", "value"), SAMPLING)
def test_forbidden_sampling(name: str, value: Any) -> None:
    """C9, E2, E6, N2."""
    assert verdict(sampling(name, value)) == name


@pytest.mark.parametrize(("name", "value"), NEUTRAL_TOP)
def test_neutral_top(name: str, value: Any) -> None:
    assert verdict({**PLAIN, name: value}, TOLD) == ""


@pytest.mark.parametrize(("name", "value"), NEUTRAL_SAMPLING)
def test_neutral_sampling(name: str, value: Any) -> None:
    assert verdict(sampling(name, value)) == ""


@pytest.mark.parametrize(
    "body",
    [
        {**PLAIN, "input_ids": [[1], [2]]},
        {**PLAIN, "input_ids": [[1] * 3000] * 2},
        {**PLAIN, "text": ["a", "b"]},
        {**PLAIN, "text": ["a" * 5000]},
        {**PLAIN, "sampling_params": [{}, {}]},
    ],
)
def test_batch(body: object) -> None:
    """N6."""
    assert verdict(body) == "batch"


@pytest.mark.parametrize("body", [{"text": "hi"}, {"text": "x" * 10_000}, {"text": "", "input_ids": None}])
def test_text(body: dict[str, Any]) -> None:
    """E7, N5: the ids of a text are asked for."""
    assert verdict({**body, "sampling_params": {"max_new_tokens": 9}}) == ""


@pytest.mark.parametrize("text", [5, True, {"a": 1}])
def test_text_that_is_none(text: object) -> None:
    assert verdict({"text": text}) == "text"
    assert verdict({**PLAIN, "text": text}) == ""


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[1,2]", b'{"input_ids": [1,2', b'{"rid":"\xff"}', b'{"x":NaN}', b"\xff"]
)
def test_unreadable_bodies_are_passed_on(body: bytes) -> None:
    exchange = opened(body)
    assert exchange.verdict == Verdict("body")
    sent = exchange.dispatch(UNKNOWN, "other", 0.0)
    assert (sent.body, sent.content_type) == (body, b"application/json")
    assert exchange.rid == "given"


@pytest.mark.parametrize(
    ("header", "value", "reason"),
    [
        (b"content-type", b"text/plain", "content-type"),
        (b"content-type", b"Application/JSON; charset=utf-8", ""),
        (b"content-type", b"application/vnd.x+json", ""),
        (b"content-encoding", b"gzip", "content-encoding"),
        (b"content-encoding", b"identity", ""),
        (b"x-other", b"1", ""),
    ],
)
def test_media_type(header: bytes, value: bytes, reason: str) -> None:
    exchange = SglangFormat().open(request(PLAIN, [(header, value)]), "given")
    assert exchange.admit(UNKNOWN).reason == reason
    if reason == "content-type":
        assert exchange.dispatch(UNKNOWN, "x", 0.0).content_type == value


@pytest.mark.parametrize(
    ("defaults", "body", "reason"),
    [
        ({"frequency_penalty": 0.2}, PLAIN, "frequency_penalty"),
        ({"frequency_penalty": 0.2}, sampling("frequency_penalty", 0.0), ""),
        ({"frequency_penalty": 0.2}, sampling("frequency_penalty", None), ""),
        ({"max_new_tokens": None}, {"input_ids": [1]}, "max_new_tokens"),
        ({"max_new_tokens": 9}, {"input_ids": [1]}, ""),
        ({"max_new_tokens": 9}, sampling("max_new_tokens", None), "max_new_tokens"),
        ({"n": 4}, PLAIN, "n"),
        ({}, {"input_ids": [1]}, ""),
    ],
)
def test_worker_defaults(defaults: dict[str, object], body: dict[str, Any], reason: str) -> None:
    """E2: what the worker adds under the request's own keys takes part."""
    assert verdict(body, Traits(sampling_defaults=defaults)) == reason


ONLY_IF_NAMED = [row for row in TABLE if row.only_if_named]


@pytest.mark.parametrize("row", ONLY_IF_NAMED, ids=lambda row: row.field)
def test_rows_that_are_asked_only_if_their_field_is_named(row: Row) -> None:
    """They would allow every other request, and a worker's default names a field, too."""
    assert not row.forbids(Request(request(PLAIN)), UNKNOWN)
    if row.where == "`sampling_params`":
        assert verdict(PLAIN, Traits(sampling_defaults={row.field: 7.5})) == row.field


def test_deep_values_are_not_looked_into() -> None:
    deep = b"[" * 600 + b"]" * 600
    assert verdict(b'{"input_ids":[1],"image_data":%s}' % deep) == "image_data"
    assert verdict(b'{"input_ids":[1],"sampling_params":{"stop":%s}}' % deep) == "stop"
    assert verdict(b'{"input_ids":[1],"other":%s}' % deep, TOLD) == ""


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5000, "1" + "0" * 400])
@pytest.mark.parametrize("field", ["max_new_tokens", "min_new_tokens", "stream_interval", "n", "frequency_penalty"])
def test_numbers_out_of_range(field: str, number: str) -> None:
    """The engine answers 400; that is not for us to say, nor to stumble over."""
    given = {"max_new_tokens": "9", field: number}
    params = ",".join(f'"{name}":{value}' for name, value in given.items())
    body = f'{{"input_ids":[1],"sampling_params":{{{params}}}}}'.encode()
    exchange = opened(body)
    assert exchange.verdict.reason == field
    assert exchange.dispatch(UNKNOWN, "x", 0.0).body == body
    assert exchange.stall_allowance() == 0


@pytest.mark.parametrize("field", ["stream", "rid", "text", "logprob_start_len", "top_logprobs_num", "image_data"])
def test_numbers_out_of_range_elsewhere(field: str) -> None:
    body = b'{"input_ids":[1],"%s":1e999}' % field.encode()
    assert opened(body).dispatch(UNKNOWN, "x", 0.0).body


def test_a_budget_is_an_int64() -> None:
    assert verdict(sampling("max_new_tokens", 2**63 - 1)) == ""
    assert verdict(sampling("max_new_tokens", 2**63)) == "max_new_tokens"


@pytest.mark.parametrize("traits", [UNKNOWN, Traits(version="0.5.23", text=False)])
def test_an_unresolved_budget(traits: Traits) -> None:
    """E2, law 8: the worker may have another default than 128; the answer would be cut short in silence."""
    assert verdict({"input_ids": [1]}, traits) == "max_new_tokens"
    assert verdict(sampling("max_new_tokens", 9), traits) == ""


def test_worker_with_a_tokenizer() -> None:
    """F3: there were releases that told all of the text beside deltas of ids."""
    assert verdict(PLAIN, Traits(text=True, version="0.5.23")) == ""
    assert verdict(PLAIN, Traits(text=True, version="0.5.22")) == "text"
    assert verdict(PLAIN, Traits(text=True)) == "text"
    assert verdict(PLAIN, Traits(text=False)) == ""


@pytest.mark.parametrize(
    ("stop", "version", "reason"),
    [
        ("END", "0.5.23", ""),
        (["END", ""], "0.6.1", ""),
        (["END"], "0.5.22", "stop"),
        (["END"], None, "stop"),
        ([5], "0.5.23", "stop"),
        ({"a": 1}, "0.5.23", "stop"),
        ("x" * 257, "0.5.23", "stop"),
        ([], None, ""),
        ("", None, ""),
    ],
)
def test_stop_strings(stop: object, version: str | None, reason: str) -> None:
    """E6: where an engine holds back what may become one."""
    assert verdict(sampling("stop", stop), Traits(version=version, sampling_defaults={})) == reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input_ids": [5, -1]}, "input_ids"),
        ({"input_ids": [[5], [-1]]}, "input_ids"),
        ({"input_ids": [2**63]}, "input_ids"),
        ({"input_ids": [2**70]}, "input_ids"),
        ({"logprob_start_len": -7}, "logprob_start_len"),
        ({"logprob_start_len": [-7, 0]}, "logprob_start_len"),
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_poison(fields: dict[str, Any], reason: str, stream: bool) -> None:
    with pytest.raises(Rejected) as caught:
        opened({**PLAIN, **fields, "stream": stream})
    assert caught.value.reason == reason
    assert caught.value.answer.status == (200 if stream else 400)
    assert b'"error"' in caught.value.answer.body


@pytest.mark.parametrize("fields", [{"logprob_start_len": -1}, {"top_logprobs_num": 0}, {"input_ids": [2**63 - 1, 0]}])
def test_not_poison(fields: dict[str, Any]) -> None:
    assert verdict({**PLAIN, **fields}) == ""


def test_every_row_is_tested() -> None:
    tried = {name for name, _ in TOP + SAMPLING} | {"batch", "text", "body", "content-type", "content-encoding"}
    assert {row.field for row in TABLE} == tried


def test_page_is_current() -> None:
    path = Path(__file__).parents[3] / "docs" / "admission.md"
    assert path.read_text() == page(), "run: python -m dyn_relay.formats.sglang.admission > docs/admission.md"


def test_fingerprint() -> None:
    """Equal for what would do the same to an engine, under whatever rid, in whatever order of fields."""
    one = opened({**PLAIN, "rid": "a", "stream": True}).fingerprint()
    assert one == opened({"stream": False, **PLAIN, "rid": "b"}).fingerprint()
    assert one != opened({**PLAIN, "input_ids": [1, 2, 4]}).fingerprint()
    assert one != opened(sampling("temperature", 0)).fingerprint()
    assert opened(b"broken").fingerprint() != opened(b"broken 2").fingerprint()


def test_unfit() -> None:
    """O2, G4 and E2 in part: what a worker says of itself decides whether it may continue."""
    here = Traits(model="m", text=False, sampling_defaults={"top_p": 0.9}, max_input=100)
    exchange = opened(PLAIN, here)
    assert exchange.unfit(here) == ""
    assert exchange.unfit(UNKNOWN) == ""
    assert exchange.unfit(Traits(model="other")) == "model"
    assert exchange.unfit(Traits(text=True)) == "text"
    assert exchange.unfit(Traits(sampling_defaults={})) == "preferred_sampling_params"
    assert exchange.unfit(Traits(max_input=3)) == ""
    assert exchange.unfit(Traits(max_input=2)) == "context"


@pytest.mark.parametrize(
    ("told", "delivered", "other", "fits"),
    [
        ({}, 1, {}, True),
        ({}, 1, None, False),
        ({}, 0, None, True),
        ({}, 0, {"top_p": 0.9}, False),
        (None, 0, {}, True),
        (None, 1, {}, False),
        (None, 1, None, True),
    ],
)
def test_unknown_defaults(told: Any, delivered: int, other: Any, fits: bool) -> None:
    """Law 1: what may have other defaults does not continue an answer; to begin it again it is as good as any."""
    exchange = opened(
        {**PLAIN, "stream": True, "sampling_params": {"max_new_tokens": 3}}, Traits(sampling_defaults=told)
    )
    sent = json.loads(exchange.dispatch(UNKNOWN, "x", 0.0).body)
    exchange.head(200, SSE_HEAD)
    exchange.feed(Engine().events(sent)[:delivered], 1.0)
    assert exchange.delivered == delivered
    assert (exchange.unfit(Traits(sampling_defaults=other)) == "") == fits


def test_headers_and_method_are_kept() -> None:
    exchange = SglangFormat().open(request({"text": "a"}, JSON_HEAD, "PUT"), "given")
    exchange.admit(UNKNOWN)
    sent = exchange.dispatch(UNKNOWN, "x", 0.0)
    assert (sent.method, sent.path, json.loads(sent.body)) == ("PUT", "/generate", {"text": "a"})
