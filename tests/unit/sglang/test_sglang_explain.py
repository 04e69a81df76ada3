"""Explaining a request: the same verdict, and the same continuation, as when it happens."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from sglang_kit import DONE, SSE_HEAD, Engine, dumps, opened, request, sse
from test_sglang_admission import PLAIN, SAMPLING, TOP, sampling

from dyn_relay.formats.base import Explanation, Verdict
from dyn_relay.formats.sglang.admission import TABLE
from dyn_relay.formats.sglang.demands import DEMANDS
from dyn_relay.formats.sglang.explain import MOST, NAME, STOCK
from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.traits import UNKNOWN, Traits

#: A worker in token mode.
IDS = replace(STOCK, text=False)


def unlimited(verdict: Verdict, tokens: int) -> Verdict:
    return verdict


def explain(body: object, traits: Traits = IDS, after: int = 1, *, split: bool = False) -> Explanation:
    return SglangFormat().explain(request(body), traits, after, unlimited, split=split)


def continuation(found: Explanation) -> dict[str, Any]:
    assert found.continuation is not None, found
    result: dict[str, Any] = json.loads(found.continuation.body)
    return result


@pytest.mark.parametrize(
    ("reason", "body"),
    [*((name, {**PLAIN, name: value}) for name, value in TOP), *((one[0], sampling(*one)) for one in SAMPLING)],
)
def test_the_field_that_decides(reason: str, body: dict[str, Any]) -> None:
    """Each row of the table, at a worker that tells nothing: the verdict is the exchange's, the words are the row's."""
    found = explain(body, UNKNOWN)
    assert found.verdict == opened(body, UNKNOWN).verdict
    assert found.verdict.reason == reason
    wheres = ("`sampling_params`",) if reason in body["sampling_params"] else ("top level", "request")
    [row] = [row for row in TABLE if row.field == reason and row.where in wheres]
    assert (found.rule, found.because) == (f"`{reason}` ({row.where}): refused if {row.when}", row.why)
    assert (found.continuation, found.needs, found.instead) == (None, (), "")


@pytest.mark.parametrize("traits", [IDS, STOCK], ids=["ids", "text"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("delivered", range(6))
def test_the_continuation(delivered: int, stream: bool, traits: Traits) -> None:
    """What another worker really gets after so many tokens, but for their ids and the name."""
    params = {"max_new_tokens": 6, "min_new_tokens": 4, "temperature": 0}
    body = {**PLAIN, "rid": "r", "stream": stream, "sampling_params": params, "logprob_start_len": 0, "kv_hints": {}}
    exchange = SglangFormat().open(request(body), "given")
    exchange.admit(traits)
    sent = json.loads(exchange.dispatch(traits, "r", 0.0).body)
    exchange.head(200, SSE_HEAD)
    for _, data in Engine().events(sent)[:delivered]:
        event = json.loads(data) | ({"text": "abc"} if traits.text else {})
        exchange.feed([sse(dumps(event))], 1.0)
    assert (exchange.delivered, exchange.complete(2.0)) == (delivered, None)
    real = json.loads(exchange.dispatch(traits, NAME, 3.0).body)
    explained = continuation(explain(body, traits, delivered))
    assert real["input_ids"][:3] == [1, 2, 3]
    assert explained == {**real, "input_ids": [1, 2, 3] + [0] * delivered}


def test_a_text_is_told_by_its_engine() -> None:
    found = explain({"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 9, "stop": "x"}}, STOCK, 2)
    asked = continuation(found)
    assert "text" not in asked
    assert asked["input_ids"] == [0, 0, 0]
    assert asked["sampling_params"] == {"max_new_tokens": 7, "stop": "x"}
    assert [one.partition(":")[0] for one in found.stand_ins] == ["rid", "input_ids", "needs", "input_ids"]
    assert found.stand_ins[2].endswith("it is taken for 1")
    assert continuation(explain({"text": "hi", "sampling_params": {"max_new_tokens": 9}}, STOCK, 0))["text"] == "hi"


def test_stand_ins_end_no_answer() -> None:
    body = {**PLAIN, "sampling_params": {"max_new_tokens": 9, "stop_token_ids": [0, 1, 3]}}
    assert continuation(explain(body, after=2))["input_ids"] == [1, 2, 3, 2, 2]
    format = SglangFormat()
    traits = format.traits({"/model_info": b'{"eos_token_id":[0],"preferred_sampling_params":null}'})
    assert continuation(format.explain(request(PLAIN), traits, 1, unlimited))["input_ids"] == [1, 2, 3, 1]


def test_a_whole_budget_needs_no_worker() -> None:
    found = explain(PLAIN, after=8)
    assert found.continuation is None
    assert "the relay would finish it" in found.instead
    rows = explain({**PLAIN, "return_routed_experts": True}, after=8).continuation
    assert rows is not None
    assert json.loads(rows.body)["sampling_params"]["max_new_tokens"] == 0  # only its rows are missing
    assert explain(PLAIN, STOCK, after=8).instead.endswith("the reason text")


@pytest.mark.parametrize(
    ("body", "after", "words"),
    [
        (PLAIN, 9, "after: must be at most the request's 8 tokens, not 9"),
        (PLAIN, -1, "after: must be at least 0"),
        (sampling("max_new_tokens", 2**62), MOST + 1, f"after: must be at most {MOST}"),
        (b'{"input_ids":[1', 1, "body: must be a JSON object"),
        (b"[1]", 1, "body: must be a JSON object"),
    ],
)
def test_what_cannot_be_explained(body: object, after: int, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", "\\[")):
        explain(body, after=after)


def test_what_no_worker_sees() -> None:
    found = explain({**PLAIN, "logprob_start_len": -7, "stream": True})
    assert found.verdict.reason == "logprob_start_len"
    assert found.answer is not None
    assert found.answer.status == 200
    assert b"logprob_start_len must be at least -1" in found.answer.body


def test_what_depends_on_the_worker() -> None:
    [always, told] = explain({"input_ids": [1]}).depends
    assert "preferred_sampling_params" in always
    assert told == "if it does not say its `preferred_sampling_params`: no; reason=max_new_tokens"
    assert explain(sampling("stop", "x")).depends[1:] == ("if it does not say which release it is: no; reason=stop",)
    assert len(explain(PLAIN).depends) == 1
    assert explain(PLAIN, replace(IDS, sampling_defaults={"n": 2})).verdict.reason == "n"
    assert "does not say whether it answers with text" in "".join(explain(PLAIN, UNKNOWN).stand_ins)


FULL = replace(IDS, model="m", max_input=20, sampling_defaults={"top_p": 0.5})
#: What the words speak of.
TRAITS = {
    "answers": "text",
    "says": "incremental",
    "runs": "model",
    "served_model_name": "model",
    "defaults": "sampling_defaults",
    "preferred": "sampling_defaults",
}
NAMELESS = replace(IDS, model=None)
SILENT = replace(IDS, sampling_defaults=None)


@pytest.mark.parametrize(
    ("first", "after", "words", "fits", "does_not"),
    [
        (FULL, 1, "answers without text", [IDS.text, None], [True]),
        (STOCK, 1, "answers with text", [True, None], [False]),
        (STOCK, 1, "says whether it streams deltas", [True, False], [None]),
        (FULL, 0, "runs 'm'", ["m", None], ["other"]),
        (FULL, 2, "takes a prompt of 5 tokens", [20, None], [4]),
        (FULL, 1, "of at least 7", [7, 20, None], [6]),
        (replace(FULL, max_input=6), 1, "of 6, as the first worker", [6, None], [7, 5]),
        (FULL, 1, "runs 'm' (`tokenizer_path`, `served_model_name`)", ["m"], ["other", None]),
        (NAMELESS, 1, "does not say `tokenizer_path`, `served_model_name`, as the first", [None], ["m"]),
        (FULL, 1, 'has the sampling defaults {"top_p":0.5}', [{"top_p": 0.5}], [{}, None]),
        (FULL, 0, 'defaults {"top_p":0.5} (`preferred_sampling_params`), or', [{"top_p": 0.5}, None], [{}]),
        (SILENT, 1, "does not say `preferred_sampling_params`, as the first", [None], [{}, {"top_p": 0.5}]),
    ],
)
def test_what_a_worker_needs(first: Traits, after: int, words: str, fits: list[Any], does_not: list[Any]) -> None:
    """The words are true of what `unfit` takes."""
    trait = next((name for word, name in TRAITS.items() if word in words), "max_input")
    assert any(one.startswith(words) or words in one for one in explain(PLAIN, first, after).needs)
    exchange = SglangFormat().open(request({**PLAIN, "stream": True}), "given")
    exchange.admit(first)
    sent = json.loads(exchange.dispatch(first, "given", 0.0).body)
    exchange.head(200, SSE_HEAD)
    for _, data in Engine().events(sent)[:after]:
        exchange.feed([sse(dumps(json.loads(data) | ({"text": ""} if first.text else {})))], 1.0)
    assert [not exchange.unfit(replace(first, **{trait: value})) for value in fits] == [True] * len(fits)
    assert [not exchange.unfit(replace(first, **{trait: value})) for value in does_not] == [False] * len(does_not)


def test_each_demand_has_words() -> None:
    asked = {**PLAIN, "return_routed_experts": True, "return_indexer_topk": True}
    full = replace(FULL, text=True, routed_experts=True, indexer_topk=True)
    assert len(explain(asked, full).needs) == len(DEMANDS) - 1  # weights: `any` asks for nothing
    assert len(explain(PLAIN, UNKNOWN, 0).needs) == 1


def test_of_a_split_request_the_first_that_is_refused() -> None:
    """I3: the whole is only as safe as each of its answers."""
    batch: dict[str, Any] = {"input_ids": [[1, 2], [3, 4, 5]], "sampling_params": {"max_new_tokens": 4}}
    found = explain(batch, split=True)
    assert (found.index, found.answers, found.verdict) == (0, 2, Verdict())
    assert continuation(found)["input_ids"] == [1, 2, 0]
    found = explain({**batch, "sampling_params": [{"max_new_tokens": 4}, {"frequency_penalty": 1}]}, split=True)
    assert (found.index, found.answers, found.verdict.reason) == (1, 2, "frequency_penalty")
    assert found.rule.startswith("`frequency_penalty`")
    assert explain(batch).verdict.reason == "batch"
    alone = explain(PLAIN, split=True)
    assert (alone.index, alone.answers) == (None, 1)


def test_what_keeps_a_request_whole() -> None:
    found = explain({"input_ids": [[1, 2], [3]], "session_params": {"id": "x"}}, split=True)
    assert (found.index, found.verdict.reason) == (None, "session_params")
    assert found.rule == "`session_params`: with it a request for several answers is not split"


def test_what_the_worker_lacks() -> None:
    spelled = sampling("stop", "x")
    assert explain(spelled, IDS).lacks == "tokenizer"
    assert explain(spelled, STOCK).lacks == ""
    assert explain({**PLAIN, "return_routed_experts": True}, STOCK).lacks == "routed_experts"


def test_nothing_is_remembered() -> None:
    format = SglangFormat()
    for _ in range(2):
        format.explain(request({**PLAIN, "rid": "r"}), UNKNOWN, 7, unlimited)
    exchange = format.open(request(PLAIN), "given")
    exchange.admit(IDS)
    exchange.dispatch(IDS, "given", 0.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed(Engine().events({**PLAIN, "rid": "given"})[:3], 1.0)
    assert exchange.complete(2.0) is None
    assert exchange.feed([DONE], 3.0) == b""
