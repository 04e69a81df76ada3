"""Events that only bring more tokens pass quickly, and what is counted of them is what reading them whole counts."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import event as seen
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_kit import SSE_HEAD, Engine, dumps, opened, sse

from dyn_relay.formats.base import End, Event
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.sglang.growing import Growing
from dyn_relay.formats.sglang.wire import Foreign
from dyn_relay.formats.traits import Traits

BODY = {"rid": "r", "input_ids": [5, 6, 7], "stream": True, "return_logprob": True}


def begun(body: dict[str, Any], incremental: bool | None, *, slow: bool = False) -> SglangExchange:
    """`slow`: each event is read whole."""
    traits = Traits(sampling_defaults={}, incremental=incremental)
    exchange = opened(body, traits)
    exchange.dispatch(traits, body["rid"], 0.0)
    exchange.head(200, SSE_HEAD)
    if slow:
        exchange._even = False
    return exchange


def take(exchange: SglangExchange, one: Event) -> tuple[bytes, bool]:
    """As the relay does: what passes goes out as it is to the client of a stream."""
    if exchange.streaming and exchange.passes(one[1]):
        return one[0], True
    return exchange.feed([one], 1.0), False


def state(exchange: SglangExchange) -> list[object]:
    """What the client was given, and all that was noted of it."""
    one = exchange._attempt
    noted = [one.tokens, one.events, one.last_delta, one.newest, one.dialect, one.marks, one.version, one.stated]
    return [exchange.delivered, exchange.attempt_tokens, exchange.end, exchange.detail, exchange.leavable, *noted]


def asked_next(exchange: SglangExchange) -> bytes:
    """What the next worker is asked after a cut: it shows every token that was kept."""
    return exchange.dispatch(Traits(sampling_defaults={}), "r2", 9.0).body


bodies = st.fixed_dictionaries(
    {
        "most": st.integers(2, 40),
        "stream": st.booleans(),
        "logprobs": st.booleans(),
        "tops": st.integers(0, 1),
        "rid": st.sampled_from("r\u00e9]"),
    }
).map(
    lambda drawn: {
        **BODY,
        "rid": drawn["rid"],
        "stream": drawn["stream"],
        "return_logprob": drawn["logprobs"],
        "top_logprobs_num": drawn["tops"] if drawn["logprobs"] else 0,
        "sampling_params": {"max_new_tokens": drawn["most"]},
    }
)


@settings(max_examples=512)
@given(
    body=bodies,
    dialect=st.sampled_from(["cumulative", "incremental", "mixed"]),
    chunks=st.lists(st.integers(1, 4), max_size=12),
    cut=st.integers(0, 60),
    told=st.booleans(),
    turn=st.none() | st.integers(0, 9),
)
def test_what_passes_is_counted_as_what_is_read(
    body: dict[str, Any], dialect: str, chunks: list[int], cut: int, told: bool, turn: int | None
) -> None:
    events = Engine(dialect, tuple(chunks), turn=turn).events(body)
    incremental = dialect == "incremental" if told else None
    quick, slow = begun(body, incremental), begun(body, incremental, slow=True)
    passed = 0
    for one in events[:cut]:
        out, went = take(quick, one)
        passed += went
        assert (out, state(quick)) == (slow.feed([one], 1.0), state(slow))
    seen(f"passed: {bool(passed)}")
    if quick.end is End.FINISHED and not quick.streaming:
        assert quick.answer(1.0) == slow.answer(1.0)
    if quick.end is None and quick.complete(2.0) is None and slow.complete(2.0) is None:
        assert asked_next(quick) == asked_next(slow)


@pytest.mark.parametrize("dialect", ["cumulative", "incremental", "mixed"])
@pytest.mark.parametrize("logprobs", [True, False])
def test_almost_all_events_pass(dialect: str, logprobs: bool) -> None:
    body = {**BODY, "return_logprob": logprobs, "sampling_params": {"max_new_tokens": 40}}
    exchange = begun(body, dialect == "incremental")
    passed = sum(take(exchange, one)[1] for one in Engine(dialect).events(body))
    assert passed >= 37  # not the first two, which show the dialect, nor the finish
    assert exchange.delivered == 40


@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
@pytest.mark.parametrize("stream", [True, False])
def test_line_ends_in_an_event_are_gone_from_what_is_made_of_it(dialect: str, stream: bool) -> None:
    """An engine may spread an event over several data lines; one that is written here has one."""
    made = []
    for slow in (False, True):
        exchange = begun(
            {**BODY, "stream": stream, "sampling_params": {"max_new_tokens": 20}}, dialect == "incremental", slow=slow
        )
        for _, data in Engine(dialect).events({**BODY, "sampling_params": {"max_new_tokens": 40}})[:20]:
            spread = data.replace(b'"meta_info":{', b'"meta_info":{\n"odd":{\n"a":1},')
            exchange.feed([(b"data: " + spread.replace(b"\n", b"\ndata: ") + b"\n\n", spread)], 1.0)
        finish = exchange.complete(2.0)  # of what was cut before its last word
        assert finish is not None
        assert b"\n" not in finish.removesuffix(b"\n\ndata: [DONE]\n\n")
        made.append((finish, exchange.delivered))
    assert made[0] == made[1]


@pytest.mark.parametrize("field", [b'"index":"x"', b'"error":1', b'"text":5', b'"meta_info":7'])
@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
def test_a_field_of_another_kind_is_told_as_it_is_told_when_all_is_read(dialect: str, field: bytes) -> None:
    body = {**BODY, "sampling_params": {"max_new_tokens": 40}}
    states = []
    for slow in (False, True):
        exchange = begun(body, dialect == "incremental", slow=slow)
        for number, (_, data) in enumerate(Engine(dialect).events(body)[:8]):
            take(exchange, sse(data[:-1] + b"," + field + b"}" if number == 6 else data))
        states.append(state(exchange))
    assert states[0] == states[1]


def test_a_unary_answer_is_counted_quickly_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cumulative stream only the newest event is needed."""
    body = {**BODY, "stream": False, "sampling_params": {"max_new_tokens": 40}}
    exchange = begun(body, False)
    passed = []
    passes = SglangExchange.passes
    monkeypatch.setattr(SglangExchange, "passes", lambda one, data: passed.append(passes(one, data)) or passed[-1])
    for one in Engine("cumulative").events(body):
        assert exchange.feed([one], 1.0) == b""
    assert passed.count(True) >= 37
    assert len(json.loads(exchange.answer(1.0).body)["output_ids"]) == 40


def test_nothing_passes_after_the_finish() -> None:
    body = {**BODY, "sampling_params": {"max_new_tokens": 5}}
    events = Engine("incremental").events(body)
    exchange = begun(body, True)
    for one in events[:-1]:
        take(exchange, one)
    late = json.loads(events[3][1])
    late["meta_info"]["completion_tokens"] = 6
    assert not exchange.passes(dumps(late))
    assert exchange.delivered == 5


def changed(one: Event, change: str) -> Event:
    """The event with something that is no more of the same."""
    body = json.loads(one[1])
    meta = body["meta_info"]
    match change:
        case "an id of old":
            body["output_ids"][0] += 1
        case "an id too many":
            body["output_ids"].append(3)
        case "an id too few":
            del body["output_ids"][-1]
        case "a count too many":
            meta["completion_tokens"] += 1
        case "a count that goes back":
            meta["completion_tokens"] = 1
        case "another's":
            meta["id"] = "q"
        case "other weights":
            meta["weight_version"] = "w"
        case "no count":
            del meta["completion_tokens"]
        case "no ids":
            del body["output_ids"]
        case "text for an id":
            body["output_ids"][-1] = "7"
        case "a negative id":
            body["output_ids"][-1] = -7
        case "an id beyond all":
            body["output_ids"][-1] = 1 << 70
        case "ids late":
            body = {"meta_info": meta, "output_ids": body["output_ids"]}
        case "a row of old":
            meta["output_token_logprobs"][0][0] = -1.25
        case "rows elsewhere":
            body["output_token_logprobs"] = meta.pop("output_token_logprobs")
        case "spans":
            meta["weight_versions"] = [{"version": "default", "start": 0, "end": meta["completion_tokens"]}]
        case "abort":
            meta["finish_reason"] = {"type": "abort", "message": "m", "status_code": 500, "err_type": None}
        case "error":
            body = {"error": {"message": "m", "code": 500}}
    return sse(body)


CHANGES = [
    "an id of old",
    "an id too many",
    "an id too few",
    "a count too many",
    "a count that goes back",
    "another's",
    "other weights",
    "no count",
    "no ids",
    "text for an id",
    "a negative id",
    "an id beyond all",
    "ids late",
    "a row of old",
    "rows elsewhere",
    "spans",
    "abort",
    "error",
]


@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_more_of_the_same_is_read_as_ever(dialect: str, change: str) -> None:
    body = {**BODY, "sampling_params": {"max_new_tokens": 12}}
    events = Engine(dialect).events(body)
    incremental = dialect == "incremental"
    quick, slow = begun(body, incremental), begun(body, incremental, slow=True)
    for one in [*events[:6], changed(events[6], change), *events[7:9]]:
        out, _ = take(quick, one)
        assert (out, quick.end, quick.detail) == (slow.feed([one], 1.0), slow.end, slow.detail)
        if quick.end is not None:
            break
        assert state(quick) == state(slow)
    if slow.verdict.migratable and quick.complete(2.0) is None and slow.complete(2.0) is None:
        assert asked_next(quick) == asked_next(slow)


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"output_ids":[', b"\xff", b"[" * 5000])
@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
def test_what_is_no_event_does_not_pass(dialect: str, garbage: bytes) -> None:
    body = {**BODY, "sampling_params": {"max_new_tokens": 12}}
    exchange = begun(body, dialect == "incremental")
    for one in Engine(dialect).events(body)[:5]:
        take(exchange, one)
    assert not exchange.passes(garbage)
    assert exchange.delivered == 5


def cumulative(ids: str, rows: str, total: int) -> bytes:
    meta = f'"id":"r","output_token_logprobs":[{rows}],"completion_tokens":{total},"cached_tokens":0'
    return f'{{"output_ids":[{ids}],"meta_info":{{{meta}}}}}'.encode()


def test_what_was_read_before_is_cut_out() -> None:
    growing = Growing(cumulative("10,11", "[1,10],[2,11]", 2))
    for ids, rows, total, brought in [
        ("10,11,12", "[1,10],[2,11],[3,12]", 3, [12]),
        ("10,11,12,13,14", "[1,10],[2,11],[3,12],[4,13],[5,14]", 5, [13, 14]),
    ]:
        delta = growing.decode(cumulative(ids, rows, total))
        assert delta.output_ids == brought
        assert delta.meta_info is not None
        assert delta.meta_info.completion_tokens == total


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        ("1,2,3,4,5", "[1,10],[2,11],[3,12]"),  # other ids that are as long
        ("10,1157,8", "[1,10],[2,11],[3,12]"),  # an id that has become longer
        ("10,11", "[1,10],[2,11],[3,12]"),
        ("10", "[1,10],[2,11],[3,12]"),
        ("10,11,12", "[1,10],[2,11]"),
        ("10,11,12", "[1,10],[2,1}],[3,12]"),  # what is no JSON, where the rows of before would stand
        ("10,11,12", "[9,10],[2,11],[3,12]"),
        ("10,11,12", ""),
    ],
)
def test_what_is_not_the_one_before_and_more_is_no_delta(ids: str, rows: str) -> None:
    growing = Growing(cumulative("10,11", "[1,10],[2,11]", 2))
    with pytest.raises((Foreign, msgspec.DecodeError)):
        growing.decode(cumulative(ids, rows, 4))


def test_other_words_between_ids_and_rows_are_no_delta() -> None:
    growing = Growing(cumulative("10,11", "[1,10],[2,11]", 2))
    with pytest.raises(Foreign):
        growing.decode(cumulative("10,11,12", "[1,10],[2,11],[3,12]", 3).replace(b'"r"', b'"q"'))
