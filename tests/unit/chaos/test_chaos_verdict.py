"""What a history comes to: wrong answers, faults that nobody saw, and runs that have shown nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.recorded_answers import events, record

from dyn_chaos import report
from dyn_chaos.cli import main
from dyn_chaos.report import Outcome
from dyn_chaos.sampler import GAUGES, MIGRATIONS
from dyn_chaos.verdict import MOVES, STRIKES, recovery_gaps, verdict
from dyn_testkit import fold, history
from dyn_testkit.checkers.rows import HEADER
from dyn_testkit.history import End, Fault, History, Record, Run, Sample, of_records

URL = "http://127.0.0.1:1"


#: What the router calls the request of the recorded answer.
RID = fold.answer(record("unary")).meta["id"]


def attempt(number: int, **changes: Any) -> dict[str, Any]:
    times = {"started": number + 0.0, "first_token": number + 0.25, "last_token": number + 0.5, "ended": number + 0.75}
    return {
        "number": number,
        "worker": "w",
        "rid": f"w-{number}",
        "url": URL,
        "resumed_from": 2 * number,
        "tokens": 2,
        "cause": None,
        **times,
        **changes,
    }


def row(**changes: Any) -> dict[str, Any]:
    return {"rid": RID, "time": 100.0, "duration": 2.0, "outcome": "done", "status": 200, "migratable": True,
            "reason": "", "error": "", "prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0,
            "attempts": [attempt(0), attempt(1)], **changes}  # fmt: skip


UNPROTECTED = record("unary", headers={"content-type": "application/json", HEADER: "no; reason=stop"}, ended=2.0)


def fault(**changes: Any) -> Fault:
    settings: dict[str, Any] = {"kind": "kill", "target": URL, "at": 0.5, "proof": "gone", **changes}
    return Fault(**settings)


def sample(**changes: float) -> Sample:
    return Sample(1.0, {**dict.fromkeys(GAUGES, 0.0), MIGRATIONS: 0.0, **changes})


def slow() -> Record:
    """The unary answer, which took as long as two attempts."""
    said = events("unary")
    said[-1]["meta_info"]["e2e_latency"] = 1.9
    return record("unary", said, ended=2.0)


def seen(moves: bool | None = True, **parts: Any) -> History:
    run = Run(traced=True, began=100.0, settings={MOVES: moves, STRIKES: True})
    got = slow()
    whole: dict[str, Any] = {
        "records": {got.key: got}, "references": {got.key: got}, "faults": [fault()], "rows": [row()],
        "samples": [sample()], "end": End(), **parts,
    }  # fmt: skip
    return History(run, **whole)


def found(some: History) -> list[str]:
    return [finding.check for finding in verdict(some).findings]


def test_a_good_run_has_no_findings() -> None:
    outcome = verdict(seen())
    assert outcome.findings == []
    assert outcome.facts["answers right"] == "1/1"
    assert outcome.facts["migrated"] == 1
    assert outcome.facts["recovery gap p50/p95/max"] == "0.75/0.75/0.75 s"


@pytest.mark.parametrize(
    ("some", "check"),
    [
        (seen(rows=[row(attempts=[attempt(0, tokens=4)])]), "vacuous"),
        (seen(faults=[]), "vacuous"),
        (History(Run(), end=End()), "vacuous"),
        (
            seen(
                end=None,
                rows=[],
                faults=[],
                references={"unary": record("unary"), "other": record("unary")},
                samples=[sample(dyn_relay_requests_in_flight=1.0)],
            ),
            "unfinished",
        ),
        (seen(end=End(-9)), "relay"),
        (seen(end=End(1)), "relay"),
        (seen(faults=[fault(at=5.0)]), "vacuous"),
        (seen(faults=[fault(at=-2.0, until=-1.0)]), "vacuous"),
        (seen(faults=[fault(kind="drain", choice={"live requests": 0})]), "vacuous"),
        (seen(moves=False), "migrations"),
        (seen(faults=[fault(proof="")]), "unproven"),
        (seen(faults=[fault(choice={"undone": ""})]), "unproven"),
        (seen(rows=[row(migratable=False, reason="stop")], records={"unary": UNPROTECTED}), "unprotected"),
        (seen(samples=[sample(dyn_relay_requests_in_flight=1.0)]), "leases"),
        (seen(faults=[fault(kind="drain", choice={"certain": [0.5, None]})]), "drain"),
    ],
)
def test_what_must_not_be_is_found(some: History, check: str) -> None:
    assert found(some) == [check]


def test_a_gauge_that_is_missing_is_found() -> None:
    assert found(seen(samples=[])) == ["gauges"]
    assert found(seen(samples=[Sample(1.0, {MIGRATIONS: 1.0})])) == ["gauges", "gauges"]


def test_attempts_before_and_after_a_drain_are_none_of_its_business() -> None:
    assert found(seen(faults=[fault(kind="drain", at=0.0, until=1.5, choice={"certain": [0.1, 0.9]})])) == []


def test_without_a_trace_the_proxy_counts_its_migrations() -> None:
    got = record("unary")
    some = History(Run(settings={MOVES: True}), {"unary": got}, {"unary": got}, samples=[sample()], end=End())
    assert found(some) == ["vacuous"]
    some.samples = [sample(**{MIGRATIONS: 2.0})]
    assert found(some) == []
    assert verdict(some).facts["migrations"] == 2


def test_only_wrong_answers_count_as_such() -> None:
    good, bad = slow(), record("incremental", status=502)
    some = seen(records={good.key: good, bad.key: bad}, references={good.key: good, bad.key: record("incremental")},
                rows=[row(), row(rid="other")])  # fmt: skip
    outcome = verdict(some)
    assert outcome.facts["answers right"] == "1/2"
    assert outcome.facts["failed loudly"] == 1


def test_a_gap_ends_with_the_next_token_wherever_that_comes_from() -> None:
    silent = attempt(1, first_token=None, last_token=None)
    assert list(recovery_gaps({"attempts": [attempt(0), silent, attempt(2)]})) == [1.75]
    assert list(recovery_gaps({"attempts": [attempt(0, first_token=None, last_token=None), attempt(1)]})) == [1.25]
    assert list(recovery_gaps({"attempts": [attempt(0)]})) == []


def test_a_median_is_not_the_worst() -> None:
    other = attempt(1, first_token=3.5, last_token=3.5, ended=3.75)
    rows = [row(), row(rid="other", attempts=[attempt(0), other])]
    assert verdict(seen(rows=rows)).facts["recovery gap p50/p95/max"] == "0.75/3.00/3.00 s"


@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (502, 1)])
def test_a_recorded_history_is_checked_again(tmp_path: Path, status: int, exit_code: int) -> None:
    got = record("unary", status=status)
    history.save(tmp_path / "history.jsonl", of_records({"unary": got}, {"unary": record("unary")}).entries())
    for path in (tmp_path, tmp_path / "history.jsonl"):
        result = CliRunner().invoke(main, ["check", str(path)])
        assert result.exit_code == exit_code, result.output
        assert ("pass" in result.output) is (exit_code == 0)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{}\n", ":1: "),
        (None, "No such file"),
        ("", ": nothing is in it"),
        ('{"entry":"end"}\n', ":1: a history has one run, which comes first"),
        ('{"entry":"run"}\n{"entry":"run"}\n', ":2: a history has one run, which comes first"),
        ('{"entry":"run"}\n{"entry":"end"}\n{"entry":"row","row":{}}\n', ":3: an entry after the end"),
        ('{"entry":"run"}\n' + 2 * '{"entry":"request","key":"k","body":{}}\n', ":3: 'k' is there twice"),
    ],
)
@pytest.mark.parametrize("command", ["check", "report"])
def test_what_is_no_history_is_refused(tmp_path: Path, command: str, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "history.jsonl").write_text(content)
    result = CliRunner().invoke(main, [command, str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert "history.jsonl" in result.output
    assert problem in result.output


def test_a_report_says_what_failed(tmp_path: Path) -> None:
    good, bad = Outcome("good", {"tokens": 3, "widest": 0.123456}), Outcome("bad")
    bad.expect(True, "tokens", "fine")
    bad.expect(False, "tokens", "not fine", "k")
    report.save(tmp_path / "r.json", [good, bad])
    document = json.loads((tmp_path / "r.json").read_bytes())
    assert document["ok"] is False
    assert [each["ok"] for each in document["outcomes"]] == [True, False]
    assert document["outcomes"][1]["findings"] == [{"key": "k", "check": "tokens", "message": "not fine"}]
    assert report.line(good).startswith("pass")
    assert "tokens x1" in report.line(bad)
