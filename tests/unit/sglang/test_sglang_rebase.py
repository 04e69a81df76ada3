"""The rebase table, field by field, and the JSON that carries it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang_kit import DIALECTS, DONE, SSE_HEAD, opened, sse

from dyn_relay.formats.base import CannotComplete, End
from dyn_relay.formats.sglang.answer import RULES, Rule
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.traits import UNKNOWN, Traits

#: What a text prompt needs of its worker.
SPEAKS = Traits(incremental=False, sampling_defaults={})
ASKED: dict[str, Any] = {"rid": "mine", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}, "stream": True}


def event(ids: list[int], total: int, top: dict[str, Any] | None = None, **meta: Any) -> tuple[bytes, bytes]:
    fixed = {"id": "again", "finish_reason": None, "completion_tokens": total}
    return sse({"output_ids": ids, "meta_info": {**fixed, **meta}, **(top or {})})


def cut_after_two(**meta: Any) -> SglangExchange:
    """A cumulative stream that was cut after two tokens; the first attempt told `meta` in each event."""
    exchange = opened(ASKED)
    exchange.dispatch(UNKNOWN, "mine", 10.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed([event([7], 1, id="mine", **meta), event([7, 8], 2, id="mine", **meta)], 11.0)
    exchange.dispatch(UNKNOWN, "again", 12.0)
    exchange.head(200, SSE_HEAD)
    return exchange


def finish(exchange: SglangExchange, now: float = 20.0, **meta: Any) -> dict[str, Any]:
    out = exchange.feed([event([9, 9], 2, **{"finish_reason": {"type": "length", "length": 2}, **meta}), DONE], now)
    assert exchange.end is End.FINISHED, exchange.detail
    result: dict[str, Any] = json.loads(out.split(b"\n\n")[0][6:])["meta_info"]
    return result


@pytest.mark.parametrize(
    ("name", "first", "second", "seen"),
    [
        ("prompt_tokens", 2, 4, 2),
        ("cached_tokens", 1, 3, 1),
        ("cached_tokens_details", {"device": 1}, None, {"device": 1}),
        ("image_tokens", 5, 5, 5),
        ("queue_time", 0.5, 0.1, 0.5),
        ("prefill_finished_time", 11.0, 22.0, 11.0),
        ("input_token_logprobs", [[None, 1, None]], [], [[None, 1, None]]),
        ("input_top_logprobs_val_flat", [1.5], [], [1.5]),
        ("num_retractions", 1, 2, 3),
        ("reasoning_tokens", 0, 0, 0),
        ("output_token_logprobs_length", 2, 2, 4),
        ("dp_rank", 0, 1, 1),
        ("routed_experts", None, "AAAA", "AAAA"),
        ("customised", {"a": 1}, {"b": 2}, {"b": 2}),
        ("spec_verify_ct", 3, 4, 7),
        ("spec_accept_token_num", 3, 4, 7),
        ("spec_correct_drafts_histogram", [1, 2], [1, 1, 1], [2, 3, 1]),
        ("spec_cap_length", 1.5, 2.5, 2.5),
    ],
)
def test_field(name: str, first: Any, second: Any, seen: Any) -> None:
    """M1, M2, M5, F5, F6: an engine's counters are added up, and are not made to agree with the tokens."""
    assert finish(cut_after_two(**{name: first}), **{name: second})[name] == seen


@pytest.mark.parametrize("name", ["prompt_tokens", "cached_tokens", "input_token_logprobs"])
def test_first_attempt_had_none(name: str) -> None:
    """Never the second attempt's: its prompt is not the client's."""
    assert name not in finish(cut_after_two(), **{name: 4})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("name", "value"), [("queue_time", 0.5), ("input_token_logprobs", [[None, 1, None]])])
def test_what_the_continuation_does_not_tell(name: str, value: Any, stream: bool) -> None:
    """Another release, or one without --enable-metrics: the answer keeps what it had, before the output's lists."""
    has = {name: value, "output_token_logprobs_length": 1}
    exchange = begun(
        event([7], 1, id="mine", **has),
        event([7, 8], 2, id="mine", **has),
        stream=stream,
    )
    end = {"finish_reason": {"type": "length", "length": 2}, "output_token_logprobs_length": 2, "last": 1}
    out = exchange.feed([event([9, 9], 2, **end), DONE], 20.0)
    meta = json.loads(out.split(b"\n\n")[0][6:] if stream else exchange.answer(21.0).body)["meta_info"]
    assert list(meta) == ["id", "finish_reason", "completion_tokens", name, "output_token_logprobs_length", "last"]
    assert meta[name] == value


def test_counters_that_the_continuation_does_not_tell() -> None:
    assert finish(cut_after_two(spec_verify_ct=3, num_retractions=1))["spec_verify_ct"] == 3


def test_prompt_metadata_is_the_first_attempts_newest() -> None:
    """As an uninterrupted answer has it: a wait that ended meanwhile is told later than the first event."""
    late = event([7, 8], 2, id="mine", storage_staging_wait=0.25, queue_time=2.0)
    meta = finish(begun(event([7], 1, id="mine", queue_time=1.0), late), queue_time=9.0)
    assert (meta["storage_staging_wait"], meta["queue_time"]) == (0.25, 2.0)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("again", [{}, {"prompt_token_ids": [5, 6, 7, 8]}])
def test_prompt_token_ids(asked: bool, again: dict[str, Any]) -> None:
    """The first attempt's in every event, also if a later worker does not know the field."""
    exchange = opened({**ASKED, "input_ids": None, "text": "hi", "return_prompt_token_ids": asked})
    exchange.dispatch(SPEAKS, "mine", 10.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed([event([7], 1, {"prompt_token_ids": [5, 6]}, id="mine")], 11.0)
    exchange.dispatch(SPEAKS, "again", 12.0)
    exchange.head(200, SSE_HEAD)
    out = exchange.feed([event([9], 1, again), event([9, 9], 2, again)], 13.0)
    events = [json.loads(part[6:]) for part in out.split(b"\n\n")[:-1]]
    assert [one.get("prompt_token_ids") for one in events] == [[5, 6] if asked else None] * 2


def test_prompt_token_ids_of_a_later_attempt_only() -> None:
    """Its prompt is not the client's."""
    assert b"prompt_token_ids" not in cut_after_two().feed([event([9], 1, {"prompt_token_ids": [1, 2, 7, 8]})], 13.0)


def test_an_abort_echo_of_a_continuation() -> None:
    """The answer has run, elsewhere: what that told of the prompt stays, and its weights made the tokens."""
    exchange = cut_after_two(queue_time=0.5, prompt_tokens=2, weight_version="7")
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    spans = [{"version": "8", "start": 0, "end": 0}]
    echo = event([], 0, finish_reason=reason, weight_version="8", weight_versions=spans)
    out = exchange.feed([echo, DONE], 13.0)
    assert exchange.end is End.ABORTED
    told = json.loads(out.split(b"\n\n")[0][6:])["meta_info"]
    assert told.pop("weight_versions") == [{"version": "7", "start": 0, "end": 2}]
    assert told == {
        "id": "mine",
        "finish_reason": reason,
        "completion_tokens": 2,
        "weight_version": "7",
        "queue_time": 0.5,
        "prompt_tokens": 2,
    }


@pytest.mark.parametrize("name", [name for name, found in RULES.items() if found is Rule.UNCONTINUED])
def test_what_cannot_be_joined_is_not_continued(name: str) -> None:
    """Also if nobody has asked for it."""
    exchange = opened(ASKED)
    exchange.dispatch(UNKNOWN, "mine", 10.0)
    exchange.head(200, SSE_HEAD)
    first = event([7], 1, id="mine", **{name: [1]})
    assert exchange.feed([first], 11.0) == first[0]
    assert exchange.verdict.reason == name
    with pytest.raises(CannotComplete, match=name):
        exchange.complete(12.0)


@pytest.mark.parametrize(
    ("reason", "seen"),
    [
        ({"type": "length", "length": 2}, {"type": "length", "length": 4}),
        ({"type": "stop", "matched": 9}, {"type": "stop", "matched": 9}),
        ({"type": "stop", "matched": [9, 9], "new": 1}, {"type": "stop", "matched": [9, 9], "new": 1}),
    ],
)
def test_finish_reason(reason: dict[str, Any], seen: dict[str, Any]) -> None:
    """E10."""
    assert finish(cut_after_two(), finish_reason=reason)["finish_reason"] == seen


def test_ratios() -> None:
    """M1: recomputed if each attempt told its parts, else the engine's own, which describe the same steps."""
    told = {"spec_accept_token_num": 1, "spec_draft_token_num": 4, "spec_verify_ct": 2}
    last = {"spec_accept_token_num": 3, "spec_draft_token_num": 4, "spec_verify_ct": 1, "spec_accept_rate": 0.75}
    assert finish(cut_after_two(**told), **last)["spec_accept_rate"] == 0.5
    assert finish(cut_after_two(**told), **last, spec_accept_length=2.0)["spec_accept_length"] == pytest.approx(4 / 3)
    assert finish(cut_after_two(), **last)["spec_accept_rate"] == 0.75
    new = {"spec_num_correct_drafts": 1, "spec_num_proposed_drafts": 2}
    assert finish(cut_after_two(**new), **new, spec_accept_rate=0.1)["spec_accept_rate"] == 0.5
    assert finish(cut_after_two(**new), spec_accept_rate=0.1)["spec_accept_rate"] == 0.1


def test_times_are_ours_after_a_cut() -> None:
    """Dispatched at 10 and 12, first token at 11, finished at 20."""
    meta = finish(
        cut_after_two(),
        e2e_latency=0.1,
        first_token_latency=0.1,
        request_received_ts=1012.0,
        api_server_dispatch_finish_ts=1012.5,
        decode_throughput=5.0,
        request_finished_ts=1020.0,
        response_sent_to_client_ts=1020.0,
    )
    assert meta["e2e_latency"] == 10.0
    assert meta["first_token_latency"] == 1.0
    assert meta["request_received_ts"] == 1010.0
    assert meta["api_server_dispatch_finish_ts"] == 1010.5
    assert meta["decode_throughput"] == pytest.approx(3 / 9)
    assert meta["request_finished_ts"] == meta["response_sent_to_client_ts"] == 1020.0


def test_sent_time_of_a_later_attempts_first_event_is_left_out() -> None:
    exchange = cut_after_two()
    out = exchange.feed([event([9], 1, response_sent_to_client_ts=5.0), event([9, 9], 2)], 13.0)
    assert b"response_sent_to_client_ts" not in out


ROWS = ["output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"]
ROWS += ["output_token_sampling_mask", "output_token_sampling_logprobs"]


def test_every_known_list_is_tried() -> None:
    assert {name for name, found in RULES.items() if found is Rule.ROWS} == set(ROWS)


def begun(*events: tuple[bytes, bytes], stream: bool = True) -> SglangExchange:
    """An answer of two tokens that was cut; the next attempt has begun."""
    exchange = opened({**ASKED, "stream": stream})
    exchange.dispatch(UNKNOWN, "mine", 10.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed(events, 11.0)
    exchange.dispatch(UNKNOWN, "again", 12.0)
    exchange.head(200, SSE_HEAD)
    return exchange


def told(dialect: str, name: str, *rows: Any, id: str = "mine") -> list[tuple[bytes, bytes]]:
    """One event a token, with a list of its own beside the ids."""
    ids, seen = [7, 8], []
    for at in range(len(rows)):
        since = (0, 0) if dialect == "cumulative" else (at, at) if dialect == "incremental" else (at, 0)
        seen.append(event(ids[since[0] : at + 1], at + 1, id=id, **{name: list(rows[since[1] : at + 1])}))
    return seen


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", [*ROWS, "customised_rows"])
def test_rows_are_joined(name: str, dialect: str) -> None:
    exchange = begun(*told(dialect, name, "a", [None, 1.50]))
    end = {"finish_reason": {"type": "length", "length": 2}}
    out = exchange.feed([event([9], 1, **{name: ["c"]}), event([9, 9], 2, **end, **{name: ["c", "d"]}), DONE], 13.0)
    assert exchange.end is End.FINISHED, exchange.detail
    metas = [json.loads(part[6:])["meta_info"] for part in out.split(b"\n\n")[:2]]
    kept = [] if dialect == "incremental" else ["a", [None, 1.5], "c"]
    assert [meta[name] for meta in metas] == [kept or ["c"], [*kept, "d"]]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", [*ROWS, "customised_rows"])
def test_rows_that_a_continuation_does_not_have(name: str, dialect: str) -> None:
    """Law 5: the answer would go on without them, and half of one be taken for the whole. Another worker has them."""
    exchange = begun(*told(dialect, name, "a", "b"))
    assert exchange.feed([event([9], 1)], 13.0) == b""
    assert (exchange.end, name in exchange.detail) == (End.GARBAGE, True)
    assert exchange.complete(14.0) is None


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_only_a_continuation_has(name: str, dialect: str) -> None:
    exchange = begun(*told(dialect, "other", "a", "b"))
    assert exchange.feed([event([9], 1, other=["c"], **{name: ["x"]})], 13.0) == b""
    assert (exchange.end, name in exchange.detail) == (End.GARBAGE, True)


@pytest.mark.parametrize("name", ROWS)
def test_null_is_no_list(name: str) -> None:
    """What a release says of a list that nobody asked for."""
    exchange = begun(*told("cumulative", "other", "a", "b"))
    assert exchange.feed([event([9], 1, other=["c"], **{name: None})], 13.0)


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_do_not_line_up(name: str) -> None:
    """An answer whose lists are short is not continued: nobody could tell which token has none."""
    with pytest.raises(CannotComplete, match=name):
        begun(event([7], 1, id="mine", **{name: [1]}), event([7, 8], 2, id="mine", **{name: [1]}))
    exchange = begun(*told("cumulative", name, "a", "b"))
    deltas = [event([9], 1, **{name: ["c"]}), event([9], 2, **{name: ["d"]}), event([9], 3, **{name: []})]
    exchange.feed(deltas, 13.0)
    assert (exchange.end, name in exchange.detail) == (End.GARBAGE, True)


@pytest.mark.parametrize(
    ("first", "second", "spans"),
    [
        ("7", [("8", 0, 2)], [("7", 0, 2), ("8", 2, 4)]),
        ("7", [("7", 0, 1), ("8", 1, 2)], [("7", 0, 3), ("8", 3, 4)]),
        (7, [(7, 0, 2)], [(7, 0, 4)]),
    ],
)
def test_weight_versions(first: Any, second: list[tuple[Any, int, int]], spans: list[tuple[Any, int, int]]) -> None:
    """H2."""
    told = [{"version": version, "start": start, "end": end} for version, start, end in second]
    exchange = cut_after_two(weight_version=first)
    meta = finish(exchange, weight_version=second[-1][0], weight_versions=told)
    assert [tuple(span.values()) for span in meta["weight_versions"]] == spans
    assert meta["weight_version"] == spans[-1][0]
    assert exchange.crossed_versions() == (first != second[-1][0])


def test_weight_changes_inside_an_attempt() -> None:
    exchange = opened(ASKED)
    exchange.dispatch(UNKNOWN, "mine", 0.0)
    exchange.head(200, SSE_HEAD)
    first = [event([7], 1, id="mine", weight_version="1"), event([7, 8], 2, id="mine", weight_version="2")]
    exchange.feed(first, 1.0)
    assert exchange.crossed_versions()
    exchange.dispatch(UNKNOWN, "again", 2.0)
    exchange.head(200, SSE_HEAD)
    told = [{"version": "2", "start": 0, "end": 2}]
    meta = finish(exchange, weight_version="2", weight_versions=told)
    assert [tuple(span.values()) for span in meta["weight_versions"]] == [("1", 0, 1), ("2", 1, 4)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_first_attempt_of_whole_lists_is_told_in_the_engines_words(stream: bool) -> None:
    """All but the name: the newest prompt metadata, and lists that we would not know how to join."""
    exchange = opened({**ASKED, "stream": stream})
    exchange.dispatch(UNKNOWN, "theirs", 10.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed([event([7], 1, id="theirs", queue_time=0.5), event([7, 8], 2, id="theirs", queue_time=0.5)], 11.0)
    last = {"queue_time": 0.25, "input_extra": [1], "output_token_logprobs": [[-1.0, 9, None]], "spec_accept_rate": 0.5}
    ended = {"id": "theirs", "finish_reason": {"type": "length", "length": 4}, "completion_tokens": 4, **last}
    out = exchange.feed([sse({"output_ids": [7, 8, 9, 9], "meta_info": ended}), DONE], 12.0)
    told = json.loads(out.split(b"\n\n")[0][6:] if stream else exchange.answer(12.0).body)
    assert told == {"output_ids": [7, 8, 9, 9], "meta_info": {**ended, "id": "mine"}}


def test_text_of_a_later_attempt_only() -> None:
    """The answer had none so far: half of one is worse, and a tokenizer's EOS might end it elsewhere."""
    exchange = cut_after_two()
    assert exchange.feed([event([9], 1, {"text": "x"})], 13.0) == b""
    assert exchange.end is End.GARBAGE


def test_order_and_unknown_fields_survive() -> None:
    """F5: nothing is added, dropped or moved but what the table says."""
    exchange = cut_after_two(prompt_tokens=2)
    data = (
        b'{"new top":[1.0, 2],"output_ids":[9],"meta_info":{"z":1.50,"id":"again","prompt_tokens":4,'
        b'"big":18446744073709551615,'
        b'"finish_reason":null,"completion_tokens":1,"text in it":"data: [DONE]\\n\\n \\u00e9"},"index":null}'
    )
    assert exchange.feed([sse(data)], 13.0) == (
        b'data: {"new top":[1.0, 2],"output_ids":[7,8,9],"meta_info":{"z":1.50,"id":"mine","prompt_tokens":2,'
        b'"big":18446744073709551615,"finish_reason":null,"completion_tokens":3,'
        b'"text in it":"data: [DONE]\\n\\n \\u00e9"},"index":null}\n\n'
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("literal", ["NaN", "-Infinity", "Infinity", "null"])
def test_numbers_that_are_none(literal: str, stream: bool) -> None:
    """F1: such literals are read, joined and sent on as the worker spelled them, before and after a cut."""

    def odd(ids: list[int], total: int, done: bool = False, id: str = "again") -> tuple[bytes, bytes]:
        rows = [[literal, "a NaN", one] for one in ids]
        reason = {"type": "length", "length": total} if done else None
        _, data = event(ids, total, id=id, output_token_logprobs=rows, finish_reason=reason)
        return sse(data.replace(b'"%s"' % literal.encode(), literal.encode()))

    exchange = opened({**ASKED, "stream": stream})
    exchange.dispatch(UNKNOWN, "mine", 0.0)
    exchange.head(200, SSE_HEAD)
    first = [odd([7], 1, id="mine"), odd([7, 8], 2, id="mine")]
    assert exchange.feed(first, 1.0) == (first[0][0] + first[1][0] if stream else b"")
    exchange.dispatch(UNKNOWN, "again", 2.0)
    exchange.head(200, SSE_HEAD)
    out = exchange.feed([odd([9], 1), odd([9, 5], 2, done=True), DONE], 3.0)
    assert exchange.end is End.FINISHED, exchange.detail
    data = out.split(b"\n\n")[1] if stream else exchange.answer(4.0).body
    rows = b",".join(b'[%s,"a NaN",%d]' % (literal.encode(), one) for one in (7, 8, 9, 5))
    assert b'"output_token_logprobs":[%s]' % rows in data
    assert b'"output_ids":[7,8,9,5]' in data


def test_a_counter_that_is_no_number_ends_the_answer_loudly() -> None:
    exchange = opened({**ASKED, "stream": False})
    exchange.dispatch(UNKNOWN, "mine", 10.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed([event([7], 1, id="mine", spec_verify_ct=3), event([7, 8], 2, id="mine", spec_verify_ct=3)], 11.0)
    exchange.dispatch(UNKNOWN, "again", 12.0)
    exchange.head(200, SSE_HEAD)
    _, data = event([9, 9], 2, finish_reason={"type": "length", "length": 2}, spec_verify_ct=4)
    exchange.feed([sse(data.replace(b'"spec_verify_ct":4', b'"spec_verify_ct":1e999')), DONE], 13.0)
    with pytest.raises(CannotComplete, match="meta_info"):
        exchange.answer(14.0)
