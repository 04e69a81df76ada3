"""The command line, without serving."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from dyn_relay.cli import main, spread
from dyn_relay.config import OPTIONS


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    for name in (name for option in OPTIONS for name in option.variables):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


def test_help_names_every_option(runner: CliRunner) -> None:
    text = runner.invoke(main, ["serve", "--help"], terminal_width=200).output
    assert [option.flag for option in OPTIONS if option.flag not in text] == []
    assert [option.env for option in OPTIONS if option.env not in text] == []
    assert "--config" in text


def test_check_prints_values_and_origins(runner: CliRunner) -> None:
    result = runner.invoke(main, ["check", "--port", "0", "--log-json"], env={"DYN_HOST": "::1"})
    rows = {line.split()[1]: line.split()[3:6:2] for line in result.output.splitlines() if line.startswith("│")}
    assert result.exit_code == 0
    assert rows["port"] == ["0", "--port"]
    assert rows["log_json"] == ["true", "--log-json"]
    assert rows["host"] == ["::1", "DYN_HOST"]
    assert rows["migration_limit"] == ["3", "default"]


def test_what_was_said_in_other_words_is_of_those_words(runner: CliRunner) -> None:
    words = ["check", "--prefill-engine-url", "grpc://a:1", "--engine-url", "grpc://b:1", "--decode", "grpc://c:1"]
    result = runner.invoke(main, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    rows = {cells[1].strip(): cells[2:4] for line in result.output.splitlines() if len(cells := line.split("│")) == 5}
    assert [cell.strip() for cell in rows["prefill"]] == ["grpc://a:1", "--engine-url, --prefill-engine-url"]
    assert [cell.strip() for cell in rows["decode"]] == [
        "grpc://c:1 grpc://b:1",
        "--decode, --engine-url, --prefill-engine-url",
    ]
    assert [cell.strip() for cell in rows["worker_urls"]] == ["", "default"]


def test_check_shows_no_secret(runner: CliRunner) -> None:
    result = runner.invoke(main, ["check", "--api-key", "hunter2"], env={"DYN_WORKER_API_KEY": "hunter3"})
    assert result.output.count("***") == 2
    assert "hunter" not in result.output


def test_worker_urls_as_smg_types_them(runner: CliRunner) -> None:
    words = ["check", "--worker-urls", "http://a:1", "http://b:2", "--port", "0", "--worker-urls", "http://c:3"]
    result = runner.invoke(main, words)
    assert "http://a:1 http://b:2 http://c:3" in result.output


def test_discovery_as_smg_types_it(runner: CliRunner) -> None:
    words = ["check", "--service-discovery", "--selector", "app=sglang", "role=engine"]
    words += ["--service-discovery-namespace", "prod", "--service-discovery-port", "30000"]
    output = runner.invoke(main, words).output
    for value in ("app=sglang role=engine", "prod", "30000"):
        assert value in output
    assert "--selector KEY=VALUE ..." in runner.invoke(main, ["serve", "--help"]).output


def test_spreading_leaves_other_arguments_alone() -> None:
    assert spread(["--port", "1", "--worker-urls=x", "--worker-urls", "a", "b", "--log-json", "y"]) == [
        *("--port", "1", "--worker-urls", "x", "--worker-urls", "a", "--worker-urls", "b", "--log-json", "y")
    ]


@pytest.mark.parametrize("after", [[], ["--decode", "http://a:1"], ["--decode=http://a:1"], ["--log-json"]])
def test_a_flag_without_a_value_is_named(runner: CliRunner, after: list[str]) -> None:
    """And not the one behind it, which click would take for the value."""
    result = runner.invoke(main, ["check", "--pd-disaggregation", "--prefill", *after])
    assert result.exit_code == 2
    assert "Usage: " in result.output
    assert "Error: Option '--prefill' requires an argument." in result.output


def test_a_bad_value_is_a_usage_error(runner: CliRunner) -> None:
    result = runner.invoke(main, ["check", "--port", "x"])
    assert result.exit_code == 2
    assert "port: must be a whole number, not 'x' (from --port)" in result.output


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dyn_relay", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("dyn-relay ")


def test_help_needs_no_network_code() -> None:
    """Starting in well under a second: what is heavy is imported by the command that needs it."""
    code = (
        "import sys, dyn_relay.cli; print([m for m in ('trio', 'rich.table', 'prometheus_client') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
