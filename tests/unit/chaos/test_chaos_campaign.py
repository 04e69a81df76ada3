"""A campaign strikes when clients have seen enough, and fails if it has shown nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
from chaos_http import chunked, plain, serving
from click.testing import CliRunner
from dyn_chaos.campaigns.kill_worker import MIGRATABLE, busiest, judge, strike_during
from tests.recorded_answers import record

from dyn_chaos import report
from dyn_chaos.campaigns import kill_worker
from dyn_chaos.cli import main
from dyn_chaos.engines import Given
from dyn_chaos.load import Plan
from dyn_chaos.report import Outcome
from dyn_testkit import history
from dyn_testkit.history import Record, Reference
from dyn_testkit.watch import Watch, started

EVENT = b'data: {"output_ids":[4],"meta_info":{"completion_tokens":1}}\n\n'


async def nothing() -> None:
    await trio.lowlevel.checkpoint()


async def run(ready_after: int) -> tuple[Outcome, Mapping[str, Record]]:
    outcome = Outcome("x")
    async with serving({"/generate": chunked(EVENT, b"data: [DONE]\n\n")}) as url:
        records = await strike_during(url, [Plan("k", {"stream": True})], started(ready_after), nothing, outcome)
    return outcome, records


async def test_the_strike_comes_after_the_events_it_waits_for() -> None:
    outcome, records = await run(1)
    assert outcome.ok
    assert outcome.facts["tokens at the strike"] == 1
    assert records["k"].done


async def test_a_load_that_ends_before_the_strike_has_shown_nothing() -> None:
    outcome, _ = await run(2)
    assert [finding.check for finding in outcome.findings] == ["vacuous"]


async def test_a_strike_may_outlast_the_load() -> None:
    outcome = Outcome("x")
    finished = False
    watch = Watch()

    async def slow() -> None:
        nonlocal finished
        await watch.until(lambda seen: "k" in seen.ended)
        await trio.testing.wait_all_tasks_blocked()
        finished = True

    async with serving({"/generate": chunked(EVENT, b"data: [DONE]\n\n")}) as url:
        await strike_during(url, [Plan("k", {"stream": True})], started(1), slow, outcome, watch)
    assert finished
    assert outcome.ok


def metrics(migrations: int, in_flight: int) -> bytes:
    return plain(
        f'dyn_relay_migrations_total{{reason="eof"}} {migrations}.0\n'
        f"dyn_relay_requests_in_flight {in_flight}.0\ndyn_relay_attempts_in_flight 0.0\n".encode(),
        content_type="text/plain",
    )


def answered(**changes: Any) -> Record:
    got = record("unary", **changes)
    got.headers.setdefault(MIGRATABLE, "yes")
    return got


async def judged(got: Record, said: bytes, moved: bool = True) -> list[str]:
    outcome = Outcome("x")
    async with serving({"/metrics": said}) as url:
        await judge(url, {"unary": got}, {"unary": record("unary")}, outcome, moved)
    return [finding.check for finding in outcome.findings]


async def test_a_good_run_has_no_findings() -> None:
    assert await judged(answered(), metrics(1, 0)) == []
    assert await judged(answered(), metrics(0, 0), moved=False) == []


async def test_a_run_without_a_migration_has_shown_nothing() -> None:
    assert await judged(answered(), metrics(0, 0)) == ["vacuous"]


@pytest.mark.parametrize(("status", "good"), [(200, "1/1"), (502, "0/1")])
async def test_only_wrong_answers_count_as_such(status: int, good: str) -> None:
    outcome = Outcome("x")
    async with serving({"/metrics": metrics(0, 0)}) as url:
        outcome.expect(False, "vacuous", "of the campaign, of no answer")
        await judge(url, {"unary": answered(status=status)}, {"unary": record("unary")}, outcome)
    assert outcome.facts["answers"] == good


async def test_a_request_that_stays_in_flight_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill_worker, "SETTLE", 0.0)
    assert await judged(answered(), metrics(1, 1)) == ["leak"]


async def test_gauges_may_take_a_moment() -> None:
    said = iter([metrics(1, 1), metrics(1, 0)])
    outcome = Outcome("x")
    async with serving({"/metrics": lambda: next(said)}) as url:
        await judge(url, {}, {}, outcome)
    assert outcome.ok


async def test_a_missing_gauge_is_a_finding() -> None:
    assert await judged(answered(), plain(b"dyn_relay_migrations_total 1\n")) == ["leak", "leak"]


async def test_an_unprotected_answer_is_a_finding() -> None:
    got = record("unary", headers={"content-type": "application/json", MIGRATABLE: "no; reason=stop"})
    assert await judged(got, metrics(1, 0)) == ["header"]


async def test_a_wrong_answer_is_a_finding() -> None:
    assert await judged(answered(status=502), metrics(1, 0)) == ["liveness"]


async def test_the_busiest_worker_is_the_one_that_the_proxy_says() -> None:
    workers = {"workers": [{"url": "http://a:1/", "load": 2}, {"url": "http://b:1", "load": 5}]}
    servers = [Given("http://a:1", 1), Given("http://b:1", 2)]
    async with serving({"/workers": plain(json.dumps(workers).encode())}) as url:
        assert await busiest(url, servers) is servers[1]
        with pytest.raises(LookupError):
            await busiest(url, [Given("http://c:1", 3)])


@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (502, 1)])
def test_a_recorded_history_is_checked_again(tmp_path: Path, status: int, exit_code: int) -> None:
    history.save(tmp_path / "h.jsonl", [record("unary", status=status), Reference.of(record("unary"))])
    result = CliRunner().invoke(main, ["check", str(tmp_path / "h.jsonl")])
    assert result.exit_code == exit_code, result.output
    assert ("pass" in result.output) is (exit_code == 0)


def test_a_file_that_is_no_history_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text("{}\n")
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 1
    assert "h.jsonl:1" in result.output


def test_a_worker_is_named_by_url_and_process_group() -> None:
    result = CliRunner().invoke(main, ["kill-worker", "--worker", "http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "URL=PGID" in result.output


def test_a_history_survives_the_file(tmp_path: Path) -> None:
    records = [record(mode) for mode in ("unary", "incremental")]
    history.save(tmp_path / "h.jsonl", records)
    assert list(history.load(tmp_path / "h.jsonl").records.values()) == records
    history.save(tmp_path / "h.jsonl", [records[0], records[0]])
    with pytest.raises(ValueError, match="twice"):
        history.load(tmp_path / "h.jsonl")


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
