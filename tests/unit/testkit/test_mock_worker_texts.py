"""Texts in the mock worker's answers, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import trio
from hard_texts import KINDS, piece
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_worker_kit import DIALECTS

from dyn_testkit import faults
from dyn_testkit.client import Response, fetch
from dyn_testkit.engine import Model
from dyn_testkit.faults import FaultPlan
from dyn_testkit.oracle import Oracle, differences, fold
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.tokenizer import SENTENCE_PIECE, SPACE, Tokenizer
from dyn_testkit.worker import Dialect, MockWorker, WorkerOptions

#: Models that say only the hard pieces of a tokenizer; ASCII for the plain one.
MODELS = {
    "plain": Model(vocab_size=128, eos_rate=0.02),
    "byte-level": Model(vocab_size=65, eos_rate=0.02),
    "sentencepiece": Model(vocab_size=41, eos_rate=0.02),
}


def setup(kind: str, **more: Any) -> WorkerOptions:
    return WorkerOptions(model=MODELS[kind], skip_tokenizer_init=False, tokenizer=KINDS[kind], **more)


def asked(
    count: int = 30, *, stream: bool = False, prompt: tuple[int, ...] = (7, 8, 9), **params: Any
) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True} | params
    return {"input_ids": [*prompt], "sampling_params": sampling, "stream": stream}


def answers(
    options: WorkerOptions, *bodies: Any, path: str = "/generate", plan: FaultPlan | None = None
) -> list[Response]:
    found: list[Response] = []

    async def main() -> None:
        network = SimNetwork()
        async with MockWorker.serve(network, "worker", 1, options, plan) as worker:
            found.extend([await fetch(network, worker.url, path, body) for body in bodies])

    trio.run(main)
    return found


def answer(options: WorkerOptions, body: Any, path: str = "/generate") -> Any:
    return answers(options, body, path=path)[0].json()


def after(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text of an output, seen from its end: no state, no parts."""
    context = prompt[-5:]
    return tokenizer.decode(context + ids, True)[len(tokenizer.decode(context, True)) :]


FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "stop": st.sampled_from(["😀", "ab", "\n", " the", ["<|im_end|>", "中"], "é", "</s>", "\ufffd", "Hello", "1"]),
        "stop_token_ids": st.lists(st.integers(3, 40), max_size=3),
        "skip_special_tokens": st.booleans(),
        "spaces_between_special_tokens": st.booleans(),
        "no_stop_trim": st.booleans(),
        "ignore_eos": st.booleans(),
        "stream_interval": st.integers(1, 9),
        "sampling_seed": st.integers(0, 99),
        "temperature": st.just(1.0),
    },
)


@settings(max_examples=150)
@given(
    st.sampled_from([*KINDS]),
    st.sampled_from(DIALECTS),
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.integers(0, 120),
    FLAGS,
    st.integers(1, 3),
)
def test_texts_are_the_oracles(
    kind: str, dialect: Dialect, prompt: list[int], count: int, params: dict[str, Any], coalesced: int
) -> None:
    options = setup(kind, dialect=dialect, tokens_per_tick=coalesced)
    oracle = Oracle(MODELS[kind], tokenizer=KINDS[kind], tokens_per_tick=coalesced)
    body = asked(count, prompt=tuple(prompt), **params)
    unary, stream = answers(options, body, body | {"stream": True})
    assert not differences(unary.json(), oracle.answer(body))
    assert not differences(fold(stream.values(), dialect), oracle.answer(body | {"stream": True}))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_what_their_ids_say(kind: str) -> None:
    """Without stops and within one interval: no second implementation is asked."""
    for prompt in ([5], [7, 8, 9], [*range(3, 20)]):
        value = answer(setup(kind), asked(40, prompt=tuple(prompt)))
        assert value["text"] == after(KINDS[kind], prompt, value["output_ids"])
        assert len(value["text"]) > 10


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_tells_nothing_that_it_takes_back(kind: str, dialect: Dialect) -> None:
    """Texts only grow; some events have ids and no new text."""
    events = answers(setup(kind, dialect=dialect), asked(60, stream=True))[0].values()
    texts = [event["text"] for event in events]
    if dialect == "cumulative":
        assert all(second.startswith(first) for first, second in pairwise(texts))
        texts = [second[len(first) :] for first, second in pairwise(["", *texts])]
    assert ("" in texts) == (kind != "plain")
    assert "".join(texts) == fold(events, dialect)["text"]


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_stop_strings_that_straddle_tokens(length: int) -> None:
    """At every place of an answer: nothing of the stop string is told, in a stream or else."""
    options, oracle = setup("plain"), Oracle(MODELS["plain"], tokenizer=KINDS["plain"])
    whole = answer(options, asked(24))["text"]
    assert len(whole) == 24
    for at in range(24 - length + 1):
        stop = whole[at : at + length]
        first = whole.index(stop)
        unary, stream = answers(options, asked(24, stop=stop), asked(24, stop=[stop], stream=True))
        events = stream.values()
        assert not differences(events[-1], oracle.answer(asked(24, stop=stop, stream=True)))
        for value in (unary.json(), events[-1]):
            assert value["text"] == whole[:first]
            assert value["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
            assert len(value["output_ids"]) == first + length
        assert all(whole[:first].startswith(event["text"]) for event in events)
        trimmed = answer(options, asked(24, stop=stop, no_stop_trim=True))
        assert trimmed["text"] == whole[: first + length]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_stop_strings_in_hard_texts(kind: str) -> None:
    """Special tokens are in the text here, as they are in what is searched."""
    options = setup(kind)
    whole = answer(options, asked(40, skip_special_tokens=False))
    ids = whole["output_ids"]
    parts = [ids[at : at + length] for length in (1, 2) for at in range(len(ids) - 1)]
    stops = {KINDS[kind].decode(part).strip() for part in parts} - {""}
    stops = {stop for stop in stops if "\ufffd" not in stop and stop in whole["text"]}
    assert len(stops) > 10
    for stop in stops:
        body = asked(40, stop=stop, skip_special_tokens=False)
        unary, stream = answers(options, body, body | {"stream": True})
        value, events = unary.json(), stream.values()
        assert value["text"] == events[-1]["text"] == whole["text"].partition(stop)[0]
        assert all(value["text"].startswith(event["text"]) for event in events)
        assert value["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert value["output_ids"] == ids[: len(value["output_ids"])]


def test_a_unary_answer_waits_for_no_stop_string() -> None:
    """As stock: what its detokenizer told after 50 tokens stays, though it is the beginning of a stop string."""
    options = setup("plain")
    whole = answer(options, asked(60))["text"]
    stop = whole[48:52]
    assert whole.index(stop) == 48
    unary, stream = answers(options, asked(60, stop=stop), asked(60, stop=stop, stream=True))
    assert unary.json()["text"] == whole[:50]
    assert stream.values()[-1]["text"] == whole[:48]


def test_a_kill_while_a_stop_string_may_come() -> None:
    """The token is made and not sent, as with the engine's own streams."""
    whole = answer(setup("plain"), asked(24))["text"]
    stop = whole[7:9] + "?"
    assert whole.index(whole[7:9]) == 7
    delivered = []
    for token in (7, 8, 9, 10):
        plan = FaultPlan.in_order([(faults.at_token(token), faults.RESET)])
        cut = answers(setup("plain"), asked(24, stop=stop, stream=True), plan=plan)[0]
        delivered.append(len(cut.values()[-1]["output_ids"]))
    assert delivered == [7, 7, 7, 10]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_texts_of_two_attempts_glued_together(kind: str) -> None:
    """A continuation's text begins at the continuation: right after whole characters, wrong within one, as in stock."""
    options, body = setup(kind), asked(40, stream=True)
    events = answers(options, body)[0].values()
    whole = events[-1]
    right = []
    for event in events[:-1]:
        count = len(event["output_ids"])
        rest = answer(options, asked(40 - count, prompt=(7, 8, 9, *event["output_ids"])))
        assert event["output_ids"] + rest["output_ids"] == whole["output_ids"]
        right.append(event["text"] + rest["text"] == whole["text"])
    assert {True, False} == set(right)


def test_texts_in_logprobs() -> None:
    """Each token is decoded alone, special ones included: sentencepiece loses each space."""
    body = asked(12) | {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    value = answer(setup("sentencepiece"), body | {"return_text_in_logprobs": True})["meta_info"]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert [text for _, _, text in value[name]] == [SENTENCE_PIECE.decode([token]) for _, token, _ in value[name]]
    tops = [entry for row in value["output_top_logprobs"] for entry in row]
    assert all(text == SENTENCE_PIECE.decode([token]) for _, token, text in tops)
    plain = answer(setup("sentencepiece"), body)["meta_info"]
    assert {text for _, _, text in plain["output_token_logprobs"]} == {None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_prompt(kind: str) -> None:
    tokenizer = KINDS[kind]
    body = {"text": "ab the", "return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 3}}
    options = WorkerOptions(model=Model(vocab_size=400), skip_tokenizer_init=False, tokenizer=tokenizer)
    assert answer(options, body)["prompt_token_ids"] == [*tokenizer.prefix, *tokenizer.encode("ab the")]


LOUD = "Internal server error during"


@pytest.mark.parametrize(
    ("path", "body", "status", "value"),
    [
        ("/detokenize", {"tokens": [15, 17, 17]}, 200, {"text": SENTENCE_PIECE.decode([15, 17, 17])}),
        ("/detokenize", {"tokens": [piece("e"), 2]}, 200, {"text": "e"}),
        ("/detokenize", {"tokens": [piece("e"), 2], "skip_special_tokens": False}, 200, {"text": "e</s>"}),
        ("/detokenize", {"tokens": [piece(SPACE + "the"), piece(SPACE + "a")]}, 200, {"text": "the a"}),
        (
            "/detokenize",
            {"tokens": [[piece(SPACE + "the")], [piece(SPACE + "a")], []]},
            200,
            {"text": ["the", "a", ""]},
        ),
        ("/detokenize", {"tokens": []}, 200, {"text": ""}),
        ("/detokenize", {"tokens": ["30", 31.0]}, 200, {"text": SENTENCE_PIECE.decode([30, 31])}),
        ("/detokenize", {"tokens": [99999]}, 200, {"text": ""}),
        ("/detokenize", {"tokens": [-1]}, 500, f"{LOUD} detokenization: number too small to fit in target type"),
        (
            "/detokenize",
            {"tokens": [1.5]},
            400,
            "2 validation errors:\n  {'type': 'int_from_float', 'loc': ('body', 'to",
        ),
        (
            "/detokenize",
            {},
            400,
            "1 validation error:\n  {'type': 'missing', 'loc': ('body', 'tokens'), 'msg': 'Field req",
        ),
        (
            "/detokenize",
            [],
            400,
            "1 validation error:\n  {'type': 'model_attributes_type', 'loc': ('body',), 'msg': 'Inp",
        ),
        ("/tokenize", {"prompt": "e e"}, 200, {"tokens": [1, 15, 25, 15, 25], "count": 5, "max_model_len": 131072}),
        (
            "/tokenize",
            {"prompt": ["Hello", ""], "add_special_tokens": False},
            200,
            {"tokens": [[piece(SPACE + "Hello")], []], "count": [1, 0], "max_model_len": 131072},
        ),
        (
            "/tokenize",
            {"prompt": 3},
            400,
            "2 validation errors:\n  {'type': 'list_type', 'loc': ('body', 'prompt', 'list",
        ),
        (
            "/tokenize",
            {},
            400,
            "1 validation error:\n  {'type': 'value_error', 'loc': ('body',), 'msg': \"Value error, E",
        ),
    ],
)
@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_detokenize(prefix: str, path: str, body: Any, status: int, value: Any) -> None:
    """Statuses and bodies are those of stock's handlers with the same tokenizer."""
    response = answers(setup("sentencepiece"), body, path=prefix + path)[0]
    assert response.status == status
    if status == 200:
        assert response.json() == value
    else:
        assert response.json()["message"].startswith(value)
        assert response.json()["object"] == "error"


@pytest.mark.parametrize(
    ("path", "body", "status", "value"),
    [
        ("/detokenize", {"tokens": [1]}, 400, "Error decoding tokens: 'NoneType' object has no attribute 'decode'."),
        ("/tokenize", {"prompt": "a"}, 500, f"{LOUD} tokenization: 'NoneType' object has no attribute 'encode'"),
    ],
)
def test_without_a_tokenizer(path: str, body: Any, status: int, value: str) -> None:
    response = answers(WorkerOptions(), body, path=path)[0]
    assert response.status == status
    assert response.json()["message"].startswith(value)
    assert answer(WorkerOptions(), {"tokens": []}, path="/detokenize") == {"text": ""}


@settings(max_examples=100)
@given(
    st.sampled_from(["/tokenize", "/detokenize"]),
    st.dictionaries(
        st.sampled_from(["prompt", "tokens", "skip_special_tokens", "add_special_tokens", "messages", "model"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner),
            max_leaves=6,
        ),
    ).map(lambda body: json.dumps(body).encode())
    | st.binary(max_size=9),
    st.booleans(),
)
def test_no_body_takes_it_down(path: str, body: bytes, tokenizer: bool) -> None:
    options = setup("byte-level") if tokenizer else WorkerOptions()
    first, second = answers(options, body, b'{"tokens":[]}' if path == "/detokenize" else b'{"prompt":[]}', path=path)
    assert first.status in (200, 400, 500)
    assert second.status == 200


@pytest.mark.parametrize(("path", "key"), [("/detokenize", b"tokens"), ("/tokenize", b"wibble")])
def test_deep_bodies(path: str, key: bytes) -> None:
    """Some are too deep to be read, others to be printed."""
    depths = [*range(700, 1000, 4), 5000]
    bodies = [b'{"%s":' % key + b"[" * depth + b"]" * depth + b"}" for depth in depths]
    found = answers(setup("plain"), *bodies, path=path)
    assert {response.status for response in found} == {400}
    assert 1 < sum(b"depth limit exceeded" in response.body for response in found) < len(depths)


def test_only_json_is_taken() -> None:
    async def main() -> Response:
        network = SimNetwork()
        async with MockWorker.serve(network, "worker", 1, setup("plain")) as worker:
            return await fetch(network, worker.url, "/tokenize", b"{}", headers={"content-type": "text/plain"})

    assert "Unsupported Media Type" in trio.run(main).json()["message"]
