"""Every check passes an uninterrupted answer and fails on the corruption that it is there for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.recorded_answers import IDS, MODES, PROMPT, event, events, record, top

from dyn_testkit import fold
from dyn_testkit.checkers import CHECKERS, Finding, check
from dyn_testkit.checkers.logprobs import widest_difference
from dyn_testkit.history import (
    Arrival,
    End,
    Fault,
    History,
    Order,
    Record,
    Row,
    Run,
    Sample,
    load,
    of_records,
    save,
    without_answer,
)

TOLERANCE = 1e-4

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


ROW = {
    "rid": "own",
    "time": 0.0,
    "duration": 3.0,
    "outcome": "done",
    "status": 200,
    "migratable": True,
    "reason": "",
    "error": "",
    "completion_tokens": 4,
    "prompt_tokens": 3,
    "cached_tokens": 0,
}
ATTEMPT = {
    "number": 0,
    "rid": "own",
    "worker": "w1",
    "url": "http://a",
    "cause": None,
    "started": 0.0,
    "first_token": 0.1,
    "last_token": 0.9,
    "ended": 1.0,
    "resumed_from": 0,
    "tokens": 4,
}
SECOND = {**ATTEMPT, "number": 1, "rid": "other", "started": 2.0, "first_token": 2.1, "last_token": 2.9, "ended": 3.0}
WHOLE = {**ROW, "attempts": [ATTEMPT]}
#: It moved after one token.
MOVED = {**ROW, "attempts": [{**ATTEMPT, "tokens": 1}, {**SECOND, "resumed_from": 1, "tokens": 3}]}
LOUD = record("unary", status=502)
HERE = Fault("kill", "http://a", 0.5, 2.5)
THERE = Fault("kill", "http://b", 1.0, 5.0)
DEAD = Fault("kill", "http://a", -15.0, 20.0, harms=("attempts", "health", "answers"))
AGO = {"workers": ["http://a", "http://b"], "notice": 19.0, "inhibited": 2.0}
BOTH = {"workers": ["http://a", "http://b"]}


def run(row: dict[str, Any] | None, got: Record | None = None, **fields: Any) -> History:
    """One answer, and what else is known of its run; other `fields` are samples at the end."""
    got = got or record("unary")
    history = of_records({got.key: got}, {got.key: record("unary")}, TOLERANCE)
    limits = {"migration_limit": 1, "patience": 10.0} | fields.pop("limits", {})
    arrived, orders = fields.pop("arrived", []), fields.pop("orders", [])
    history.run = Run(tolerance=TOLERANCE, traced=row is not None, tapped=bool(arrived or orders), **limits)
    history.rows = [row] if row else []
    if ago := fields.pop("failed_before", 0.0):  # another request, that whose client has left
        tried = {**ATTEMPT, "rid": "third", "cause": "cut", "tokens": 0, "started": 0.0, "ended": 0.0}
        history.rows.append({**ROW, "rid": "third", "time": -ago, "completion_tokens": None, "attempts": [tried]})
        history.records["third"] = record("unary", key="third", left=True, body={**got.body, "rid": "third"})
        history.references["third"] = record("unary", key="third")
    history.faults = fields.pop("faults", [])
    history.arrivals = [one if isinstance(one, Arrival) else Arrival("http://a", 0.0, {"rid": one}) for one in arrived]
    history.orders = [Order(worker, 0.5, rid) for worker, rid in orders]
    history.samples = [Sample(0.0, {"fds": 10, "in_flight": 3}), Sample(9.0, fields)]
    return history


def failed(causes: list[str | None], error: str = "migration_limit", **fields: Any) -> dict[str, Any]:
    """The row of a request that ran out of attempts, or out of what `error` says."""
    attempts = [{**one, "cause": cause, "tokens": 0} for one, cause in zip((ATTEMPT, SECOND), causes, strict=False)]
    ended = {"outcome": "failed", "status": 502, "error": error, "completion_tokens": 0}
    return {**ROW, "attempts": attempts, **ended, **fields}


def moved(**first: Any) -> dict[str, Any]:
    """The row of a request that went on at the same worker after its first attempt was cut."""
    one = {**ATTEMPT, "tokens": 2, "cause": "cut", **first}
    return {**ROW, "attempts": [one, {**SECOND, "tokens": 2, "resumed_from": 2}]}


def late(seconds: float = 2.9) -> Record:
    """The unary answer, that long under way by its own account."""
    said = events("unary")
    said[-1]["meta_info"]["e2e_latency"] = seconds
    return record("unary", said)


def asked(rid: str = "own", made: Any = None, **sampling: Any) -> Arrival:
    """What a worker got."""
    body = {**record("unary").body, "rid": rid}
    return Arrival("http://a", 0.0, {**body, "sampling_params": {**body["sampling_params"], **sampling}}, made)


def relabelled(mode: str) -> Record:
    """All tokens are said to be of other weights; of a stream, they come two at a time."""
    said = [event(mode, 0, 2), event(mode, 2, 4)] if mode != "unary" else events(mode)
    for each in said:
        each["meta_info"]["weight_version"] = "v2"
    said[-1]["meta_info"]["weight_versions"] = [{"version": "v2", "start": 0, "end": 4}]
    return record(mode, said)


#: Its only attempt was lost with its last word.
TOLD = [("http://a", "own")]
CUT = {**ROW, "outcome": "completed_here", "attempts": [{**ATTEMPT, "cause": "cut"}]}
LOST = [{**ATTEMPT, "number": number, "cause": "cut", "tokens": 0, "ended": 0.0} for number in range(2)]
REFUSED = [{**one, "cause": "connect"} for one in LOST]

#: What is right about a run, and wrong.
RUNS: dict[str, tuple[History, set[str]]] = {
    "all is well": (run(WHOLE), set()),
    "it moved": (run(MOVED, late()), set()),
    "finished here": (run({**WHOLE, "outcome": "completed_here"}), set()),
    "it was only forwarded": (
        run({**WHOLE, "completion_tokens": None, "cached_tokens": None, "attempts": [{**ATTEMPT, "tokens": 0}]}),
        set(),
    ),
    "no row": (run({**WHOLE, "rid": "other"}), {"exactly_once"}),
    "no row of a client that left before any answer": (
        run({**WHOLE, "rid": "other"}, record("unary", status=0, left=True, error="the client left")),
        set(),
    ),
    "attempts at the same time": (
        run({**MOVED, "attempts": [MOVED["attempts"][0], {**MOVED["attempts"][1], "started": 0.5}]}, late()),
        {"exactly_once"},
    ),
    "tokens that no attempt gave": (run({**WHOLE, "completion_tokens": 5}), {"exactly_once", "rows"}),
    "a token less than the client has": (
        run({**WHOLE, "completion_tokens": 3, "attempts": [{**ATTEMPT, "tokens": 3}]}),
        {"rows"},
    ),
    "tokens less than a client has that left": (
        run({**WHOLE, "completion_tokens": 3, "attempts": [{**ATTEMPT, "tokens": 3}]}, record("unary", left=True)),
        {"rows"},
    ),
    "a continuation from elsewhere": (
        run({**MOVED, "attempts": [MOVED["attempts"][0], {**MOVED["attempts"][1], "resumed_from": 0}]}, late()),
        {"rows"},
    ),
    "a prompt of another length": (run({**WHOLE, "prompt_tokens": 4}), {"rows"}),
    "another share in the cache": (run({**WHOLE, "cached_tokens": 1}), {"rows"}),
    "as many tokens as an answer had that was not kept": (run(WHOLE, without_answer(record("unary"), 4)), set()),
    "less tokens than an answer had that was not kept": (run(WHOLE, without_answer(record("unary"), 5)), {"rows"}),
    "a failure of what came whole": (run({**WHOLE, "outcome": "failed"}), {"rows"}),
    "an error of what came whole": (run({**WHOLE, "error": "no_worker"}), {"rows"}),
    "another status": (run({**WHOLE, "status": 503}), {"rows"}),
    "the header of a protected request": (run({**WHOLE, "migratable": False, "reason": "n"}), {"rows"}),
    "no header": (
        run(WHOLE, record("unary", headers={"content-type": "application/json"})),
        {"rows"},
    ),
    "a success that failed": (
        run({**failed(["cut", "cut"]), "outcome": "done"}, LOUD, faults=[HERE]),
        {"rows"},
    ),
    "an attempt that is in no row": (run(WHOLE, arrived=["own", "twin"]), {"exactly_once"}),
    "an attempt that was sent twice": (run(WHOLE, arrived=["own", "own"]), {"exactly_once"}),
    "the same worker again": (
        run(failed(["cut", "cut"]), LOUD, faults=[HERE], limits=BOTH),
        {"exclusion"},
    ),
    "the same worker again, there is no other": (
        run(failed(["cut", "cut"]), LOUD, faults=[HERE], limits={"workers": ["http://a"]}),
        set(),
    ),
    "a lease": (run(WHOLE, in_flight=1), {"leases"}),
    "descriptors": (run(WHOLE, fds=1000), {"leak"}),
    "an answer that came late": (run(WHOLE, record("unary", ended=11.0)), {"liveness"}),
    "a failure that faults explain": (run(failed(["cut", "cut"]), LOUD, faults=[HERE]), set()),
    "a failure at the moment of its fault": (
        run({**moved(ended=0.7), "time": 0.1}, late(), faults=[replace(HERE, at=0.8, until=0.8)]),
        set(),
    ),
    "a failure that nothing explains": (run(failed(["cut", "cut"]), LOUD), {"liveness", "causes"}),
    "a failure that nothing explains, survived": (run(moved(), late()), {"causes"}),
    "two losses where one may be": (
        run({**ROW, "attempts": [*LOST, SECOND]}, late(), faults=[DEAD], limits={"workers": ["http://a"]}),
        {"limit"},
    ),
    "finished here after two losses": (
        run(
            {**ROW, "outcome": "completed_here", "attempts": [LOST[0], {**SECOND, "cause": "cut"}]},
            late(),
            faults=[DEAD],
            limits={"workers": ["http://a"]},
        ),
        set(),
    ),
    "a worker again and again": (
        run({**ROW, "attempts": [*REFUSED, SECOND]}, faults=[DEAD], limits={"workers": ["http://a"]}),
        {"limit"},
    ),
    "to a worker that has just failed": (
        run(
            {**ROW, "attempts": [ATTEMPT]},
            faults=[DEAD],
            failed_before=0.5,
            limits=AGO,
        ),
        {"avoidance"},
    ),
    "to a worker that failed what it had been told to end": (
        run(
            {**ROW, "attempts": [ATTEMPT]},
            faults=[DEAD],
            failed_before=0.5,
            orders=[("http://a", "third")],
            arrived=["own", "third"],
            limits=AGO,
        ),
        set(),
    ),
    "to a worker that failed long ago": (
        run(
            {**ROW, "attempts": [ATTEMPT]},
            faults=[DEAD],
            failed_before=2.5,
            limits=AGO,
        ),
        set(),
    ),
    "to a worker that is known to be dead": (run(WHOLE, faults=[DEAD], limits={**BOTH, "notice": 1.0}), {"avoidance"}),
    "there is no other": (run(WHOLE, faults=[DEAD], limits={"workers": ["http://a"], "notice": 1.0}), set()),
    "it is not known yet": (run(WHOLE, faults=[DEAD], limits={**BOTH, "notice": 16.0}), set()),
    "nobody waits for ever": (
        run(
            {**WHOLE, "attempts": [{**ATTEMPT, "ended": 3.0}]}, faults=[replace(DEAD, at=0.2)], limits={"silence": 2.0}
        ),
        {"silence"},
    ),
    "nobody waits for ever, but for a client": (
        run(
            {**WHOLE, "attempts": [{**ATTEMPT, "ended": 3.0}]},
            faults=[replace(DEAD, at=0.2), Fault("dawdle", "http://b", 0.0, 9.0, harms=("clients",))],
            limits={"silence": 2.0},
        ),
        set(),
    ),
    "a little": (
        run(
            {**WHOLE, "attempts": [{**ATTEMPT, "ended": 3.0}]}, faults=[replace(DEAD, at=0.2)], limits={"silence": 2.9}
        ),
        set(),
    ),
    "tokens of other weights": (run(WHOLE, arrived=[asked(made=[("default", 0, 3), ("v2", 3, 4)])]), {"versions"}),
    "tokens of their weights": (run(WHOLE, arrived=[asked(made=[("default", 0, 4)])]), set()),
    "tokens of the event that brought other weights": (
        run(
            CUT,
            relabelled("incremental"),
            faults=[DEAD],
            arrived=[asked(made=[("default", 0, 1), ("v2", 1, 4)])],
            orders=TOLD,
        ),
        set(),
    ),
    "tokens of the event after it": (
        run(
            CUT,
            relabelled("incremental"),
            faults=[DEAD],
            arrived=[asked(made=[("default", 0, 3), ("v2", 3, 4)])],
            orders=TOLD,
        ),
        {"versions"},
    ),
    "a finished attempt's are known": (
        run(WHOLE, relabelled("incremental"), arrived=[asked(made=[("default", 0, 1), ("v2", 1, 4)])]),
        {"versions"},
    ),
    "a unary answer's are known": (
        run(
            CUT,
            relabelled("unary"),
            faults=[DEAD],
            arrived=[asked(made=[("default", 0, 1), ("v2", 1, 4)])],
            orders=TOLD,
        ),
        {"versions"},
    ),
    "a clock that began anew": (run(moved(), late(0.9), faults=[HERE]), {"latency"}),
    "a clock that ran on": (run(moved(), late(), faults=[HERE]), set()),
    "another temperature": (run(WHOLE, arrived=[asked(temperature=0.5)]), {"requests"}),
    "an attempt that nobody was told to drop": (
        run(moved(), late(), faults=[HERE], arrived=[asked(), asked("other")]),
        {"orders"},
    ),
    "an attempt that its worker was told to drop": (
        run(moved(), late(), faults=[HERE], arrived=[asked(), asked("other")], orders=[("http://a", "own")]),
        set(),
    ),
    "another worker was told, when all was over": (
        run({**WHOLE, "duration": 0.4}, arrived=[asked()], orders=[("http://b", "own")]),
        set(),
    ),
    "another worker was told": (run(WHOLE, arrived=[asked()], orders=[("http://b", "own")]), {"orders"}),
    "an abort that was not heard": (
        run(WHOLE, record("unary", left=True, aborted=-100.0), arrived=[asked()]),
        {"orders"},
    ),
    "an abort whose client reads on": (
        run({**WHOLE, "duration": 100.0}, record("unary", left=True, aborted=0.5), arrived=[asked()]),
        set(),
    ),
    "an abort that came when all was over": (
        run(WHOLE, record("unary", left=True, aborted=3.5, ended=100.0), arrived=[asked()], limits={"patience": None}),
        set(),
    ),
    "an attempt that never arrived": (run(WHOLE, arrived=[replace(asked(), worker="http://b")]), {"exactly_once"}),
    "a failure after the fault": (
        run(failed(["cut", "stall"]), LOUD, faults=[Fault("kill", "http://a", 0.5, 1.0)]),
        {"liveness", "causes"},
    ),
    "a failure elsewhere": (
        run(failed(["cut", "cut"]), LOUD, faults=[Fault("kill", "http://b", 0.5, 2.5)]),
        {"liveness", "causes"},
    ),
    "a failure beside something harmless": (
        run(failed(["cut", "cut"]), LOUD, faults=[Fault("slow", "http://a", 0.5, 2.5, harms=())]),
        {"liveness", "causes"},
    ),
    "a failure that faults do not bring about": (run(failed(["cut"], "eos"), LOUD, faults=[HERE]), {"liveness"}),
    "an unprotected failure": (
        run(
            failed(["cut"], "n", migratable=False, reason="n"),
            record("unary", status=502, headers={"x-dyn-relay-migratable": "no; reason=n"}),
            faults=[HERE],
        ),
        set(),
    ),
    "no other worker": (
        run(failed(["cut"], "no_survivor"), LOUD, faults=[HERE, THERE], limits=BOTH),
        set(),
    ),
    "another worker was there": (
        run(failed(["cut"], "no_survivor"), LOUD, faults=[HERE], limits=BOTH),
        {"liveness"},
    ),
    "another worker was there again": (
        run(
            failed(["cut"], "no_survivor", duration=6.0),
            LOUD,
            faults=[HERE, THERE],
            limits=BOTH,
        ),
        {"liveness"},
    ),
    "hope given up too early": (run(failed(["cut"]), LOUD, faults=[HERE]), {"liveness"}),
    "a failure where none may be": (
        run(failed(["cut", "cut"]), LOUD, faults=[HERE], limits={"migration_limit": None}),
        {"liveness"},
    ),
    "a silent failure": (
        run(failed(["cut", "cut"], status=200), record("unary", text="{}"), faults=[HERE]),
        {"liveness"},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_wrong_about_a_run_is_found(name: str) -> None:
    history, expected = RUNS[name]
    assert {finding.check for finding in check(history)} == expected


def test_memory_that_grows_is_found() -> None:
    history = run(WHOLE)
    history.samples = [Sample(float(at), {"rss": 1e8 + at * 1e7}) for at in range(10)]
    assert [finding.check for finding in check(history)] == ["leak"]
    history.samples = [Sample(float(at), {"rss": 1e8 + min(at, 3) * 5e7}) for at in range(20)]
    assert check(history) == []


def test_a_client_that_left_may_have_the_beginning_only() -> None:
    part = record("incremental", events("incremental")[:-1], done=False, error="the client left", left=True)
    assert judge(part, record("incremental")) == []
    part.events.append('{"output_ids": [4')
    assert judge(part, record("incremental")) == []
    wrong = events("incremental")[:-1]
    wrong[1]["output_ids"] = [99]
    assert objections(record("incremental", wrong, left=True), record("incremental")) == {"tokens"}


def test_a_continuation_asks_for_no_more_than_is_left() -> None:
    history = run(WHOLE)
    same = {"temperature": 0}
    sent = {**record("unary").body, "input_ids": [*PROMPT, *IDS[:1]], "sampling_params": {**same, "max_new_tokens": 3}}
    history.arrivals = [Arrival("w1", 1.0, sent)]
    assert check(history) == []
    for wanted in ({"max_new_tokens": 4}, {"max_new_tokens": 2}, {}):
        history.arrivals = [Arrival("w1", 1.0, {**sent, "sampling_params": {**same, **wanted}})]
        assert [finding.check for finding in check(history)] == ["budget"]
    none = {**sent, "input_ids": [*PROMPT, *IDS], "sampling_params": {**same, "max_new_tokens": 0}}
    history.arrivals = [Arrival("w1", 1.0, none)]
    assert [finding.check for finding in check(history)] == ["budget"]


def test_an_answer_that_was_checked_before_needs_no_reference_but_must_still_be_in_time() -> None:
    for ended, expected in ((1.0, []), (11.0, ["liveness"])):
        history = run(WHOLE, without_answer(record("unary", ended=ended), 4))
        history.references = {}
        assert [finding.check for finding in check(history)] == expected
        assert history.records["unary"].text == ""


def test_a_history_survives_the_file(tmp_path: Path) -> None:
    for end in (End(), End(-9), None):
        history = run(WHOLE, faults=[HERE])
        history.end = end
        save(tmp_path / "h.jsonl", history.entries())
        again = load(tmp_path / "h.jsonl")
        assert again.end == end
        assert list(again.entries()) == list(history.entries())


def test_a_row_without_what_checkers_read_is_no_row(tmp_path: Path) -> None:
    for name in ROW.keys() | {"attempts"}:
        save(tmp_path / "h.jsonl", [Run(), Row({key: value for key, value in WHOLE.items() if key != name})])
        with pytest.raises(ValueError, match=f"h.jsonl:2: .*`{name}`"):
            load(tmp_path / "h.jsonl")


def test_every_check_has_its_corruption() -> None:
    covered = {"framing", "dialect", *(each for _, _, expected in CORRUPTIONS.values() for each in expected)}
    covered |= {each for _, expected in RUNS.values() for each in expected}
    assert covered == set(CHECKERS)
