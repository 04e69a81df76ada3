"""`python -m dyn_testkit.routers`: a command line in, a table and an exit status out."""

from __future__ import annotations

import re
import sys

import pytest
from click.testing import CliRunner

from dyn_testkit.routers.__main__ import main
from dyn_testkit.routers.command import expand

URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2")
RELAY = f"{sys.executable} -m dyn_relay serve --host 127.0.0.1 --port {{port}} --log-level error"
TAKE_BACK = "--inhibited-duration-secs 0 --health-success-threshold 1"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("r --port {port} {workers}", ["r", "--port", "5", *URLS]),
        ("r --on :{port} --at={worker}", ["r", "--on", ":5", *(f"--at={url}" for url in URLS)]),
        ("r '{port} {spare}' {workers}", ["r", "5 6", *URLS]),
    ],
)
def test_a_line_is_filled_in(line, words):
    assert expand(line, URLS, (5, 6)) == words


@pytest.mark.parametrize("line", ["r {port}", "r {workers}"])
def test_a_line_without_its_placeholders(line):
    done = CliRunner().invoke(main, ["--command", line])
    assert done.exit_code == 2
    assert "the command has no" in done.output


def test_the_laws_are_listed():
    done = CliRunner().invoke(main, ["--list"])
    assert done.exit_code == 0
    assert "no false success" in done.output


def test_a_program_that_ends_at_once():
    line = f"{sys.executable} -c 'print(\"no such model\"); raise SystemExit(3)' {{port}} {{workers}}"
    done = CliRunner().invoke(main, ["--command", line])
    assert done.exit_code == 1
    assert "has ended with status 3" in done.output
    assert "no such model" in done.output


def test_a_program_that_listens_elsewhere():
    line = f"{sys.executable} -uc 'print(\"listening on 8080\"); input()' {{port}} {{workers}}"
    line = line.replace("input()", "import time; time.sleep(60)")
    done = CliRunner().invoke(main, ["--command", line, "--start-timeout", "1"])
    assert done.exit_code == 1
    assert re.search(r"does not listen on 127\.0\.0\.1:\d+ after 1 s\. It said:\nlistening on 8080", done.output)
    assert "router_factory" not in done.output


def test_nothing_to_ask():
    line = "router {port} {workers}"
    done = CliRunner().invoke(main, ["--command", line, "--only", "budget", "--skip", "budget"])
    assert done.exit_code == 2
    assert "only= and skip= leave nothing to run" in done.output


def test_a_whole_run():
    line = f"{RELAY} --worker-urls={{worker}} {TAKE_BACK}"
    done = CliRunner().invoke(main, ["--command", line, "--only", "budget", "--dialect", "incremental"])
    assert done.exit_code == 0, done.output
    assert "1 laws held, 0 broken" in done.output
