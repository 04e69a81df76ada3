"""Every check passes an uninterrupted answer and fails on the corruption that it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from chaos_answers import IDS, MODES, event, events, record, top

from dyn_chaos import check, fold

Events = list[dict[str, Any]]
STREAMS = MODES[1:]


@pytest.mark.parametrize("mode", MODES)
def test_an_uninterrupted_answer_has_no_findings(mode: str) -> None:
    assert check.check(record(mode), record(mode)) == []


@pytest.mark.parametrize("mode", STREAMS)
def test_coalescing_is_no_finding(mode: str) -> None:
    other = [event(mode, 0, 3), event(mode, 3, 4)]
    assert check.check(record(mode, other), record(mode)) == []


def test_differences_within_the_tolerance_are_no_finding() -> None:
    said = events("unary")
    for rows in ("output_token_logprobs", "input_token_logprobs"):
        said[0]["meta_info"][rows][1][0] += 0.8 * check.TOLERANCE
    said[0]["meta_info"]["output_top_logprobs"][1][0][0] += 0.8 * check.TOLERANCE
    assert check.check(record("unary", said), record("unary")) == []


def _meta(name: str, value: object, at: int = -1) -> Callable[[Events], None]:
    def corrupt(said: Events) -> None:
        said[at]["meta_info"][name] = value

    return corrupt


def _another_token(said: Events) -> None:
    said[-1]["output_ids"][-1] += 1
    said[-1]["meta_info"]["output_token_logprobs"][-1][1] += 1


def _logprob(name: str, amount: float) -> Callable[[Events], None]:
    def corrupt(said: Events) -> None:
        last = said[-1]["meta_info"][name][-1]
        (last[0] if isinstance(last[0], list) else last)[0] += amount

    return corrupt


def _token_of_logprob(said: Events) -> None:
    said[-1]["meta_info"]["output_token_logprobs"][-1][1] += 1


def _token_of_top_logprob(said: Events) -> None:
    said[-1]["meta_info"]["output_top_logprobs"][-1][1][1] += 1


def _all(name: str, value: object) -> Callable[[Events], None]:
    def corrupt(said: Events) -> None:
        for each in said:
            each["meta_info"][name] = value

    return corrupt


def _no_key(said: Events) -> None:
    del said[-1]["meta_info"]["cached_tokens"]


def _new_key(said: Events) -> None:
    said[-1]["text"] = ""


LENGTH = len(IDS)
#: (mode, corruption, the checks that must object and no other may).
CORRUPTIONS: dict[str, tuple[str, Callable[[Events], None], set[str]]] = {
    "another token": ("unary", _another_token, {"tokens", "output_logprobs"}),
    "another token, streamed": ("incremental", _another_token, {"tokens", "output_logprobs"}),
    "finish of another type": ("unary", _meta("finish_reason", {"type": "stop", "matched": 1}), {"finish"}),
    "length of the continuation": (
        "cumulative",
        _meta("finish_reason", {"type": "length", "length": 2}),
        {"finish", "budget"},
    ),
    "finish twice": ("incremental", _meta("finish_reason", {"type": "length", "length": LENGTH}, 1), {"finish"}),
    "prompt of the continuation": ("cumulative", _meta("prompt_tokens", 5), {"counters"}),
    "prompt of the continuation, in the middle": ("incremental", _meta("prompt_tokens", 5, 1), {"counters"}),
    "length of the logprobs": ("incremental", _meta("output_token_logprobs_length", 2), {"counters"}),
    "retractions": ("unary", _all("num_retractions", 1), {"counters"}),
    "another id": ("cumulative", _meta("id", "other", 1), {"identity"}),
    "an id that is not the client's": ("incremental", _all("id", "other"), {"identity"}),
    "a logprob": ("incremental", _logprob("output_token_logprobs", 1.2 * check.TOLERANCE), {"output_logprobs"}),
    "a top logprob": ("unary", _logprob("output_top_logprobs", 1.2 * check.TOLERANCE), {"output_logprobs"}),
    "a logprob of another token": ("cumulative", _token_of_logprob, {"output_logprobs"}),
    "a top logprob of another token": ("unary", _token_of_top_logprob, {"output_logprobs"}),
    "a logprob that is null": ("unary", lambda said: _null(said, "output_token_logprobs"), {"output_logprobs"}),
    "a prompt logprob": ("unary", _logprob("input_token_logprobs", 1.2 * check.TOLERANCE), {"prompt_logprobs"}),
    "no prompt logprobs": ("incremental", _all("input_token_logprobs", []), {"prompt_logprobs"}),
    "prompt logprobs of the continuation": ("cumulative", _meta("input_token_logprobs", [], 1), {"prompt_logprobs"}),
    "weights of the continuation": (
        "unary",
        _meta("weight_versions", [{"version": "default", "start": 0, "end": 2}]),
        {"weight_versions"},
    ),
    "weights with a gap": (
        "unary",
        _meta("weight_versions", [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 2, "end": 4}]),
        {"weight_versions"},
    ),
    "expert rows": ("incremental", _meta("routed_experts", "AAAAAAIAAAA="), {"routed_experts"}),
    "a key lost": ("unary", _no_key, {"keys"}),
    "a key added": ("cumulative", _new_key, {"keys"}),
}


def _null(said: Events, name: str) -> None:
    said[-1]["meta_info"][name][-1][0] = None


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_found(name: str) -> None:
    mode, corrupt, expected = CORRUPTIONS[name]
    said = events(mode)
    corrupt(said)
    assert {finding.check for finding in check.check(record(mode, said), record(mode))} == expected


def _jump(mode: str) -> Events:
    """A stream whose dialect changes at the last event."""
    return [*events(mode)[:-1], event("incremental" if mode == "cumulative" else "cumulative", 2, 4)]


BROKEN_STREAMS: dict[str, tuple[str, Events, set[str]]] = {
    "cumulative turns incremental": ("cumulative", _jump("cumulative"), {"framing"}),
    "incremental turns cumulative": ("incremental", _jump("incremental"), {"framing"}),
    "a token twice": ("incremental", [event("incremental", 0, 2), event("incremental", 1, 4)], {"framing"}),
    "a token skipped": ("incremental", [event("incremental", 0, 1), event("incremental", 2, 4)], {"framing"}),
    "the other dialect throughout": ("cumulative", events("incremental"), {"dialect"}),
    "the other dialect of logprobs": ("mixed", events("incremental"), {"dialect"}),
    "completion_tokens goes back": (
        "cumulative",
        [event("cumulative", 0, 2), event("cumulative", 0, 1), event("cumulative", 1, 4)],
        {"counters", "framing"},
    ),
    "too many tokens": ("incremental", [*events("incremental")[:-1], event("incremental", 2, 4)], {"budget"}),
}


@pytest.mark.parametrize("name", BROKEN_STREAMS)
def test_a_broken_stream_is_found(name: str) -> None:
    mode, said, expected = BROKEN_STREAMS[name]
    got = record(mode, said)
    if name == "too many tokens":
        got.body["sampling_params"]["max_new_tokens"] = 3
    assert expected <= {finding.check for finding in check.check(got, record(mode))}


def test_an_event_that_takes_back_a_token_is_found() -> None:
    said = events("cumulative")
    said[0]["output_ids"] = [99]
    assert "framing" in {finding.check for finding in check.check(record("cumulative", said), record("cumulative"))}


def test_top_logprobs_may_trade_places_only_at_a_tie() -> None:
    reference, tied = events("unary"), events("unary")
    reference[0]["meta_info"]["output_top_logprobs"][2] = [[-1.0, 43, None], [-1.0 - check.TOLERANCE, 7, None]]
    tied[0]["meta_info"]["output_top_logprobs"][2] = [[-1.0, 7, None], [-1.0 - check.TOLERANCE, 43, None]]
    assert check.check(record("unary", tied), record("unary", reference)) == []
    swapped = events("unary")
    swapped[0]["meta_info"]["output_top_logprobs"][2] = [
        [value, token, None] for (value, _, _), (_, token, _) in zip(top(2, 43), reversed(top(2, 43)), strict=True)
    ]
    assert {finding.check for finding in check.check(record("unary", swapped), record("unary"))} == {"output_logprobs"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"headers": {"content-type": "text/plain"}}, "framing"),
        ({"stray": ["event: x"]}, "framing"),
        ({"error": "RemoteProtocolError: peer closed"}, "complete"),
        ({"status": 502}, "complete"),
        ({"done": False}, "complete"),
        ({"events": []}, "complete"),
        ({"events": ["{"]}, "complete"),
        ({"events": ["[]"]}, "complete"),
        ({"events": ['{"error": {"message": "m"}}']}, "complete"),
        ({"events": ['{"output_ids": []}']}, "complete"),
    ],
)
def test_what_the_client_saw_around_the_answer_counts(changes: dict[str, Any], expected: str) -> None:
    got = record("cumulative", **changes)
    assert [finding.check for finding in check.check(got, record("cumulative"))] == [expected]


def test_a_truncated_stream_is_not_complete() -> None:
    got = record("incremental", events("incremental")[:-1])
    assert [finding.check for finding in check.check(got, record("incremental"))] == ["complete"]


def test_a_reference_must_be_complete_itself() -> None:
    with pytest.raises(fold.Incomplete):
        check.check(record("unary"), record("unary", status=500))


def test_every_request_needs_an_answer_and_a_reference() -> None:
    one = {"unary": record("unary")}
    assert check.check_all(one, one) == []
    assert [finding.message for finding in check.check_all({}, one)] == ["was never answered"]
    assert [finding.message for finding in check.check_all(one, {})] == ["has no reference"]


def test_the_widest_difference() -> None:
    said = events("unary")
    said[0]["meta_info"]["output_top_logprobs"][1][0][0] += 0.5
    whole = fold.answer(record("unary"))
    assert check.widest_difference(fold.answer(record("unary", said)), whole) == pytest.approx(0.5)
    said[0]["meta_info"]["output_top_logprobs"].pop()
    assert check.widest_difference(fold.answer(record("unary", said)), whole) == float("inf")


def test_every_check_has_its_corruption() -> None:
    covered = {"framing", "dialect", *(each for _, _, expected in CORRUPTIONS.values() for each in expected)}
    assert covered == set(check.CHECKS)
