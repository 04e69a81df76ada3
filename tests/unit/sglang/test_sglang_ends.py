"""How attempts end: every shape in which an engine says its last word, and what the client gets of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang_kit import DONE, JSON_HEAD, SSE_HEAD, Engine, dumps, opened, sse

from dyn_relay.formats.base import CannotComplete, End, Event, Reading
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.traits import UNKNOWN

ASKED: dict[str, Any] = {
    "rid": "mine",
    "input_ids": [1, 2, 3],
    "sampling_params": {"max_new_tokens": 5},
    "stream": True,
}


def started(body: Any = None, tokens: int = 0, dialect: str = "cumulative", **options: Any) -> SglangExchange:
    """An exchange whose first attempt has delivered `tokens`."""
    exchange = opened(ASKED if body is None else body, **options)
    sent = exchange.dispatch(UNKNOWN, "mine", 0.0)
    assert exchange.head(200, SSE_HEAD) is Reading.EVENTS
    for event in Engine(dialect).events(json.loads(sent.body))[:tokens]:
        exchange.feed([event], 1.0)
    assert exchange.delivered == tokens
    return exchange


def unary(**fields: Any) -> dict[str, Any]:
    return {**ASKED, "stream": False, **fields}


def abort(message: str, code: int | None, tokens: int = 0, ids: list[int] | None = None, **more: Any) -> Event:
    reason = {"type": "abort", "message": message, "status_code": code, "err_type": None}
    meta = {"id": "mine", "finish_reason": reason, "prompt_tokens": 3, "completion_tokens": tokens, **more}
    return sse({"output_ids": ids or [], "meta_info": meta})


def error(message: str, code: int) -> Event:
    return sse({"error": {"message": message, "type": "x", "code": code, "retryable": False}})


CASES = [
    # event, tokens before, end
    (abort("Input length (9 tokens) exceeds", 400, 1, [0]), 0, End.REFUSED),
    (abort("The request queue is full.", 503), 0, End.BUSY),
    (abort("The request is aborted by a higher priority request.", 503), 0, End.BUSY),
    (abort("Request waiting timeout reached.", 503), 0, End.BUSY),
    (abort("Request running timeout reached.", 503), 0, End.FAILED),
    (abort("The request queue is full.", 503, 2), 2, End.FAILED),
    (abort("Decode transfer failed for request", 500), 0, End.FAILED),
    (abort("Grammar accept_token failed", 500, 2), 2, End.FAILED),
    (error("max_new_tokens must be at least 0, got -1.", 400), 0, End.REFUSED),
    (error("boom", 500), 1, End.FAILED),
    (sse({"error": "plain"}), 0, End.REFUSED),
]


@pytest.mark.parametrize(("event", "tokens", "end"), CASES)
def test_errors_in_a_stream(event: Event, tokens: int, end: End) -> None:
    """Held back: the relay decides whether the client ever sees them. Their ids are no tokens."""
    exchange = started(tokens=tokens)
    assert exchange.feed([event, DONE], 2.0) == b""
    assert exchange.end is end
    assert exchange.delivered == tokens
    assert exchange.last_words() == event[0] + DONE[0]
    message = json.loads(event[1]).get("error") or json.loads(event[1])["meta_info"]["finish_reason"]
    assert exchange.detail == (message if isinstance(message, str) else message["message"])


@pytest.mark.parametrize(
    ("event", "status", "body"),
    [
        (abort("too long", 400, 1, [0]), 400, {"error": {"message": "too long"}}),
        (error("bad", 400), 400, {"error": {"message": "bad"}}),
        (
            abort("The request queue is full.", 503),
            503,
            {"object": "error", "message": "The request queue is full.", "type": "503", "param": None, "code": 503},
        ),
        (
            abort("transfer failed", 500),
            500,
            {"object": "error", "message": "transfer failed", "type": "500", "param": None, "code": 500},
        ),
    ],
)
def test_errors_for_a_unary_client(event: Event, status: int, body: dict[str, Any]) -> None:
    """The statuses and shapes that stock gives without `stream`."""
    exchange = started(unary())
    assert exchange.feed([event, DONE], 2.0) == b""
    answer = exchange.answer(3.0)
    assert (answer.status, json.loads(answer.body)) == (status, body)
    assert answer.content_type == b"application/json"


def test_last_words_of_another_attempt_carry_the_clients_rid() -> None:
    exchange = started(tokens=2)
    exchange.dispatch(UNKNOWN, "again", 3.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed([abort("no", 500)], 4.0)
    words = json.loads(exchange.last_words().split(b"\n\n")[0][6:])
    assert words["meta_info"]["id"] == "mine"


@pytest.mark.parametrize("mode", ["stream", "unary"])
def test_asked_abort(mode: str) -> None:
    """H1: status_code null is somebody's wish: relayed with its tokens, an answer of its own."""
    exchange = started(ASKED if mode == "stream" else unary(), tokens=1)
    ids = json.loads(Engine().events({**ASKED, "sampling_params": {"max_new_tokens": 9}})[1][1])["output_ids"]
    event = abort("Aborted", None, 2, ids)
    out = exchange.feed([event, DONE], 2.0)
    assert (exchange.end, exchange.delivered) == (End.ABORTED, 2)
    if mode == "stream":
        assert out == event[0] + DONE[0]
    else:
        assert exchange.answer(2.0).status == 200
        assert json.loads(exchange.answer(2.0).body)["output_ids"] == ids


def test_asked_abort_resumed() -> None:
    """H1: with on_abort="resume" it is an interruption; what was delivered stays, what was not comes again."""
    exchange = started(tokens=1, on_abort="resume")
    assert exchange.feed([abort("Aborted", None, 2, [7, 8]), DONE], 2.0) == b""
    assert (exchange.end, exchange.delivered) == (End.INTERRUPTED, 1)
    assert json.loads(exchange.dispatch(UNKNOWN, "again", 3.0).body)["sampling_params"]["max_new_tokens"] == 4


def echo_of(rid: str) -> Event:
    """An abort of a request that was not running: its last id and its whole lists, whatever the dialect."""
    meta = {
        "id": rid,
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "completion_tokens": 2,
        "output_token_logprobs": [[-1, 5, None], [-2, 6, None]],
    }
    return sse({"text": "", "output_ids": [99], "meta_info": meta})


@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
def test_abort_echo_is_no_delta(dialect: str) -> None:
    """An abort of a request that was not running repeats its last id and whole lists, in every dialect."""
    asked = {**ASKED, "return_logprob": True}
    exchange = started(asked, tokens=2, dialect=dialect)
    before = exchange.feed([echo_of("mine"), DONE], 2.0)
    assert before == echo_of("mine")[0] + DONE[0]
    assert (exchange.end, exchange.delivered) == (End.ABORTED, 2)
    # The same after a cut, where nothing of it is new.
    exchange = started(asked, tokens=2, dialect=dialect)
    sent = json.loads(exchange.dispatch(UNKNOWN, "again", 3.0).body)
    exchange.head(200, SSE_HEAD)
    events = Engine(dialect).events(sent)[:2]
    seen = [json.loads(exchange.feed([event], 4.0)[6:]) for event in events]
    echo = json.loads(exchange.feed([echo_of("again")], 5.0)[6:])
    assert echo["meta_info"]["id"] == "mine"
    assert echo["output_ids"] == (seen[-1]["output_ids"] if dialect == "cumulative" else [])
    rows = echo["meta_info"]["output_token_logprobs"]
    assert len(rows) == (4 if dialect == "cumulative" else 0)
    exchange.feed([DONE], 5.0)
    assert (exchange.end, exchange.delivered) == (End.ABORTED, 4)


@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
def test_abort_echo_unary(dialect: str) -> None:
    exchange = started(unary(return_logprob=True), tokens=2, dialect=dialect)
    exchange.feed([echo_of("mine"), DONE], 2.0)
    body = json.loads(exchange.answer(3.0).body)
    assert body["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(body["meta_info"]["output_token_logprobs"]) == 2
    if dialect == "incremental":
        assert len(body["output_ids"]) == 2


GARBAGE = [
    b"not json",
    b'{"output_ids":[1],"meta_info":{"completion_tokens":1}',
    b'{"output_ids":[1,2],"meta_info":{"completion_tokens":1}}',
    b'{"output_ids":[1,2,3,4,5],"meta_info":{"completion_tokens":3}}',
    b'{"output_ids":[1],"meta_info":{"completion_tokens":4}}',
    b'{"output_ids":[1],"meta_info":{"completion_tokens":1}}',
    b'{"output_ids":[],"meta_info":{"completion_tokens":4}}',
    b'{"output_ids":"x","meta_info":{"completion_tokens":4}}',
    b'{"output_ids":[1.5],"meta_info":{"completion_tokens":3}}',
    b'{"meta_info":{"completion_tokens":3}}',
    b'{"output_ids":[1]}',
    b"[]",
    b'{"output_ids":[1,1,1],"deep":' + b"[" * 5000 + b"]" * 5000 + b',"meta_info":{"completion_tokens":3}}',
    b"[DONE]",
]


@pytest.mark.parametrize("mode", ["stream", "unary"])
@pytest.mark.parametrize("dialect", ["cumulative", "incremental"])
@pytest.mark.parametrize("data", GARBAGE)
def test_garbage_is_never_forwarded(data: bytes, dialect: str, mode: str) -> None:
    """A count that does not add up, a finish that is missing: the attempt is lost, what was delivered is not."""
    exchange = started(ASKED if mode == "stream" else unary(), tokens=2, dialect=dialect)
    assert exchange.feed([sse(data)], 2.0) == b""
    assert exchange.end is End.GARBAGE
    assert exchange.detail
    assert exchange.delivered == 2
    sent = json.loads(exchange.dispatch(UNKNOWN, "again", 3.0).body)
    wanted = json.loads(Engine().events(ASKED)[1][1])["output_ids"]
    assert sent["input_ids"] == [1, 2, 3, *wanted]


@pytest.mark.parametrize("stream", [True, False])
def test_a_finish_that_does_not_add_up_is_none(stream: bool) -> None:
    """Law 8: it must not let a cut answer pass for a whole one."""
    exchange = started({**ASKED, "stream": stream}, tokens=2)
    reason = {"type": "length", "length": 5}
    finish = sse({"output_ids": [1, 2, 3], "meta_info": {"finish_reason": reason, "completion_tokens": 5}})
    assert exchange.feed([finish, DONE], 2.0) == b""
    assert exchange.end is End.GARBAGE
    assert exchange.complete(3.0) is None


def test_ids_that_no_engine_has() -> None:
    exchange = started(tokens=2, dialect="incremental")
    exchange.feed([sse({"output_ids": [5, -1], "meta_info": {"completion_tokens": 4}})], 2.0)
    assert exchange.end is End.GARBAGE
    assert len(json.loads(exchange.dispatch(UNKNOWN, "again", 3.0).body)["input_ids"]) == 5


def test_a_continuation_of_another_prompt() -> None:
    """A worker that cuts long prompts short would splice in another answer."""
    exchange = started(tokens=2)
    sent = json.loads(exchange.dispatch(UNKNOWN, "again", 3.0).body)
    exchange.head(200, SSE_HEAD)
    assert exchange.feed(Engine().events({**sent, "input_ids": sent["input_ids"][:-1]})[:1], 4.0) == b""
    assert exchange.end is End.GARBAGE


def test_events_after_the_end_are_ignored() -> None:
    exchange = started(tokens=2)
    exchange.feed([sse(b"x"), *Engine().events(ASKED)[2:]], 2.0)
    assert (exchange.end, exchange.delivered) == (End.GARBAGE, 2)


def test_comments_pass_and_are_no_progress() -> None:
    """O1."""
    comment: Event = (b": keep-alive\n\n", b"")
    exchange = started(tokens=1)
    assert exchange.feed([comment], 2.0) == comment[0]
    assert exchange.delivered == 1
    assert started(unary(), tokens=1).feed([comment], 2.0) == b""


@pytest.mark.parametrize(
    ("status", "end"),
    [(400, End.REFUSED), (401, End.REFUSED), (429, End.BUSY), (503, End.BUSY), (500, End.FAILED), (502, End.FAILED)],
)
@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"text": "x", "input_ids": None, "stream": False}])
def test_statuses(status: int, end: End, fields: dict[str, Any]) -> None:
    """A8, A13: the engine's own answer, whatever its shape, is kept for relaying."""
    exchange = opened({**ASKED, **fields})
    exchange.dispatch(UNKNOWN, "mine", 0.0)
    assert exchange.head(status, JSON_HEAD) is Reading.WHOLE
    exchange.body(b'{"error":"unknown field"}', 1.0)
    if status == 503 and not exchange.verdict.migratable:
        end = End.FAILED  # of a unary answer nothing is seen: it may have been made for an hour
    assert (exchange.end, exchange.detail) == (end, "unknown field")
    answer = exchange.answer(2.0)
    assert (answer.status, answer.body) == (status, b'{"error":"unknown field"}')


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"object":"error","message":"m"}', "m"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"", ""),
        (b"[1]", "[1]"),
    ],
)
def test_detail(body: bytes, detail: str) -> None:
    exchange = opened(ASKED)
    exchange.dispatch(UNKNOWN, "mine", 0.0)
    exchange.head(500, [])
    exchange.body(body, 1.0)
    assert exchange.detail == detail


def test_a_worker_that_does_not_stream() -> None:
    """Its answer in one piece is the answer of a unary client, byte for byte; after a cut it is rebased."""
    exchange = opened(unary())
    sent = json.loads(exchange.dispatch(UNKNOWN, "mine", 0.0).body)
    assert exchange.head(200, JSON_HEAD) is Reading.WHOLE
    data = Engine().events(sent)[-2][1]
    exchange.body(data, 1.0)
    assert exchange.end is End.FINISHED
    assert exchange.answer(2.0).body == data
    exchange = started(unary(), tokens=2)
    sent = json.loads(exchange.dispatch(UNKNOWN, "again", 3.0).body)
    exchange.head(200, JSON_HEAD)
    exchange.body(Engine().events(sent)[-2][1], 4.0)
    assert exchange.end is End.FINISHED
    body = json.loads(exchange.answer(5.0).body)
    assert body["output_ids"] == json.loads(data)["output_ids"]
    assert body["meta_info"]["id"] == "mine"


@pytest.mark.parametrize("data", [b"", b"{}", b"<html>", b'{"output_ids":[1],"meta_info":{"completion_tokens":1}}'])
def test_a_whole_answer_that_is_none(data: bytes) -> None:
    """A2: a 200 with nothing in it is no answer."""
    exchange = opened(unary())
    exchange.dispatch(UNKNOWN, "mine", 0.0)
    exchange.head(200, JSON_HEAD)
    exchange.body(data, 1.0)
    assert exchange.end is End.GARBAGE


def test_a_stream_answered_in_one_piece() -> None:
    exchange = opened(ASKED)
    exchange.dispatch(UNKNOWN, "mine", 0.0)
    exchange.head(200, JSON_HEAD)
    exchange.body(b"{}", 1.0)
    assert exchange.end is End.GARBAGE


# Requests that are not continued ------------------------------------------------------------------------------------

REGEX = {"input_ids": [1], "sampling_params": {"regex": "x"}, "stream": True}


def test_not_migratable_streams_pass_whole() -> None:
    exchange = opened(REGEX)
    assert exchange.dispatch(UNKNOWN, "x", 0.0).body == dumps(REGEX)
    assert exchange.head(200, SSE_HEAD) is Reading.EVENTS
    events = Engine().events({"rid": "x", "input_ids": [1], "sampling_params": {"max_new_tokens": 3}})
    strange: Event = (b"data: {strange\n\n", b"{strange")
    assert exchange.feed([events[0], strange], 1.0) == events[0][0] + strange[0]
    assert exchange.delivered == 1
    with pytest.raises(CannotComplete, match="regex"):
        exchange.complete(2.0)
    with pytest.raises(CannotComplete, match="regex"):
        exchange.dispatch(UNKNOWN, "y", 2.0)
    assert exchange.abort(2.0) is None
    assert exchange.feed(events[1:-1], 1.0) == b"".join(raw for raw, _ in events[1:-1])
    assert exchange.complete(2.0) == DONE[0]
    assert exchange.end is End.FINISHED


def test_not_migratable_and_nothing_shown_goes_elsewhere() -> None:
    """A8 for requests that are not continued: before the first token every worker is as good."""
    exchange = opened(REGEX)
    exchange.dispatch(UNKNOWN, "x", 0.0)
    exchange.head(200, SSE_HEAD)
    assert exchange.feed([abort("The request queue is full.", 503), DONE], 1.0) == b""
    assert exchange.end is End.BUSY
    assert exchange.complete(2.0) is None
    assert exchange.dispatch(UNKNOWN, "y", 2.0).body == dumps(REGEX)
    assert exchange.end is None


def test_choices_of_a_batch_pass_with_their_errors() -> None:
    exchange = opened({"input_ids": [[1], [2]], "stream": True})
    exchange.dispatch(UNKNOWN, "x", 0.0)
    exchange.head(200, SSE_HEAD)
    out = b""
    for index, tokens in ((0, 1), (1, 1), (0, 2), (1, 2)):
        meta = {"finish_reason": None, "completion_tokens": tokens}
        out += exchange.feed([sse({"output_ids": [1] * tokens, "meta_info": meta, "index": index})], 1.0)
    failed = {"finish_reason": {"type": "abort", "message": "m", "status_code": 500}, "completion_tokens": 2}
    out += exchange.feed([sse({"output_ids": [], "meta_info": failed, "index": 0})], 1.0)
    assert out.count(b"data: ") == 5
    assert (exchange.end, exchange.delivered) == (None, 4)
    assert exchange.feed([DONE], 2.0) == DONE[0]
    assert exchange.end is End.FINISHED


@pytest.mark.parametrize("body", [b"", b'{"output_ids":[1,2', b": comment\n\n"])
def test_a_refused_answer_that_is_none_is_not_handed_on(body: bytes) -> None:
    """A2: half an answer, whose end nobody told, and no answer at all."""
    exchange = opened({**REGEX, "stream": False})
    exchange.dispatch(UNKNOWN, "x", 0.0)
    assert exchange.head(200, JSON_HEAD) is Reading.WHOLE
    exchange.body(body, 1.0)
    assert exchange.end is End.GARBAGE


def test_a_refused_answer_is_the_workers_own() -> None:
    exchange = opened({**REGEX, "stream": False})
    exchange.dispatch(UNKNOWN, "x", 0.0)
    exchange.head(200, JSON_HEAD)
    whole = b'[ {"meta_info": {"completion_tokens": 1e999}} ]'
    exchange.body(whole, 1.0)
    assert exchange.end is End.FINISHED
    assert exchange.answer(2.0).body == whole


def test_answers_with_text() -> None:
    """E7: a tokenizer that shows only in the answer makes the request not continuable, and the verdict says so."""
    exchange = opened(ASKED)
    exchange.dispatch(UNKNOWN, "mine", 0.0)
    exchange.head(200, SSE_HEAD)
    event = sse({"text": "a", "output_ids": [1], "meta_info": {"finish_reason": None, "completion_tokens": 1}})
    assert exchange.feed([event], 1.0) == event[0]
    assert exchange.verdict.reason == "text"
    with pytest.raises(CannotComplete, match="text"):
        exchange.complete(2.0)
    with pytest.raises(CannotComplete, match="text"):
        exchange.dispatch(UNKNOWN, "again", 2.0)


def test_another_servers_events_pass() -> None:
    exchange = opened(ASKED)
    exchange.dispatch(UNKNOWN, "mine", 0.0)
    exchange.head(200, SSE_HEAD)
    event = sse({"token": {"id": 5}, "meta_info": {"finish_reason": "stop"}})
    assert exchange.feed([event, DONE], 1.0) == event[0] + DONE[0]
    assert exchange.verdict.reason == "output_ids"
    assert exchange.end is End.FINISHED


def test_failures_say_what_was_delivered() -> None:
    """C5, C11."""
    exchange = started(tokens=2)
    answer = exchange.failure(502, "no_workers", "all died", started=True)
    assert answer.status == 502
    body = json.loads(answer.body)
    assert (body["message"], body["code"], body["reason"], body["delivered"]) == ("all died", 502, "no_workers", 2)
    assert body["started"] is True
    event = exchange.failure_event(502, "no_workers", "all died")
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    found = json.loads(event[6:])["error"]
    assert (found["message"], found["code"], found["delivered"]) == ("all died", 502, 2)
