"""Every check passes an uninterrupted answer and fails on the corruption that it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from checker_runs import TOLERANCE, WHOLE, failed, run
from tests.recorded_answers import IDS, MODES, PROMPT, event, events, record, top

from dyn_testkit import fold
from dyn_testkit.checkers import Finding, check
from dyn_testkit.checkers.logprobs import widest_difference
from dyn_testkit.history import (
    Arrival,
    Record,
    of_records,
)

Events = list[dict[str, Any]]
STREAMS = MODES[1:]


def judge(got: Record, want: Record) -> list[Finding]:
    """What all checkers find in one answer."""
    return check(of_records({got.key: got}, {got.key: want}, TOLERANCE))


def objections(got: Record, want: Record) -> set[str]:
    """The checkers that object."""
    return {finding.check for finding in judge(got, want)}


@pytest.mark.parametrize("mode", MODES)
def test_an_uninterrupted_answer_has_no_findings(mode: str) -> None:
    assert judge(record(mode), record(mode)) == []


@pytest.mark.parametrize("mode", STREAMS)
def test_coalescing_is_no_finding(mode: str) -> None:
    other = [event(mode, 0, 3), event(mode, 3, 4)]
    assert judge(record(mode, other), record(mode)) == []


def test_differences_within_the_tolerance_are_no_finding() -> None:
    said = events("unary")
    for rows in ("output_token_logprobs", "input_token_logprobs"):
        said[0]["meta_info"][rows][1][0] += 0.8 * TOLERANCE
    said[0]["meta_info"]["output_top_logprobs"][1][0][0] += 0.8 * TOLERANCE
    assert judge(record("unary", said), record("unary")) == []


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


def _text_of_logprob(said: Events) -> None:
    said[-1]["meta_info"]["output_token_logprobs"][-1][2] = "text"


def _prompt(ids: list[int], at: int = -1) -> Callable[[Events], None]:
    def corrupt(said: Events) -> None:
        said[at]["prompt_token_ids"] = ids

    return corrupt


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
    "another token": ("unary", _another_token, {"tokens", "logprobs"}),
    "another token, streamed": ("incremental", _another_token, {"tokens", "logprobs"}),
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
    "a logprob": ("incremental", _logprob("output_token_logprobs", 1.2 * TOLERANCE), {"logprobs"}),
    "a top logprob": ("unary", _logprob("output_top_logprobs", 1.2 * TOLERANCE), {"logprobs"}),
    "a logprob of another token": ("cumulative", _token_of_logprob, {"logprobs"}),
    "a top logprob of another token": ("unary", _token_of_top_logprob, {"logprobs"}),
    "a logprob that is null": ("unary", lambda said: _null(said, "output_token_logprobs"), {"logprobs"}),
    "a prompt logprob": ("unary", _logprob("input_token_logprobs", 1.2 * TOLERANCE), {"logprobs"}),
    "no prompt logprobs": ("incremental", _all("input_token_logprobs", []), {"logprobs"}),
    "prompt logprobs of the continuation": ("cumulative", _meta("input_token_logprobs", [], 1), {"logprobs"}),
    "weights of the continuation": (
        "unary",
        _meta("weight_versions", [{"version": "default", "start": 0, "end": 2}]),
        {"spans"},
    ),
    "weights with a gap": (
        "unary",
        _meta("weight_versions", [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 2, "end": 4}]),
        {"spans"},
    ),
    "other weights": ("unary", _all("weight_versions", [{"version": "other", "start": 0, "end": 4}]), {"spans"}),
    "other weights, in a word": ("incremental", _all("weight_version", "other"), {"spans"}),
    "weights in two parts": (
        "unary",
        _meta(
            "weight_versions",
            [{"version": "default", "start": 0, "end": 1}, {"version": "default", "start": 1, "end": 4}],
        ),
        {"spans"},
    ),
    "the prompt of the continuation": ("cumulative", _prompt([*PROMPT, *IDS[:1]], 1), {"snapshot"}),
    "the prompt of the continuation, at the end": ("unary", _prompt([*PROMPT, *IDS[:1]]), {"snapshot"}),
    "the cache of the continuation": ("incremental", _meta("cached_tokens", 3), {"snapshot"}),
    "more in the cache than there is": ("unary", _meta("cached_tokens", 4), {"snapshot"}),
    "less than nothing in the cache": ("unary", _meta("cached_tokens", -1), {"snapshot"}),
    "the text of a logprob": ("unary", _text_of_logprob, {"logprobs"}),
    "a key lost in the middle": ("incremental", lambda said: said[1]["meta_info"].pop("cached_tokens"), {"keys"}),
    "expert rows": ("incremental", _meta("routed_experts", "AAAAAAIAAAA="), {"experts"}),
    "a key lost": ("unary", _no_key, {"keys"}),
    "a key added": ("cumulative", _new_key, {"keys", "texts"}),
}


#: What a stream may have of an oracle's, which is unary, has no name of its own, and measures nothing.
STREAMED: dict[str, tuple[Callable[[Events], object], set[str]]] = {
    "as it is": (lambda said: None, set()),
    "a key added to an inner event": (_meta("resumed", True, 1), {"keys"}),
    "a key added to the first event": (_meta("resumed", True, 0), {"keys"}),
    "a key added at the top": (lambda said: said[1].update(index=1), {"keys"}),
    "versions before the end": (_meta("weight_versions", [], 1), {"keys"}),
    "a key lost in the first event": (lambda said: said[0]["meta_info"].pop("weight_version"), {"keys"}),
}


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("mode", STREAMS)
def test_a_stream_has_the_keys_of_an_oracle_s_answer(mode: str, name: str) -> None:
    corrupt, expected = STREAMED[name]
    said, oracle = events(mode), events("unary")
    corrupt(said)
    for measured in ("e2e_latency", "cached_tokens", "num_retractions", "id"):
        del oracle[0]["meta_info"][measured]
    assert objections(record(mode, said), record("unary", oracle)) == expected


def _null(said: Events, name: str) -> None:
    said[-1]["meta_info"][name][-1][0] = None


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_found(name: str) -> None:
    mode, corrupt, expected = CORRUPTIONS[name]
    said = events(mode)
    corrupt(said)
    assert objections(record(mode, said), record(mode)) == expected


def _spoken(mode: str) -> Events:
    """Events with text: a letter a token, the last one's withheld until the end."""
    said, told, total = events(mode), "", 0
    for each in said:
        total = each["meta_info"]["completion_tokens"]
        text = "abcd"[:total]
        each["text"] = text[len(told) :] if mode in ("incremental", "mixed") else text
        told = text
    return said


#: How a text may go wrong, and which checks object.
TEXTS: dict[str, tuple[Callable[[Events], object], set[str]]] = {
    "as it is": (lambda said: None, set()),
    "a character lost": (lambda said: said[-1].update(text=said[-1]["text"][:-1]), {"texts"}),
    "a character twice": (lambda said: said[-1].update(text=said[-1]["text"] + "d"), {"texts"}),
    "none": (lambda said: [each.pop("text") for each in said], {"keys", "texts"}),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("mode", MODES)
def test_texts(mode: str, name: str) -> None:
    corrupt, expected = TEXTS[name]
    said = _spoken(mode)
    corrupt(said)
    assert objections(record(mode, said), record(mode, _spoken(mode))) == expected


def test_a_text_that_is_taken_back() -> None:
    said = _spoken("cumulative")
    said[0]["text"] = "x"
    assert objections(record("cumulative", said), record("cumulative", _spoken("cumulative"))) == {"framing"}


#: What is no answer: another type, or nothing, in place of what a checker reads.
MALFORMED: dict[str, Callable[[Events], None]] = {
    "a finish in a word": _meta("finish_reason", "length"),
    "no count, in the middle": lambda said: said[1]["meta_info"].pop("completion_tokens"),
    "a count that is null": _meta("completion_tokens", None, 1),
    "a count in letters": _meta("completion_tokens", "x", 1),
    "logprobs that are a number": _meta("output_token_logprobs", 5),
    "a logprob without a token": _meta("output_token_logprobs", [[-1.0]], 1),
    "a logprob in letters": _meta("output_token_logprobs", [["x", 3, None]], 1),
    "a logprob with something else": _meta("output_token_logprobs", [[-1.0, 3, None, "more"]], 1),
    "versions without spans": _meta("weight_versions", [{}]),
    "versions in a word": _meta("weight_versions", "x"),
    "an id that is a list": _all("id", ["own"]),
    "ids that are null": lambda said: said[-1].update(output_ids=None),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_answer_is_found_and_the_others_are_judged(name: str) -> None:
    malformed, wrong = events("incremental"), events("unary")
    MALFORMED[name](malformed)
    _another_token(wrong)
    answers = {"incremental": record("incremental", malformed), "unary": record("unary", wrong)}
    found = check(of_records(answers, {mode: record(mode) for mode in answers}))
    assert {(finding.key, finding.check) for finding in found} == {
        ("incremental", "liveness"),
        ("unary", "tokens"),
        ("unary", "logprobs"),
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input_ids": "abc"},
        {"sampling_params": [{}]},
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": None}},
        {"text": "abc", "sampling_params": None},
    ],
)
def test_whatever_a_client_sends_can_be_judged(body: dict[str, Any]) -> None:
    assert judge(record("unary", body=body), record("unary")) == []
    history = run(WHOLE, record("unary", body=body))
    history.arrivals = [Arrival("w1", 1.0, {"text": "abc"}), Arrival("w1", 1.0, {"input_ids": [*PROMPT, 1]})]
    check(history)
    assert objections(record("unary", body=body, status=502), record("unary")) == {"liveness"}
    failure = run(failed(["cut"]), record("unary", body=body, status=502))
    assert "liveness" in {finding.check for finding in check(failure)}


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
    assert expected <= objections(got, record(mode))


def test_an_answer_has_an_id_also_where_nobody_named_one() -> None:
    body = {name: value for name, value in record("unary").body.items() if name != "rid"}
    nameless = events("unary")
    assert objections(record("unary", nameless, body=body), record("unary", nameless)) == set()
    del nameless[0]["meta_info"]["id"]
    assert objections(record("unary", nameless, body=body), record("unary", nameless)) == {"identity"}


def test_an_event_that_takes_back_a_token_is_found() -> None:
    said = events("cumulative")
    said[0]["output_ids"] = [99]
    assert "framing" in objections(record("cumulative", said), record("cumulative"))


def test_top_logprobs_may_trade_places_only_at_a_tie() -> None:
    reference, tied = events("unary"), events("unary")
    reference[0]["meta_info"]["output_top_logprobs"][2] = [[-1.0, 43, None], [-1.0 - TOLERANCE, 7, None]]
    tied[0]["meta_info"]["output_top_logprobs"][2] = [[-1.0, 7, None], [-1.0 - TOLERANCE, 43, None]]
    assert judge(record("unary", tied), record("unary", reference)) == []
    swapped = events("unary")
    swapped[0]["meta_info"]["output_top_logprobs"][2] = [
        [value, token, None] for (value, _, _), (_, token, _) in zip(top(2, 43), reversed(top(2, 43)), strict=True)
    ]
    assert objections(record("unary", swapped), record("unary")) == {"logprobs"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"headers": {"content-type": "text/plain"}}, "framing"),
        ({"stray": ["event: x"]}, "framing"),
        ({"error": "RemoteProtocolError: peer closed"}, "liveness"),
        ({"status": 502}, "liveness"),
        ({"done": False}, "liveness"),
        ({"events": []}, "liveness"),
        ({"events": ["{"]}, "liveness"),
        ({"events": ["[]"]}, "liveness"),
        ({"events": ['{"error": {"message": "m"}}']}, "liveness"),
        ({"events": ['{"output_ids": []}']}, "liveness"),
    ],
)
def test_what_the_client_saw_around_the_answer_counts(changes: dict[str, Any], expected: str) -> None:
    got = record("cumulative", **changes)
    assert [finding.check for finding in judge(got, record("cumulative"))] == [expected]


def test_a_truncated_stream_is_not_complete() -> None:
    got = record("incremental", events("incremental")[:-1])
    assert [finding.check for finding in judge(got, record("incremental"))] == ["liveness"]


def test_a_reference_must_be_complete_itself() -> None:
    with pytest.raises(fold.Incomplete):
        judge(record("unary"), record("unary", text="{"))


def test_what_an_engine_refuses_is_refused_in_its_words() -> None:
    refusal = record("unary", status=400, text="no")
    assert judge(refusal, refusal) == []
    for got in (record("unary"), record("unary", status=502, text="no"), record("unary", status=400, text="yes")):
        assert objections(got, refusal) == {"liveness"}


def test_every_request_needs_an_answer_and_a_reference() -> None:
    one = {"unary": record("unary")}
    assert check(of_records(one, one)) == []
    assert [finding.message for finding in check(of_records({}, one))] == ["was never answered"]
    assert [finding.message for finding in check(of_records(one, {}))] == ["has no reference"]


@pytest.mark.parametrize("mode", STREAMS)
def test_what_a_stream_repeats_is_kept_once(mode: str) -> None:
    whole = fold.answer(record(mode))
    assert whole.ids == IDS
    assert len(whole.meta["output_token_logprobs"]) == len(IDS)
    assert [len(each["output_ids"]) for each in whole.events] == [0, 0, 0]
    assert [len(meta["output_top_logprobs"]) for meta in whole.metas] == [0, 0, 0]


def test_an_engine_that_says_that_it_failed_is_loud_though_it_has_no_counters() -> None:
    """SGLang's refusal of a stream whose queue is full."""
    finish = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
    full = record("incremental", [{"text": "", "output_ids": [], "meta_info": {"id": "own", "finish_reason": finish}}])
    with pytest.raises(fold.Incomplete, match=r"the engine's error: .*queue is full"):
        fold.answer(full)


def test_the_widest_difference() -> None:
    said = events("unary")
    said[0]["meta_info"]["output_top_logprobs"][1][0][0] += 0.5
    whole = fold.answer(record("unary"))
    assert widest_difference(fold.answer(record("unary", said)), whole) == pytest.approx(0.5)
    said[0]["meta_info"]["output_top_logprobs"].pop()
    assert widest_difference(fold.answer(record("unary", said)), whole) == float("inf")


def test_a_client_that_left_may_have_the_beginning_only() -> None:
    part = record("incremental", events("incremental")[:-1], done=False, error="the client left", left=True)
    assert judge(part, record("incremental")) == []
    part.events.append('{"output_ids": [4')
    assert judge(part, record("incremental")) == []
    wrong = events("incremental")[:-1]
    wrong[1]["output_ids"] = [99]
    assert objections(record("incremental", wrong, left=True), record("incremental")) == {"tokens"}
