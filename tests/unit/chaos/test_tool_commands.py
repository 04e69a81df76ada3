"""The testkit's, the campaigns' and the benchmarks' commands: a mistake gets one line that says what to do."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import trio
from click.testing import CliRunner

import dyn_chaos.cli as chaos
import dyn_testkit.cli as testkit
from dyn_chaos.campaigns.base import Campaign
from dyn_chaos.namespaces import Unable
from dyn_chaos.processes import NotReady
from dyn_chaos.report import Outcome
from dyn_chaos.run import Listener, Setup
from dyn_testkit.faults import Kind
from dyn_testkit.fold import Incomplete
from dyn_testkit.history import Fault

ROOT = Path(__file__).parents[3]


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False)


# dyn-mock-worker


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "99999"], "'--port'"),
        (["--tick", "-1"], "'--tick'"),
        (["--eos-rate", "5"], "'--eos-rate'"),
        (["--tokens-per-tick", "0"], "'--tokens-per-tick'"),
        (["--preferred-sampling-params", "{"], "is not JSON"),
        (["--preferred-sampling-params", "[]"], "is not a JSON object"),
        (["--fault", "kill@2"], "WHAT: kill, "),
        (["--fault", "0:kill@xx"], "WHERE: a token"),
        (["--fault", "0:explode@head"], "WHAT: kill, "),
        (["--fault", "0:503@3"], "status cannot happen at token"),
    ],
)
def test_a_bad_flag_of_the_mock_worker_is_a_usage_error(flags: list[str], said: str) -> None:
    result = CliRunner().invoke(testkit.main, flags)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "invalid literal" not in result.output


def test_a_taken_port_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(testkit.main, ["--port", str(port)])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: cannot listen on 127.0.0.1:{port}: ")
    assert result.output.count("\n") == 1


def test_help_names_every_fault_and_every_place() -> None:
    numbered = {Kind.STATUS, Kind.ABORT_EVENT, Kind.DELAY, Kind.GRPC_STATUS, Kind.RST_STREAM}
    assert {kind.value for kind in set(Kind) - numbered} | {"abort"} == set(testkit.WHAT)
    assert {kind.value for kind in numbered - {Kind.STATUS, Kind.ABORT_EVENT}} <= set(testkit.NUMBERED)
    shown = " ".join(CliRunner().invoke(testkit.main, ["--help"]).output.split())
    assert ", ".join(testkit.WHAT) in shown
    assert ", ".join(testkit.WHERE) in shown
    assert all(f"{word}CODE" in shown for word in testkit.NUMBERED)
    for what in (*testkit.WHAT, "abort503", "503"):
        assert testkit._fault(f"0:{what}@{'0' if 'abort' in what else 'head'}")
    for where in (*testkit.WHERE, "0", "12"):
        assert testkit._fault(f"3:kill@{where}")


# dyn-chaos


def _kept(output: str) -> Path:
    [folder] = re.findall(r"kept in (\S+):", output)
    return Path(folder)


def test_a_process_that_does_not_start_is_a_message_and_its_log_is_kept() -> None:
    result = CliRunner().invoke(
        chaos.main, ["kill-worker", "--engine-cmd", f"{sys.executable} --no-such-flag {{port}}"]
    )
    assert result.exit_code == 1, result.output
    assert re.search(r"Error: worker-[01] ended before it was ready; see \S+/worker-[01]\.log", result.output)
    folder = _kept(result.output)
    assert any("--no-such-flag" in path.read_text() for path in folder.glob("worker-?.log"))
    shutil.rmtree(folder)


def test_what_this_machine_cannot_do_is_skipped_loudly(tmp_path: Path) -> None:
    async def campaign(_: Path) -> None:
        async with trio.open_nursery():
            raise Unable("no nft on the PATH")

    with pytest.raises(chaos.Skipped, match="SKIPPED, nothing was tested: no nft") as skipped:
        chaos._run(campaign, tmp_path)
    assert skipped.value.exit_code == 3


@pytest.mark.parametrize("error", [NotReady("it has ended"), Incomplete("no reference")])
def test_what_the_user_can_mend_is_no_traceback(tmp_path: Path, error: Exception) -> None:
    async def campaign(_: Path) -> None:
        async with trio.open_nursery(), trio.open_nursery():
            raise error

    with pytest.raises(click.ClickException, match=str(error)):
        chaos._run(campaign, tmp_path)


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    async def campaign(_: Path) -> None:
        async with trio.open_nursery():
            raise KeyError("bug")

    with pytest.raises(ExceptionGroup):
        chaos._run(campaign, tmp_path)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """A campaign without processes: `found` is what it finds; the folder that it was given is left here."""
    asked: dict[str, object] = {"found": False}

    async def run(row: Campaign, setup: Setup, out: Path, heard: Listener) -> Outcome:
        asked["logs"] = out
        outcome = Outcome(row.name)
        outcome.expect(not asked["found"], "vacuous", "nothing was migrated")
        (out / "summary.json").write_text("{}")
        heard(Fault("kill", "http://127.0.0.1:1", 2.0))
        return outcome

    monkeypatch.setattr(chaos, "run", run)
    yield asked
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(str(asked["logs"]))


@pytest.mark.parametrize("found", [True, False])
def test_evidence_is_kept_if_and_only_if_something_was_found(seen: dict[str, object], found: bool) -> None:
    seen["found"] = found
    result = CliRunner().invoke(chaos.main, ["kill-worker"])
    assert result.exit_code == found, result.output
    assert "2.0 s  kill of http://127.0.0.1:1: NOTHING IS TO BE SEEN OF IT" in result.output
    logs = Path(str(seen["logs"]))
    assert logs.exists() is found
    if found:
        assert _kept(result.output) == logs
        assert re.search(r"seed=0 commit=\S+ dyn-chaos\b", result.output)


def test_an_earlier_run_does_not_pass_for_one_that_is_broken_off(
    seen: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(row: Campaign, setup: Setup, out: Path, heard: Listener) -> Outcome:
        seen["logs"] = out
        raise NotReady("it has ended")

    for name in ("history.jsonl", "summary.json", "report.html", "mine"):
        (tmp_path / name).touch()
    monkeypatch.setattr(chaos, "run", run)
    result = CliRunner().invoke(chaos.main, ["kill-worker", "--out", str(tmp_path)])
    assert result.exit_code == 1, result.output
    assert f"kept in {tmp_path}: mine\n" in result.output


def test_a_folder_that_was_named_stays(seen: dict[str, object], tmp_path: Path) -> None:
    result = CliRunner().invoke(chaos.main, ["kill-worker", "--out", str(tmp_path / "a" / "b")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a" / "b" / "summary.json").exists()


# without their extras


@pytest.mark.parametrize(
    ("module", "without", "extra"), [("dyn_testkit", "h11", "testkit"), ("dyn_chaos", "httpx", "chaos")]
)
def test_a_missing_extra_is_named(module: str, without: str, extra: str) -> None:
    ended = python("-c", f"import sys; sys.modules[{without!r}] = None; import {module}.cli")
    assert ended.returncode == 1
    assert ended.stderr.endswith(f"pip install '.[{extra}]' in a checkout\n")
    assert ended.stderr.count("\n") == 1


# bench/, tests/live/, docs/


@pytest.mark.parametrize("name", ["run.py", "soak.py", "migration.py", "memory.py"])
def test_a_benchmark_asks_for_its_build(tmp_path: Path, name: str) -> None:
    for source in (ROOT / "bench").glob("*.py"):
        shutil.copy(source, tmp_path)
    ended = python(str(tmp_path / name))
    assert ended.returncode == 1
    assert ended.stderr.startswith("run bench/build.sh first")
    assert "bin/mockworker" in ended.stderr


def test_the_tables_of_earlier_runs_have_a_usage() -> None:
    program = str(ROOT / "bench" / "report.py")
    assert python(program, "--help").stdout.startswith("usage: report.py")
    missing = python(program, "no-such.json")
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 2


def test_naming_the_live_cases_installs_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    ended = subprocess.run(
        ["bash", str(ROOT / "tests" / "live" / "run.sh"), "--list"],
        env={"PATH": "/usr/bin:/bin", "DYN_LIVE_HOME": str(home), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "kill-group" in ended.stdout.split()
    assert not home.exists()


def test_the_examples_of_the_testkit_page_run() -> None:
    page = (ROOT / "docs" / "testkit.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(examples) >= 3
    for example in examples:
        ended = python("-c", example)
        assert ended.returncode == 0, ended.stderr
