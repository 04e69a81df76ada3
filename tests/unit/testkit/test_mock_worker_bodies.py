"""No body takes the mock worker down, but the poison that it models; wrong types get stock SGLang's words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from dyn_testkit.client import Response, fetch
from dyn_testkit.engine import Model
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions

MODEL = Model(vocab_size=64, context_length=40)
CONTROL = ("/abort_request", "/pause_generation", "/update_weight_version", "/update_weights_from_disk")


async def answers(*bodies: Any, path: str = "/generate", tokenizer: bool = False) -> tuple[list[Response], bool]:
    """The answers to some bodies, one after the other, and whether the worker is alive after them."""
    options = WorkerOptions(model=MODEL, skip_tokenizer_init=not tokenizer, routed_experts=True, dp_size=2)
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, options) as worker:
        found = []
        for body in bodies:
            found.append(await fetch(network, worker.url, path, body))
            if not worker.alive:
                return found, False
        return found, (await fetch(network, worker.url, "/health")).status == 200


def asked(**more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 4, "temperature": 0} | more.pop("sampling", {})
    return {"input_ids": [5, 6, 7], "return_logprob": True, "sampling_params": params} | more


def one_of(name: str) -> str:
    return f"a value or an array of values for {name}"


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"sampling": {"max_new_tokens": "4"}}, 'string "4", expected i64'),
        ({"sampling": {"max_new_tokens": 4.0}}, "floating point `4.0`, expected i64"),
        ({"sampling": {"max_new_tokens": True}}, "boolean `true`, expected i64"),
        ({"sampling": {"max_new_tokens": 1 << 64}}, "floating point `1.8446744073709552e+19`, expected i64"),
        ({"sampling": {"stop_token_ids": 3}}, "integer `3`, expected a sequence"),
        ({"sampling": {"stop_token_ids": [None]}}, "null, expected i64"),
        ({"sampling": {"stop": 3}}, f"integer `3`, expected {one_of('StringOrList')}"),
        ({"sampling": {"stop": ["a", 3]}}, "integer `3`, expected a string"),
        ({"sampling": {"temperature": 'a"b'}}, 'string "a"b", expected f64'),
        ({"sampling": {"logit_bias": [1]}}, "sequence, expected a map"),
        ({"sampling": {"logit_bias": {"5": {}}}}, "map, expected f64"),
        ({"sampling": {"n": "2"}}, 'string "2", expected i64'),
        ({"sampling": {"ignore_eos": 1}}, "integer `1`, expected a boolean"),
        ({"sampling": {"choice": "x"}}, 'string "x", expected a sequence'),
        ({"sampling": {"watermark": 1}}, "integer `1`, expected struct WatermarkRequestConfig"),
        ({"top_logprobs_num": "3"}, f'string "3", expected {one_of("Int64OrList")}'),
        ({"logprob_start_len": True}, f"boolean `true`, expected {one_of('Int64OrList')}"),
        ({"return_logprob": 1}, f"integer `1`, expected {one_of('BoolOrList')}"),
        ({"token_ids_logprob": [True]}, "boolean `true`, expected a sequence"),
        ({"stream": "true"}, 'string "true", expected a boolean'),
        ({"input_ids": [1, True]}, "boolean `true`, expected i64"),
        ({"routed_dp_rank": "1"}, 'string "1", expected i64'),
        ({"return_prompt_token_ids": "no"}, 'string "no", expected a boolean'),
    ],
)
async def test_the_contract_refuses_a_wrong_type(more: dict[str, Any], error: str) -> None:
    """The sentences are those of SGLang 0.5.23's own decoder."""
    (refused, served), alive = await answers(asked(**more), asked())
    assert (refused.status, refused.json()) == (400, {"error": f"invalid type: {error}"})
    assert (alive, served.status) == (True, 200)


@pytest.mark.parametrize(
    ("more", "count", "words"),
    [
        ({"rid": 5}, 2, "'loc': ('body', 'rid', 'list[str]'), 'msg': 'Input should be a valid list'"),
        ({"text": [1]}, 2, "'loc': ('body', 'text', 'list[str]', 0), 'msg': 'Input should be a valid string'"),
        ({"stream": "x"}, 1, "valid boolean, unable to interpret input"),
        ({"stream": None}, 1, "{'type': 'bool_type', 'loc': ('body', 'stream')"),
        ({"top_logprobs_num": "x"}, 2, "'int'), 'msg': 'Input should be a valid integer, unable to parse string"),
        ({"token_ids_logprob": [1.5]}, 2, "valid integer, got a number with a fractional part"),
        ({"return_indexer_topk": None}, 1, "{'type': 'bool_type', 'loc': ('body', 'return_indexer_topk')"),
        ({"routed_experts_start_len": None}, 1, "{'type': 'int_type', 'loc': ('body', 'routed_experts_start_len')"),
        ({"input_ids": [1, [2]]}, 1, "Value error, contains non-int64 element"),
        ({"input_ids": [[1], 2]}, 1, "Value error, row 1: must be list; got int"),
        ({"input_ids": [1 << 63]}, 1, "Value error, contains non-int64 element: int too big to convert"),
        ({"lora_path": 3, "data_parallel_rank": []}, 3, "'lora_path', 'list[nullable[str]]'"),
        ({"sampling_params": [None]}, 2, "'sampling_params', 'list[dict[str,any]]', 0), 'msg': 'Input should be a"),
    ],
)
async def test_fastapi_refuses_what_it_cannot_read(more: dict[str, Any], count: int, words: str) -> None:
    (refused, served), alive = await answers(asked(**more), asked())
    value = refused.json()
    assert (refused.status, value["object"], value["type"]) == (400, "error", "Bad Request")
    assert value["message"].startswith(f"{count} validation error{'s'[: count - 1]}:\n")
    assert words in value["message"]
    assert (alive, served.status) == (True, 200)


@pytest.mark.parametrize("error", ["depth limit exceeded", "JSON is malformed", "too large"])
async def test_json_that_no_parser_takes(error: str) -> None:
    bodies = {
        "depth limit exceeded": b"[" * 5000 + b"]" * 5000,
        "JSON is malformed": b'{"input_ids":[1],}',
        "too large": b'{"priority":1%s}' % (b"0" * 400),
    }
    (refused,), alive = await answers(bodies[error])
    assert (refused.status, alive) == (400, True)
    assert error in refused.json()["message"]


@pytest.mark.parametrize(
    "body",
    [
        asked(sampling={"n": None}),
        asked(sampling={"choice": ["a"]}),
        asked(sampling={"n": 1 << 40}),
        asked(sampling_params=[]),
        asked(sampling_params=[{}]),
        asked(input_ids=[[1], [2]], sampling_params=[{}]),
        asked(input_ids=[[1], [2]], top_logprobs_num=[1]),
    ],
)
async def test_what_the_engines_handler_falls_over(body: dict[str, Any]) -> None:
    """SGLang answers 500 in plain text; a stream has begun by then, and ends without its last chunk."""
    (unary, stream), alive = await answers(body, body | {"stream": True})
    assert (unary.status, unary.body) == (500, b"Internal Server Error")
    assert (stream.status, stream.complete, stream.body) == (200, False, b"")
    assert alive


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sampling": {"stop": ["a"] * 33}}, "at most 32 stop strings are allowed, got 33"),
        ({"sampling": {"logit_bias": {"a": 1}}}, "invalid literal for int() with base 10: 'a'"),
        ({"sampling": {"logit_bias": {"64": 1}}}, "logit_bias must has keys in [0, 63], got 64."),
        (
            {"sampling": {"sampling_seed": 1 << 63}},
            "sampling_seed must be in [-2**63, 2**63 - 1], got 9223372036854775808.",
        ),
        (
            {"sampling": {"n": 2}, "top_logprobs_num": [1]},
            "Cannot use list top_logprobs_num with parallel_sample_num > 1",
        ),
        (
            {"sampling_params": [{"n": 1}, {"n": 2}]},
            "The parallel_sample_num should be the same for all samples in sample params.",
        ),
    ],
)
async def test_impossible_values(more: dict[str, Any], message: str) -> None:
    (refused,), alive = await answers(asked(**more), tokenizer=True)
    assert (refused.status, refused.json(), alive) == (400, {"error": {"message": message}}, True)


async def test_an_empty_batch_is_an_empty_answer() -> None:
    (unary, stream), alive = await answers({"text": []}, {"text": [], "stream": True}, tokenizer=True)
    assert (unary.json(), stream.events(), alive) == ([], [b"[DONE]"], True)


numbers = st.one_of(st.integers(-3, 70), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=6), st.sampled_from(["3", "true", "1.0"]))
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
flags, texts, tokens = st.booleans(), st.text(max_size=4), st.integers(0, 63)
integers = st.integers(-3, 70) | st.integers(-(1 << 63), (1 << 64) - 1)
fractions = st.floats(-2, 2) | st.integers(-1, 2)


def some(item: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(item, max_size=3)


def keys(named: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these keys; their values are null or of any type now and then."""
    pairs = [st.tuples(st.just(name), right) for name, right in named.items()]
    wrong = st.tuples(st.sampled_from([*named, "wibble"]), st.none() | anything)
    return st.lists(st.one_of(*pairs, wrong), max_size=most).map(dict)


sampling = keys(
    dict.fromkeys(("max_new_tokens", "top_k", "min_new_tokens", "n", "stream_interval", "sampling_seed"), integers)
    | dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"), fractions)
    | dict.fromkeys(("json_schema", "regex", "ebnf"), texts)
    | dict.fromkeys(("ignore_eos", "no_stop_trim"), flags)
    | {"stop": texts | some(texts), "stop_token_ids": some(integers), "custom_params": anything, "beam_width": integers}
    | {"logit_bias": st.dictionaries(st.sampled_from(["5", "64", "-1", "a", ""]), fractions), "choice": some(texts)},
    6,
)
objects = st.builds(
    lambda prompt, more, params: prompt | more | params,
    st.sampled_from([{"input_ids": [5, 6]}, {"input_ids": [[5], [6]]}, {"text": "\x05\x06"}, {}]),
    keys(
        dict.fromkeys(("logprob_start_len", "top_logprobs_num"), integers | some(integers))
        | dict.fromkeys(
            (
                "stream",
                "return_text_in_logprobs",
                "return_routed_experts",
                "return_indexer_topk",
                "return_prompt_token_ids",
            ),
            flags,
        )
        | dict.fromkeys(("routed_experts_start_len", "routed_dp_rank", "data_parallel_rank", "priority"), integers)
        | {"rid": texts | some(texts), "text": texts | some(texts), "lora_path": st.just("") | some(st.none() | texts)}
        | {"input_ids": some(tokens) | some(some(tokens)), "token_ids_logprob": some(tokens) | some(some(tokens))}
        | {"return_logprob": flags | some(flags), "return_hidden_states": flags, "input_embeds": st.just([[1.0]])},
        6,
    ),
    st.fixed_dictionaries({"sampling_params": st.one_of(sampling, sampling, some(sampling), st.just({}))}),
)
bodies = st.one_of(objects.map(json.dumps), objects.map(json.dumps), anything.map(json.dumps)).map(str.encode)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def may_be_poison(body: bytes) -> bool:
    """The three poisons that the mock models: ids and a top above the vocabulary, negative starts."""
    value = json.loads(body)
    size = MODEL.vocab_size
    ids = any(not 0 <= token < size for token in leaves(value.get("input_ids") or []))
    letters = any(not letter < size for text in leaves(value.get("text") or []) for letter in text.encode())
    tops = any(top > size for top in leaves(value.get("top_logprobs_num") or 0))
    starts = any(start < -1 for start in leaves(value.get("logprob_start_len") or 0))
    return ids or letters or (bool(value.get("return_logprob")) and (tops or starts))


@settings(max_examples=600)
@given(bodies | st.binary(max_size=40), st.booleans())
@example(b'{"input_ids":[5],"sampling_params":{"stop_token_ids":3}}', False)
@example(b'{"input_ids":[5],"return_logprob":true,"top_logprobs_num":"3"}', False)
@example(b'{"input_ids":[5,6],"sampling_params":{"temperature":1' + b"0" * 500 + b"}}", False)
def test_no_body_takes_it_down(body: bytes, tokenizer: bool) -> None:
    (answer,), alive = trio.run(lambda: answers(body, tokenizer=tokenizer))
    event(f"{answer.status}, {'alive' if alive else 'dead'}")
    if alive:
        assert answer.status in (200, 400, 500)
    else:
        assert may_be_poison(body)


@settings(max_examples=60)
@given(
    keys(dict.fromkeys(("rid", "abort_all", "mode", "new_version", "model_path", "weight_version"), anything), 4)
    .map(json.dumps)
    .map(str.encode)
    | st.binary(max_size=20),
    st.sampled_from(CONTROL),
)
@example(b'{"rid":' + b"[" * 3000, "/abort_request")
def test_no_control_body_takes_it_down(body: bytes, path: str) -> None:
    (answer,), alive = trio.run(lambda: answers(body, path=path))
    assert (answer.status, alive) == (200, True)


async def test_a_fault_header_that_says_nothing_is_a_400(autojump_clock):
    network = SimNetwork()
    options = WorkerOptions(allow_header_faults=True)
    async with MockWorker.serve(network, options=options) as worker:
        odd = {"x-mock-fault": "kill@xx"}
        response = await fetch(network, worker.url, "/generate", {"input_ids": [1]}, headers=odd)
        assert response.status == 400
        assert worker.alive
