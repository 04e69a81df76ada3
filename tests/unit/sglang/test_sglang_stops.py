"""EOS: learnt from the engines' finishes, so that a cut between it and a late finish is not continued past it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang_kit import DONE, SSE_HEAD, request, sse

from dyn_relay.formats.base import CannotComplete, End, Event
from dyn_relay.formats.sglang.exchange import SglangExchange
from dyn_relay.formats.sglang.format import SglangFormat
from dyn_relay.formats.traits import Traits

EOS = 2
ONE, OTHER = Traits(model="one"), Traits(model="other")
STOPPED = {"type": "stop", "matched": EOS}


def event(ids: list[int], finish: dict[str, Any] | None = None) -> Event:
    """A cumulative event."""
    return sse(
        {"output_ids": ids, "meta_info": {"id": "given", "finish_reason": finish, "completion_tokens": len(ids)}}
    )


def begun(format: SglangFormat, ids: list[int], traits: Traits = ONE, **params: Any) -> SglangExchange:
    """A stream whose worker has sent `ids`, one an event."""
    body = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 9, **params}}
    exchange = format.open(request(body), "given")
    exchange.admit(traits)
    assert exchange.verdict.migratable
    exchange.dispatch(traits, "given", 0.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed([event(ids[: at + 1]) for at in range(len(ids))], 1.0)
    assert exchange.delivered == len(ids)
    return exchange


def taught(finish: dict[str, Any], late: bool = False, traits: Traits = ONE, **params: Any) -> SglangFormat:
    """A format whose first answer, of two tokens, ended so."""
    format = SglangFormat()
    exchange = begun(format, [7, EOS] if late else [7], traits, **params)
    exchange.feed([event([7, EOS], finish), DONE], 1.0)
    assert exchange.end is End.FINISHED
    return format


def finish_of(exchange: SglangExchange) -> dict[str, Any] | None:
    """The finish that is made here; None if the answer is to be continued."""
    rest = exchange.complete(2.0)
    if rest is None:
        return None
    assert rest.endswith(DONE[0])
    found: dict[str, Any] = json.loads(rest.split(b"\n\n")[0][6:])["meta_info"]["finish_reason"]
    return found


@pytest.mark.parametrize("late", [False, True])
def test_a_known_eos_ends_the_answer_here(late: bool) -> None:
    """C1: the finish alone was lost; another worker would go on past the EOS."""
    exchange = begun(taught(STOPPED, late), [5, 6, EOS])
    assert finish_of(exchange) == STOPPED
    assert exchange.end is End.FINISHED


@pytest.mark.parametrize(
    ("ids", "params"),
    [
        ([5, EOS, 6], {}),  # not the last one
        ([5, EOS], {"ignore_eos": True}),
        ([5, EOS], {"min_new_tokens": 2}),
        ([], {}),
    ],
)
def test_no_end_here(ids: list[int], params: dict[str, Any]) -> None:
    assert finish_of(begun(taught(STOPPED, late=True), ids, **params)) is None


def test_min_new_tokens_is_met() -> None:
    assert finish_of(begun(taught(STOPPED), [5, EOS], min_new_tokens=1)) == STOPPED


@pytest.mark.parametrize(
    ("finish", "params"),
    [
        (STOPPED, {"stop_token_ids": [3, EOS]}),  # the client's own; it says nothing of the model
        (STOPPED, {"ignore_eos": True}),
        ({"type": "stop", "matched": "NaN happened"}, {}),
        ({"type": "stop", "matched": [EOS]}, {}),
        ({"type": "stop", "matched": True}, {}),
        ({"type": "stop"}, {}),
        ({"type": "length", "length": 2}, {}),
        ({"type": "abort", "message": "Aborted", "status_code": None, "matched": EOS}, {}),
    ],
)
def test_what_names_no_eos(finish: dict[str, Any], params: dict[str, Any]) -> None:
    format = SglangFormat()
    exchange = begun(format, [7], **params)
    exchange.feed([event([7, EOS], finish), DONE], 1.0)
    assert finish_of(begun(format, [5, EOS])) is None
    assert finish_of(begun(format, [5, 1])) is None


def test_a_grammar_names_no_eos() -> None:
    """With a grammar `matched` is whatever token ended it."""
    format = SglangFormat()
    body = {"input_ids": [1], "stream": True, "sampling_params": {"regex": "a"}}
    exchange = format.open(request(body), "given")
    assert exchange.admit(ONE).reason == "regex"
    exchange.dispatch(ONE, "given", 0.0)
    exchange.head(200, SSE_HEAD)
    exchange.feed([event([EOS], STOPPED), DONE], 1.0)
    assert exchange.end is End.FINISHED
    assert finish_of(begun(format, [5, EOS])) is None


def test_models_are_apart() -> None:
    format = taught(STOPPED)
    assert finish_of(begun(format, [5, EOS], OTHER)) is None
    assert finish_of(begun(format, [5, EOS])) == STOPPED


@pytest.mark.parametrize(
    "info",
    [{"eos_token_id": EOS}, {"eos_token_id": [1, EOS]}, {"eos_token_ids": [EOS, "x"]}, {"eos_token_ids": EOS}],
)
def test_info_may_tell(info: dict[str, Any]) -> None:
    format = SglangFormat()
    traits = format.traits({"/model_info": json.dumps({"tokenizer_path": "one", **info}).encode()})
    assert finish_of(begun(format, [5, EOS], traits)) == STOPPED
    assert finish_of(begun(format, [5, EOS], OTHER)) is None


@pytest.mark.parametrize("info", [{}, {"eos_token_id": None}, {"eos_token_id": True}, {"eos_token_id": "2"}])
def test_info_that_tells_nothing(info: dict[str, Any]) -> None:
    format = SglangFormat()
    format.traits({"/model_info": json.dumps({"tokenizer_path": "one", **info}).encode()})
    assert finish_of(begun(format, [5, EOS])) is None
    assert finish_of(begun(format, [5, 1])) is None


LENGTH = {"type": "length", "length": 2}


def test_late_finishes_and_no_eos_known() -> None:
    """Law 8: any last token may be an EOS; a loud failure rather than an answer that may run on past its end."""
    format = taught(LENGTH, late=True)
    with pytest.raises(CannotComplete, match="eos"):
        begun(format, [5, 6]).complete(2.0)


@pytest.mark.parametrize(("ids", "params"), [([], {}), ([5, 6], {"ignore_eos": True}), ([5, 6], {"min_new_tokens": 2})])
def test_no_eos_can_have_come(ids: list[int], params: dict[str, Any]) -> None:
    assert finish_of(begun(taught(LENGTH, late=True), ids, **params)) is None


def test_not_late() -> None:
    """An engine that finishes with its last token cannot be cut in between; an abort comes when it comes."""
    assert finish_of(begun(taught(LENGTH), [5, 6])) is None
    format = SglangFormat()
    aborted = begun(format, [5, 6])
    reason = {"type": "abort", "message": "Aborted", "status_code": None}
    meta = {"id": "given", "finish_reason": reason, "completion_tokens": 2, "prompt_tokens": 1}
    aborted.feed([sse({"output_ids": [5, 6], "meta_info": meta}), DONE], 1.0)
    assert aborted.end is End.ABORTED
    assert finish_of(begun(format, [5, 6])) is None
    nothing = begun(format, [], max_new_tokens=0)
    nothing.feed([event([], {"type": "length", "length": 0}), DONE], 1.0)
    assert finish_of(begun(format, [5, 6])) is None


def test_what_is_spent_or_named_still_ends_here() -> None:
    format = taught(LENGTH, late=True)
    assert finish_of(begun(format, [5, 6], max_new_tokens=2)) == LENGTH
    assert finish_of(begun(format, [5, 6], stop_token_ids=[6])) == {"type": "stop", "matched": 6}
