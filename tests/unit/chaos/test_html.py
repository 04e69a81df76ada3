"""The report's page: what is in it, and that nothing of a run is ever markup. How it looks and works: tests/browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.recorded_answers import record
from tests.recorded_runs import HOSTILE, attempt, bare, row, stormy, stream

from dyn_chaos import html
from dyn_chaos.cli import main
from dyn_chaos.html import lanes
from dyn_testkit import checkers, history
from dyn_testkit.checkers import Finding
from dyn_testkit.history import History, Reference, Run, Sample


class Reader(HTMLParser):
    """The tags of a page, its links, its data and the text that is seen without a script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.data = ""
        self.seen = ""
        self._within: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.links += [given["href"] or ""] if tag == "a" else []
        self.sources += [value or "" for name, value in attrs if name in ("src", "href") and tag != "a"]
        self._within.append("data" if given.get("id") == "data" else tag)

    def handle_endtag(self, tag: str) -> None:
        self._within.pop()

    def handle_data(self, data: str) -> None:
        if self._within and self._within[-1] == "data":
            self.data += data
        elif self._within and self._within[-1] not in ("script", "style"):
            self.seen += f" {data}"


def drawn(seen: History, findings: list[Finding] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(Reader(html.render(seen, findings or [])).data)
    return made


def test_hostile_text_stays_text() -> None:
    page = html.render(*stormy())
    read = Reader(page)
    assert read.tags.count("script") == 2
    assert "img" not in read.tags
    assert "</script><script>" not in page
    assert f"the tokens are wrong {HOSTILE}" in read.seen
    moved = next(lane for lane in json.loads(read.data)["lanes"] if lane["key"] == "moved")
    assert json.loads(moved["body"]["note"]) == HOSTILE


def test_the_page_loads_nothing() -> None:
    page = html.render(*stormy())
    assert Reader(page).sources == ["data:,"]
    assert not re.search(r"(@import|url\(|https?://(?!127\.0\.0\.1|www\.w3\.org/2000/svg))", page)


def test_findings_link_to_the_lanes_of_their_requests() -> None:
    read = Reader(html.render(*stormy()))
    keys = [lane["key"] for lane in json.loads(read.data)["lanes"]]
    # one by the key, one by the rid; the run's own has none
    assert [keys[int(link.removeprefix("#lane-"))] for link in read.links] == ["moved", "failed"]
    assert "nothing was shown" in read.seen


def test_the_verdict_is_of_the_findings() -> None:
    seen, findings = stormy()
    assert "FAIL" in Reader(html.render(seen, findings)).seen
    passed = Reader(html.render(seen, [])).seen
    assert "FAIL" not in passed
    assert "pass" in passed
    assert "seed 7 · commit 0123abcd · command storm --streams 40" in " ".join(passed.split())
    assert "moves" not in passed.partition("Checks")[0]


def test_a_check_without_anything_to_judge_does_not_hold() -> None:
    said = Reader(html.render(bare(), [])).seen
    assert [said.count(each) for each in ("holds", "no references", "no rows", "no samples")] == [
        0,
        len(checkers.CHECKERS) - 6,
        3,
        2,
    ]
    seen, _ = stormy()
    assert Reader(html.render(seen, [], ["leak", "tokens"])).seen.count("holds") == 1
    asked = history.of_records({"unary": record("unary")}, {"unary": record("unary")})
    assert "nobody asked for them" in Reader(html.render(asked, [], ["experts"])).seen
    asked.records["unary"].body["return_routed_experts"] = True
    assert "holds" in Reader(html.render(asked, [], ["experts"])).seen


@pytest.mark.parametrize("seen", [History(), bare()], ids=["empty", "bare"])
def test_a_run_may_have_nothing_but_requests(seen: History) -> None:
    made = drawn(seen)
    assert [lane["key"] for lane in made["lanes"]] == list(seen.records)
    assert (made["faults"], made["workers"], made["samples"]) == ([], [], [])


def test_a_lane_tells_what_became_of_its_request() -> None:
    found = {lane["key"]: lane for lane in drawn(*stormy())["lanes"]}
    moved, failed, gone = found["moved"], found["failed"], found["gone"]
    assert (moved["status"], moved["moved"], moved["tokens"]) == ("whole", True, 4)
    assert [(each["worker"], each["cut"], each["first"]) for each in moved["attempts"]] == [
        ("w1", True, 10.5),
        ("w2", False, 12.5),
    ]
    assert (failed["status"], failed["why"]) == ("failed", HOSTILE)
    assert failed["findings"] == [["exactly_once", "2 rows"]]
    assert (gone["status"], gone["attempts"]) == ("left", [])
    assert moved["body"]["input_ids"] == '[0, 1, 2, 3, 4, 5, "... 894 more"]'


def test_an_answer_that_was_checked_and_not_kept_is_whole() -> None:
    seen = History(Run(traced=True))
    seen.add(history.without_answer(record("cumulative"), 4))
    [lane] = drawn(seen)["lanes"]
    assert (lane["status"], lane["why"], lane["tokens"]) == ("whole", "", 4)
    said = Reader(html.render(seen, [], ["tokens"])).seen
    assert "1 whole" in said
    assert "holds" in said


def test_what_an_engine_refuses_has_not_failed() -> None:
    seen = bare()
    seen.records["unary"] = record("unary", key="unary", status=400, text="no")
    assert drawn(seen)["lanes"][1]["status"] == "failed"
    seen.add(Reference.of(seen.records["unary"]))
    assert drawn(seen)["lanes"][1]["status"] == "refused"


def test_a_fault_has_its_workers_name() -> None:
    [fault] = drawn(*stormy())["faults"]
    assert (fault["kind"], fault["target"], fault["url"]) == ("kill", "w1", "http://127.0.0.1:30001")


def test_lanes_come_in_the_order_of_their_requests() -> None:
    seen = History()
    for key, sent in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        seen.add(stream(key, sent, (0.1, 0.1)))
    assert [lane["key"] for lane in drawn(seen)["lanes"]] == ["a", "b", "c"]


def test_a_long_stream_keeps_its_pauses() -> None:
    times = [0.01 * number + (5.0 if number > 700 else 0.0) for number in range(2000)]
    said = json.dumps({"output_ids": [1], "meta_info": {"completion_tokens": 9}})
    seen = History()
    seen.add(stream("k", 0.0, (0, 0), events=[said] * len(times), times=times))
    [lane] = drawn(seen)["lanes"]
    assert len(lane["times"]) <= 2 * lanes.POINTS + 2
    assert (lane["times"][0], lane["times"][-1]) == (times[0], pytest.approx(times[-1]))
    assert {round(times[700], 4), round(times[701], 4)} <= set(lane["times"])
    assert lane["pause"] == pytest.approx(5.01)


def test_samples_become_series() -> None:
    seen = bare()
    seen.samples += [Sample(1.0, {"fds": 3, 'load{worker="w2"}': 1}), Sample(2.0, {"fds": 4, 'waits{for="x"}': 0})]
    assert [(each["name"], each["label"], each["worker"], each["values"]) for each in drawn(seen)["samples"]] == [
        ("fds", "", "", [3, 4]),
        ("load", 'worker="w2"', "w2", [1]),
        ("waits", 'for="x"', "", [0]),
    ]


def test_workers_are_in_the_order_of_their_numbers() -> None:
    seen = History(Run(traced=True))
    seen.add(record("unary", key="k"))
    seen.rows.append(
        row("own", 0.0, *(attempt(0, "w1") | {"worker": name, "url": name} for name in ("w10", "w2", "w1")))
    )
    assert drawn(seen)["workers"] == ["w1", "w2", "w10"]


# dyn-chaos report


def recorded(folder: Path, **changes: Any) -> Path:
    seen = history.of_records({"unary": record("unary", **changes)}, {"unary": Reference.of(record("unary"))})
    history.save(folder / "history.jsonl", seen.entries())
    return folder / "history.jsonl"


@pytest.mark.parametrize("of_folder", [True, False])
def test_the_command_draws_a_folder_or_a_file(tmp_path: Path, of_folder: bool) -> None:
    file = recorded(tmp_path)
    result = CliRunner().invoke(main, ["report", str(tmp_path if of_folder else file)])
    assert (result.exit_code, result.output) == (0, f"{tmp_path / 'report.html'}: 1 requests, 0 findings\n")
    assert Reader((tmp_path / "report.html").read_text(encoding="utf-8")).tags[0] == "html"


def test_the_command_fails_if_anything_is_found(tmp_path: Path) -> None:
    recorded(tmp_path, status=500)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "status 500" in Reader((tmp_path / "report.html").read_text(encoding="utf-8")).seen


@pytest.mark.parametrize("text", [None, '{"entry":"what"}\n'])
def test_what_is_no_history_is_one_line(tmp_path: Path, text: str | None) -> None:
    if text:
        (tmp_path / "history.jsonl").write_text(text)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert "history.jsonl" in result.output
