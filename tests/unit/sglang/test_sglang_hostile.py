"""What odd engines send must neither freeze the proxy nor pass for success."""

from __future__ import annotations

import json

import pytest
from sglang_kit import DONE, SSE_HEAD, Engine, dumps, opened, sse

from dyn_relay.formats.base import End, Reading
from dyn_relay.formats.sglang.events import error_object
from dyn_relay.formats.sglang.wire import NotJson, read_fields, shield, unshield
from dyn_relay.formats.traits import UNKNOWN


@pytest.mark.parametrize("data", [b'{"text":"' + b'\\"' * 200_000, b'"' * 200_001, b'{"a":"' + b"\\" * 200_001])
def test_an_unterminated_string_is_read_once(data):
    """It ends: quadratic reading of 400 kB would take hours."""
    with pytest.raises(NotJson):
        read_fields(data + b"NaN")


def test_words_inside_strings_stay():
    data = b'{"a":"NaN \\" Infinity","b":NaN,"c":[-Infinity,"\\\\"]}'
    shielded = shield(data)
    assert shielded.startswith(b'{"a":"NaN \\" Infinity","b":"\\u0000')
    assert shielded.endswith(b'-Infinity","\\\\"]}')
    assert (unshield(shielded), list(json.loads(shielded))) == (data, ["a", "b", "c"])


@pytest.mark.parametrize("code", ["100", "0", "-1", "99999", "200", "302", "null"])
def test_a_code_that_is_no_error_is_a_500(code):
    assert error_object(b'{"message":"bad","code":%s}' % code.encode()).code == 500


@pytest.mark.parametrize("code", [400, 404, 429, 500, 503, 599])
def test_error_codes_stay(code):
    assert error_object(b'{"message":"bad","code":%d}' % code).code == code


PENALTY = {"input_ids": [1], "sampling_params": {"max_new_tokens": 9, "frequency_penalty": 1}}
PREEMPTED = "The request is aborted by a higher priority request."


def test_a_stream_that_is_not_migratable_and_preempted_was_not_untouched():
    """What is retracted waits again, with its tokens delivered: no other worker may take it as new."""
    exchange = opened({**PENALTY, "stream": True})
    exchange.dispatch(UNKNOWN, "x", 0.0)
    exchange.head(200, SSE_HEAD)
    first = Engine().events({"rid": "x", **PENALTY})[0]
    reason = {"type": "abort", "message": PREEMPTED, "status_code": 503}
    last = sse({"output_ids": [], "meta_info": {"id": "x", "finish_reason": reason, "completion_tokens": 1}})
    assert exchange.feed([first, last], 1.0) == first[0]
    assert exchange.end is End.FAILED


@pytest.mark.parametrize(
    ("message", "end"),
    [(PREEMPTED, End.BUSY), ("The request queue is full.", End.BUSY), ("Request running timeout reached.", End.FAILED)],
)
def test_a_503_that_is_not_seen_to_be_early(message, end):
    """A unary request that is not migratable may have run for an hour: only the words tell."""
    exchange = opened(PENALTY)
    exchange.dispatch(UNKNOWN, "x", 0.0)
    exchange.head(503, [])
    exchange.body(dumps({"object": "error", "message": message}), 1.0)
    assert exchange.end is end


def test_events_for_one_who_asked_for_none():
    """Nobody asked for a stream: what comes as one is no answer."""
    exchange = opened(PENALTY)
    exchange.dispatch(UNKNOWN, "x", 0.0)
    assert exchange.head(200, SSE_HEAD) is Reading.WHOLE
    exchange.body(b"data: {}\n\n", 1.0)
    assert exchange.end is End.GARBAGE


@pytest.mark.parametrize("text", ["\0NaN", '"\0Infinity', "\0-Infinity"])
def test_the_clients_strings_stay(text):
    exchange = opened({"input_ids": [1], "sampling_params": {"max_new_tokens": 9, "odd": text}, "odd": text})
    sent = json.loads(exchange.dispatch(UNKNOWN, "x", 0.0).body)
    assert sent["odd"] == sent["sampling_params"]["odd"] == text


def test_events_of_several_lines():
    """After a cut an event is written as one line, however the worker breaks its JSON."""
    exchange = opened({"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 4}})
    out = b""
    for name, end in (("x", 2), ("y", 9)):
        sent = json.loads(exchange.dispatch(UNKNOWN, name, 0.0).body)
        exchange.head(200, SSE_HEAD)
        for _, data in Engine("incremental", late_finish=True).events(sent)[:end]:
            broken = data.replace(b",", b",\n")
            out = exchange.feed([(b"data: " + broken.replace(b"\n", b"\ndata: ") + b"\n\n", broken)], 1.0)
            assert name == "x" or out.count(b"\n") == 2
    assert exchange.end is End.FINISHED
    assert out == DONE[0]


@pytest.mark.parametrize(("more", "made"), [({}, True), ({"n": 2}, False)])
def test_an_abort_before_anything_was_sent(more, made):
    """Stock's echo, also for what is not migratable; several answers are not made up."""
    exchange = opened({**PENALTY, "sampling_params": {**PENALTY["sampling_params"], **more}, "stream": True})
    out = exchange.abort(1.0)
    assert (out is not None) == made
    if out is not None:
        assert (
            json.loads(out.split(b"\n\n")[0][6:])["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
        )
        assert exchange.end is End.ABORTED
