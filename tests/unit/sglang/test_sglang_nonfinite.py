"""F1: `NaN`, the infinities and nulls in answers come through as the worker spelled them, cut or not, anywhere in them.

Stock SGLang writes `null` for them; servers that write with Python's own `json` send literals that are no JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_kit import DIALECTS, JSON_HEAD, SSE_HEAD, TOLD, Engine, Plan, dumps, opened, oracle, play, prompt_rows, sse

from dyn_relay.formats.base import End, NativeRequest, Reading
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.sglang.format import SglangFormat

NAN, INF = float("nan"), float("inf")
ODD = (NAN, INF, -INF, None, -0.5)
#: Where nobody looks: fields that are not known, deep in them, and words that are no literals.
HIDDEN: dict[str, Any] = {"a": [NAN, {"b": -INF}], "c": "NaN, -Infinity", "d": "\0NaN", "e": None}
ASKED: dict[str, Any] = {
    "rid": "mine",
    "input_ids": [11, 12, 13, 14],
    "sampling_params": {"max_new_tokens": 6},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
}


def odd(rows: list[Any]) -> list[Any]:
    """Rows of logprobs, the values replaced by what their token says."""
    return [odd(row) if isinstance(row[0], list) else [ODD[row[1] % 5], *row[1:]] for row in rows]


@dataclass
class OddEngine(Engine):
    """One whose numbers are odd in every place that has any."""

    def _event(self, body: dict[str, Any], *place: Any, **more: Any) -> bytes:
        event = json.loads(super()._event(body, *place, **more))
        meta = event["meta_info"]
        for name in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs"):
            meta[name] = odd(meta[name])
        meta["own_rows"] = [ODD[one % 5] for one in event["output_ids"]]
        if self.dialect == "mixed":
            meta["own_rows"] = [ODD[row[1] % 5] for row in meta["output_token_logprobs"]]
        meta |= {"queue_time": NAN, "spec_verify_ct": -INF, "spec_accept_length": NAN, "hidden": HIDDEN}
        return dumps({**event, "hidden on top": HIDDEN})


def spelled(value: Any) -> Any:
    """A value in which literals are equal to themselves, and to nothing else."""
    return json.loads(json.dumps(value), parse_constant=lambda word: f"literal {word}")


def total(events: list[Any], name: str, dialect: str) -> list[Any]:
    """A per-token list over a whole stream."""
    lists = [event["meta_info"][name] for event in events]
    if dialect != "incremental":
        return lists[-1]
    return [row for rows in lists for row in rows]


plans = st.builds(
    Plan,
    engine=st.builds(OddEngine, dialect=st.sampled_from(DIALECTS), chunks=st.lists(st.integers(1, 3)).map(tuple)),
    cut=st.integers(0, 6),
)


@settings(max_examples=512)
@given(dying=st.lists(plans, max_size=3), last=plans, unary=st.booleans())
def test_they_survive(dying: list[Plan], last: Plan, unary: bool) -> None:
    """Unary and streamed, in all dialects, after none to three cuts."""
    asked = {**ASKED, "stream": not unary}
    last.cut = None
    outcome = play(asked, [*dying, last])
    events = spelled([outcome.unary] if unary else outcome.events)
    wanted, ids = oracle(asked), [one for event in events for one in event["output_ids"]]
    dialects = ["cumulative"] if unary else [d for d in DIALECTS if d == "cumulative" or ids == wanted.ids]
    want = {
        "output_token_logprobs": odd(wanted.logprobs),
        "output_top_logprobs": odd(wanted.tops),
        "own_rows": [ODD[one % 5] for one in wanted.ids],
    }
    assert any(all(total(events, name, d) == spelled(want[name]) for name in want) for d in dialects), events
    for event in events:
        meta = event["meta_info"]
        assert event["hidden on top"] == meta["hidden"] == spelled(HIDDEN)
        assert meta["input_token_logprobs"] == spelled(odd(prompt_rows(asked)))
        assert meta["queue_time"] == meta["spec_accept_length"] == "literal NaN"
        assert meta["spec_verify_ct"] == "literal -Infinity"


@pytest.mark.parametrize("unary", [False, True])
def test_a_finish_that_is_made_here_has_them(unary: bool) -> None:
    """All tokens are there, and the finish is lost."""
    plan = Plan(OddEngine(late_finish=True), cut=6)
    outcome = play({**ASKED, "stream": not unary}, [plan])
    assert len(outcome.bodies) == 1
    last = spelled(outcome.unary if unary else outcome.events[-1])
    assert last["meta_info"]["output_token_logprobs"] == spelled(odd(oracle(ASKED).logprobs))
    assert last["meta_info"]["hidden"] == last["hidden on top"] == spelled(HIDDEN)


def begun(**more: Any) -> SglangExchange:
    exchange = opened({**ASKED, **more})
    exchange.dispatch(TOLD, "mine", 0.0)
    return exchange


ANSWER = b'{"output_ids":[1],"meta_info":{"id":"mine","finish_reason":{"type":"length","length":1},"x":[NaN,-Infinity],'
ANSWER += b'"completion_tokens":1}}'


@pytest.mark.parametrize("params", [{"max_new_tokens": 1}, {"max_new_tokens": 1, "regex": "x"}])
def test_a_whole_answer_is_passed_as_it_came(params: dict[str, Any]) -> None:
    """Of a request that is not migratable, and of a worker that does not stream: no 502 for a literal."""
    exchange = begun(sampling_params=params)
    assert exchange.head(200, JSON_HEAD) is Reading.WHOLE
    exchange.body(ANSWER, 1.0)
    assert exchange.end is End.FINISHED, exchange.detail
    assert exchange.answer(2.0).body == ANSWER


@pytest.mark.parametrize("body", [ANSWER[:-1], b"nan", b"[NaN,]", b"NaN NaN", b""])
def test_what_is_no_json_with_them_either(body: bytes) -> None:
    exchange = begun(sampling_params={"max_new_tokens": 1, "regex": "x"})
    exchange.head(200, JSON_HEAD)
    exchange.body(body, 1.0)
    assert exchange.end is End.GARBAGE


def test_a_stream_that_is_not_migratable() -> None:
    exchange = begun(stream=True, sampling_params={"max_new_tokens": 1, "regex": "x"})
    exchange.head(200, SSE_HEAD)
    event = sse(ANSWER)
    assert exchange.feed([event, (b"data: [DONE]\n\n", b"[DONE]")], 1.0) == event[0] + b"data: [DONE]\n\n"
    assert exchange.end is End.FINISHED


def test_a_text_that_looks_like_a_shielded_literal() -> None:
    """A model may say so; it is text, before and after a cut."""
    exchange = begun(stream=True)
    out = b""
    for name, ids in (("mine", [7]), ("again", [8])):
        if name == "again":
            exchange.dispatch(TOLD, name, 2.0)
        exchange.head(200, SSE_HEAD)
        meta = {"id": name, "finish_reason": None, "completion_tokens": 1, "said": ["\0NaN", "\0-Infinity", NAN]}
        out = exchange.feed([sse({"output_ids": ids, "meta_info": meta})] * 2, 3.0)
    said = [json.loads(part[6:])["meta_info"]["said"] for part in out.split(b"\n\n")[:-1]]
    assert spelled(said) == [["\0NaN", "\0-Infinity", "literal NaN"]] * 2


def test_infos_that_hold_them_are_read() -> None:
    """A worker whose info has such a number somewhere must not seem to have told nothing."""
    infos = {"/server_info": b'{"version":"0.5.23","internal_states":[{"gen_throughput":NaN}]}'}
    assert SglangFormat().traits(infos).version == "0.5.23"


def test_a_body_that_holds_them_is_the_engines_to_refuse() -> None:
    exchange = SglangFormat().open(NativeRequest("POST", "/generate", JSON_HEAD, b'{"input_ids":[1],"x":NaN}'), "given")
    assert exchange.admit(TOLD).reason == "body"
    assert exchange.dispatch(TOLD, "x", 0.0).body == b'{"input_ids":[1],"x":NaN}'
