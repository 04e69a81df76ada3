"""What a stencil makes of an event is what reading it whole makes of it, and it leaves alone what it cannot know."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import event as seen
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_kit import SSE_HEAD, Engine, dumps, opened, sse

from dyn_relay.formats.base import CannotComplete, Event
from dyn_relay.formats.sglang import reader
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.sglang.stencil import Stencil
from dyn_relay.formats.sglang.wire import read_fields, write
from dyn_relay.formats.traits import Traits

BODY = {"rid": "r", "input_ids": [5, 6, 7], "stream": True, "return_logprob": True}
TRAITS = Traits(sampling_defaults={}, incremental=True)


def moved(body: dict[str, Any], before: int, engine: Engine) -> tuple[SglangExchange, list[Event]]:
    """One that was cut after so many tokens, and the events of the engine that goes on with it."""
    exchange = opened(body, TRAITS)
    exchange.dispatch(TRAITS, body["rid"], 0.0)
    exchange.head(200, SSE_HEAD)
    for one in Engine("incremental", extra=engine.extra, nan=engine.nan).events(body)[:before]:
        exchange.feed([one], 1.0)
    assert exchange.complete(1.0) is None
    sent = exchange.dispatch(TRAITS, "r2", 2.0)
    exchange.head(200, SSE_HEAD)
    ids = [*body["input_ids"], *exchange._ledger.ids]
    left = {**body["sampling_params"], "max_new_tokens": body["sampling_params"]["max_new_tokens"] - before}
    assert b'"rid":"r2"' in sent.body
    return exchange, engine.events({**body, "rid": "r2", "input_ids": ids, "sampling_params": left})


def told(exchange: SglangExchange, events: list[Event]) -> list[object]:
    """What the client gets of each event and what is counted of it; then what the next worker is asked."""
    found: list[object] = []
    for one in events:
        try:
            out: object = exchange.feed([one], 3.0)
        except CannotComplete as exc:
            return [*found, exc.reason]
        found += [out, exchange.delivered, exchange.attempt_tokens, exchange.end, exchange.detail]
    one = exchange._attempt
    found += [one.events, one.last_delta, one.newest, one.marks, exchange.leavable]
    if exchange.end is None:
        found.append(exchange.complete(4.0))
    if exchange.end is None:
        found += [exchange.dispatch(TRAITS, "r3", 5.0).body, write(*exchange._ledger.template)]
    return found


def without_stencils() -> AbstractContextManager[object]:
    """Each event is read whole."""
    return patch.object(SglangExchange, "_foreseeable", return_value=False)


@settings(max_examples=256)
@given(
    most=st.integers(3, 30),
    before=st.integers(1, 2),
    logprobs=st.booleans(),
    tops=st.integers(0, 1),
    chunks=st.lists(st.integers(1, 4), max_size=8),
    cut=st.integers(1, 40),
    extra=st.booleans(),
    nan=st.booleans(),
    turn=st.none() | st.integers(1, 8),
)
def test_what_it_gives_is_what_a_whole_reading_gives(most, before, logprobs, tops, chunks, cut, extra, nan, turn):
    asked = {**BODY, "return_logprob": logprobs, "top_logprobs_num": tops, "sampling_params": {"max_new_tokens": most}}
    engine = Engine("incremental", chunks=tuple(chunks), extra=extra, nan=nan, turn=turn)
    exchange, events = moved(asked, before, engine)
    quick = told(exchange, events[:cut])
    seen(f"stencils: {exchange._attempt.stencils}")
    whole, events = moved(asked, before, engine)
    with without_stencils():
        assert quick == told(whole, events[:cut])


ASKED = {**BODY, "sampling_params": {"max_new_tokens": 60}}


def test_of_a_long_continuation_almost_all_events_are_taken_by_it(monkeypatch):
    exchange, events = moved(ASKED, 2, Engine("incremental"))
    whole = []
    account = SglangExchange._account
    monkeypatch.setattr(SglangExchange, "_account", lambda *args: whole.append(args) or account(*args))
    for one in events[:-1]:
        exchange.feed([one], 3.0)
    assert (len(events), len(whole)) == (59, 3)  # its first, the one that shows its dialect, and the last


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"id":"r2"', b'"id":"rX"'),
        (b'"output_ids":[', b'"output_ids":[1,'),
        (b'"output_token_logprobs":[[', b'"output_token_logprobs":[[0,1,null],['),
        (b'"output_token_logprobs":[[', b'"output_token_logprobs":[[01,1,null],['),
        (b'"finish_reason":null', b'"finish_reason":{"type":"abort","message":"x","status_code":503}'),
        (b'"weight_version":"default"', b'"weight_version":"other"'),
        (b'"dp_rank":null', b'"dp_rank":null,"completion_tokens":1'),
        (b'"completion_tokens":', b'"completion_tokens":1'),
        (b'"completion_tokens":', b'"completion_tokens":-'),
        (b'"output_ids":[', b'"output_ids":[-'),
        (b'"output_ids":[', b'"output_ids":[99999999999'),
        (b'"num_retractions":1', b'"num_retractions":2'),
        (b'"dp_rank":null', b'"dp_rank":null,"e2e_latency":1.5'),
        (b'"dp_rank":null}', b'"dp_rank":null'),
    ],
)
def test_an_event_that_differs_in_more_is_read_whole(old, new):
    answers = []
    for reading in (nullcontext(), without_stencils()):
        exchange, events = moved(ASKED, 2, Engine("incremental"))
        changed = events[4][1].replace(old, new)
        assert changed != events[4][1]
        with reading:
            answers.append(told(exchange, [*events[:4], sse(changed), *events[5:7]]))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", [b'"output_ids" ', b'"output\\u005fids"', b'"output_ids"', b'"meta_info"'])
@pytest.mark.parametrize("of", [None, 0, 1, 2, 3])
def test_a_field_that_is_there_twice_is_read_as_it_is_read_whole(name, of):
    """The last one counts; here it says what the field of one of the events says, or the first is of another kind."""
    answers = []
    for reading in (nullcontext(), without_stencils()):
        exchange, events = moved(ASKED, 2, Engine("incremental"))
        field = b'"meta_info"' if name == b'"meta_info"' else b'"output_ids"'
        if of is None:
            doubled = [b"{" + name + b':"AAAA",' + data[1:] for _, data in events[:6]]
        else:
            value = dumps(json.loads(events[of][1])[field[1:-1].decode()])
            doubled = [data[:-1] + b"," + name + b":" + value + b"}" for _, data in events[:6]]
        with reading:
            answers.append(told(exchange, [sse(data) for data in doubled]))
    assert answers[0] == answers[1]


def test_events_that_go_on_to_differ_cost_few_stencils(monkeypatch):
    """A counter that grows with each event, say."""
    made = []
    of = Stencil.of
    monkeypatch.setattr(reader.Stencil, "of", lambda *args: made.append(args) or of(*args))
    exchange, events = moved(ASKED, 2, Engine("incremental"))
    for number, (_, data) in enumerate(events[:-2]):
        exchange.feed([sse(data.replace(b'"num_retractions":1', b'"num_retractions":%d' % number))], 3.0)
    assert exchange.end is None
    assert len(made) == reader.STENCILS


def test_a_field_of_a_nested_object_is_not_taken_for_the_events():
    top = {"output_ids": [7], "meta_info": {"completion_tokens": 2, "odd": {"output_token_sampling_length": 5}}}
    data = dumps(top)
    shown = dumps({"output_ids": [7], "meta_info": {"completion_tokens": 12, "odd": top["meta_info"]["odd"]}})
    view = read_fields(shown), read_fields(read_fields(shown)["meta_info"])
    assert Stencil.of(data, view, 10) is None
