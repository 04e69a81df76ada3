"""Every check fails on the run that it is there for, and passes a good one."""

from __future__ import annotations

from pathlib import Path

import pytest
from checker_runs import HERE, ROW, RUNS, WHOLE, run
from test_checkers import CORRUPTIONS
from tests.recorded_answers import IDS, PROMPT, record

from dyn_testkit.checkers import CHECKERS, check, exclusion
from dyn_testkit.history import (
    Arrival,
    End,
    Lease,
    Row,
    Run,
    Sample,
    load,
    save,
    without_answer,
)


@pytest.mark.parametrize("name", RUNS)
def test_what_is_wrong_about_a_run_is_found(name: str) -> None:
    history, expected = RUNS[name]
    assert {finding.check for finding in check(history)} == expected


PAIRED = {"workers": ["http://a", "http://b", "http://c"], "prefills": ["http://p", "http://q"]}


@pytest.mark.parametrize(
    ("tried", "wrong"),
    [
        ((("a", "p", "cut", "end of stream"), ("a", "q", None, "")), True),
        ((("a", "p", "cut", "prefill: end of stream"), ("a", "q", None, "")), False),
        ((("a", "p", "cut", "prefill: end of stream"), ("b", "p", None, "")), True),
        # A prefill worker that is silent may have been kept waiting by the decode worker beside it.
        (
            (
                ("a", "p", "stall", "prefill: no answer"),
                ("b", "q", "cut", "cut"),
                ("c", "q", "cut", "cut"),
                ("b", "q", None, ""),
            ),
            False,
        ),
        (
            (
                ("a", "p", "cut", "prefill: cut"),
                ("b", "q", "cut", "cut"),
                ("c", "q", "cut", "cut"),
                ("b", "q", None, ""),
            ),
            True,
        ),
        # Whether all have failed depends on who was busy.
        (
            (
                ("a", "p", "busy", ""),
                ("b", "q", "cut", "cut"),
                ("c", "q", "cut", "prefill: cut"),
                ("c", "q", "cut", "prefill: cut"),
            ),
            False,
        ),
        # Who begins again begins with all.
        (
            (
                ("a", "p", "cut", "cut"),
                ("b", "p", "cut", "cut"),
                ("c", "p", "cut", "prefill: cut"),
                ("c", "q", "cut", "cut"),
                ("a", "p", None, ""),
            ),
            False,
        ),
        (
            (
                ("a", "p", "cut", "cut"),
                ("b", "p", "cut", "prefill: cut"),
                ("b", "p", None, ""),
            ),
            True,
        ),
        # An engine's own words are not told: it may have been either.
        ((("a", "p", "failed", ""), ("a", "q", None, "")), False),
    ],
)
def test_who_of_a_pair_failed_is_left_out(tried: tuple[tuple[str, str, str | None, str], ...], wrong: bool) -> None:
    attempts = [
        {
            "number": number,
            "url": f"http://{url}",
            "prefill_url": f"http://{prefill}",
            "cause": cause,
            "detail": words,
            "started": float(number),
        }
        for number, (url, prefill, cause, words) in enumerate(tried)
    ]
    history = run({**ROW, "attempts": attempts}, limits=PAIRED)
    assert bool(list(exclusion.check(history))) == wrong


def test_memory_that_grows_is_found() -> None:
    history = run(WHOLE)
    history.samples = [Sample(float(at), {"rss": 1e8 + at * 1e7}) for at in range(10)]
    assert [finding.check for finding in check(history)] == ["leak"]
    history.samples = [Sample(float(at), {"rss": 1e8 + min(at, 3) * 5e7}) for at in range(20)]
    assert check(history) == []


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
        history.leases = [Lease("http://a", 1.0, 10.0)]
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
    # It has its own: test_simulated_pairs.py.
    assert covered == set(CHECKERS) - {"pairs"}
