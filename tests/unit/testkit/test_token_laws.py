"""The laws about tokens alone, through SGLang's wire: they hold for what is right, and see what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dyn_relay.formats import catalog
from dyn_testkit import faults
from dyn_testkit.laws import Case, Reading, tokens, uninterrupted
from dyn_testkit.laws import cases as some
from dyn_testkit.laws.levels import ExchangeLevel, other
from dyn_testkit.oracle import Oracle
from dyn_testkit.worker import WorkerOptions

LEVEL = ExchangeLevel(catalog.make("sglang"), WorkerOptions(model=some.MODEL))
REQUEST = {"rid": "a", "stream": True, "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 9}}
CUT = (faults.at_token(3), faults.CLOSE)


def observed(*plan, dialects=("incremental",)):
    return LEVEL.observe(Case(json.dumps(REQUEST).encode(), plan, dialects))


def whole(seen):
    return uninterrupted(seen, Oracle(some.MODEL))


def with_body(seen, body, **changes):
    return replace(seen, response=replace(seen.response, body=body, **changes))


@pytest.mark.parametrize("dialects", [("incremental",), ("cumulative",), ("mixed", "incremental")])
def test_all_hold_for_what_is_right(dialects):
    seen = observed(CUT, CUT, dialects=dialects)
    assert seen.resumed(2) == 6
    for law in (tokens.equivalence, tokens.budget, tokens.no_false_success):
        law(seen, whole(seen))
    tokens.exactly_once(seen)
    tokens.fold(LEVEL.observe(other(seen.case, stream=False)), seen)


def test_an_event_twice():
    seen = observed(CUT)
    events = seen.response.body.split(b"\n\n")
    doubled = with_body(seen, b"\n\n".join([*events[:2], *events[1:]]))
    for law in (tokens.equivalence, tokens.no_false_success):
        with pytest.raises(AssertionError):
            law(doubled, whole(seen))
    with pytest.raises(AssertionError, match="exactly once: shown"):
        tokens.exactly_once(doubled)


def test_a_continuation_from_more_than_was_sent():
    seen = observed(CUT)
    seen.attempts[1].body = json.dumps(seen.attempts[1].sent | {"input_ids": list(range(9))}).encode()
    with pytest.raises(AssertionError, match="goes on from 6 tokens, 3 were sent"):
        tokens.exactly_once(seen)


def test_an_answer_without_an_end():
    seen = observed()
    events = seen.response.body.split(b"\n\n")
    for kept in (events[:4], events[:-2]):
        with pytest.raises(AssertionError, match="broke off"):
            tokens.equivalence(with_body(seen, b"\n\n".join([*kept, b""])), whole(seen))
    with pytest.raises(AssertionError, match="does not say how it ended"):
        tokens.no_false_success(with_body(seen, b"\n\n".join([*events[:4], b""])), whole(seen))


def test_another_answer_in_one_piece():
    seen = observed()
    other_finish = replace(whole(seen), finish={"type": "stop", "matched": 2})
    for wanted in (other_finish, Reading([1], whole(seen).finish)):
        with pytest.raises(AssertionError, match="equivalence"):
            tokens.equivalence(seen, wanted)
