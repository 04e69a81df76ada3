"""The campaigns' table and its commands: every row can be run, and a mistake names its flag."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import dyn_chaos.cli as chaos
from dyn_chaos import commands, namespaces
from dyn_chaos.campaigns.base import Campaign
from dyn_chaos.campaigns.table import CAMPAIGNS
from dyn_chaos.mix import SENDERS
from dyn_chaos.namespaces import Namespace, Unable
from dyn_chaos.run import Setup
from dyn_testkit.tokenizer import PLAIN, SENTENCE_PIECE, Tokenizer

HERE = str(os.getpid())
ATTACH = ["--attach", "http://127.0.0.1:1", "--pid", HERE, "--attach", "http://127.0.0.1:2/", "--pid", HERE]
CMD = ["--engine-cmd", "serve --port {port}"]


#: Listens on a port of its own, which it prints.
SERVE = """
import signal, socket
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def engines() -> Iterator[list[tuple[str, str]]]:
    """(URL, process) of two servers: one on its own, one behind a shell that has a session of its own."""
    argv = [sys.executable, "-c", SERVE]
    with (
        subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as plain,
        subprocess.Popen(
            ["sh", "-c", f"{shlex.join(argv)} & wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as shell,
    ):
        started = (plain, shell)
        try:
            ports = [process.stdout.readline().strip() for process in started if process.stdout]
            yield [(f"http://127.0.0.1:{port}", str(process.pid)) for port, process in zip(ports, started, strict=True)]
        finally:
            plain.kill()
            os.killpg(shell.pid, signal.SIGKILL)


def attach(*engines: tuple[str, str]) -> list[str]:
    """The flags that name them."""
    return [word for url, pid in engines for word in ("--attach", url, "--pid", pid)]


def said(name: str, *flags: str) -> tuple[Campaign, Setup]:
    """What a command line comes to."""
    heard: list[tuple[Campaign, Setup]] = []
    command = commands.command(CAMPAIGNS[name], lambda row, setup, out: heard.append((row, setup)))
    result = CliRunner().invoke(command, flags)
    assert result.exit_code == 0, result.output
    [(row, setup)] = heard
    return row, setup


def test_the_table() -> None:
    assert set(CAMPAIGNS) == {
        *("kill-sidecar", "kill-engine", "stall-sidecar", "stall-engine"),
        *("kill-server", "kill-worker", "stall-worker", "partition"),
        *("drain", "rolling-restart", "rolling-drain", "swizzle", "soak"),
    }
    assert CAMPAIGNS.keys() | {"demo", "simulate", "check", "report"} == chaos.main.commands.keys()


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_row_is_the_default_of_its_command(name: str) -> None:
    row, setup = said(name)
    assert row == CAMPAIGNS[name]
    assert (setup.workers, setup.relay) == (row.workers, row.relay)
    assert row.action(row.choices).kind
    assert setup.oracle is not None


@pytest.mark.parametrize(
    ("name", "kind"), [("stall-worker", "stall"), ("partition", "partition"), ("drain", "drain"), ("soak", "soak")]
)
def test_what_a_row_does(name: str, kind: str) -> None:
    assert CAMPAIGNS[name].action(CAMPAIGNS[name].choices).kind == kind


def test_options_reach_the_row() -> None:
    row, setup = said(
        *(
            "kill-worker",
            "--streams",
            "20",
            "--sse",
            "75%",
            "--tokens",
            "log:16-64",
            "--think",
            "0.5",
            "--clients",
            "5",
        ),
        *("--user", "slime", "--user", "areal", "--target", "worker-2", "--mode", "50%", "--workers", "3"),
        *("--after-streams", "15", "--after-tokens", "9", "--duration", "500ms", "--signal", "ABRT", "--seed", "7"),
        *("--relay-flag", "--migration-limit 1 --stall-timeout-secs 9", "--engine-flag", "--eos-rate 0.1"),
    )
    assert (row.load.requests, row.load.streams, row.load.clients) == (20, 15, 5)
    assert (str(row.load.tokens), row.load.think.high, row.load.users) == ("log:16-64", 0.5, ("slime", "areal"))
    assert (row.order.target, row.order.mode.text, row.order.duration) == ("worker-2", "50%", 0.5)
    assert (row.when.streams, row.when.tokens, row.when.at) == (15, 9, None)
    assert row.choices.signal is signal.SIGABRT
    assert (setup.workers, setup.seed) == (3, 7)
    assert (setup.config.migration_limit, setup.config.stall_timeout_secs) == (1, 9)
    assert setup.oracle is not None
    assert setup.oracle.model.eos_rate == 0.1
    assert "--tokens log:16-64" in setup.said


@pytest.mark.parametrize(
    ("flags", "tokenizer"),
    [("--tick 0", None), ("--with-tokenizer", PLAIN), ("--tokenizer sentencepiece", SENTENCE_PIECE)],
)
def test_the_oracle_has_the_tokenizer_of_the_workers(flags: str, tokenizer: Tokenizer | None) -> None:
    _, setup = said("kill-worker", "--engine-flag", flags)
    assert setup.oracle is not None
    assert setup.oracle.tokenizer == tokenizer


def test_a_time_stands_instead_of_streams_and_streams_instead_of_a_time() -> None:
    assert said("kill-worker", "--at", "2m")[0].when.at == 120
    when = said("soak", "--after-streams", "3", "--kill-every", "2s")[0].when
    assert (when.at, when.streams) == (None, 3)


def test_some_loss_need_not_move_anything() -> None:
    row, _ = said("partition", "--loss", "30%")
    assert (row.moves, row.action(row.choices).kind) == (None, "loss")


def test_running_engines_are_named_by_url_and_process(engines: list[tuple[str, str]]) -> None:
    [(one, pid), (two, shell)] = engines
    _, setup = said("kill-worker", *attach((one, pid), (f"{two}/", shell)))
    assert [(each.url, f"http://127.0.0.1:{each.port}", str(each.pid)) for each in setup.attached] == [
        (one, one, pid),
        (two, two, shell),
    ]
    assert setup.oracle is None


def test_a_process_that_does_not_serve_its_url_is_not_struck(engines: list[tuple[str, str]]) -> None:
    [(one, pid), (two, shell)] = engines
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
        for named, option, problem in (
            (
                [(one, shell), (two, pid)],
                "--pid",
                rf"process {shell} \(sh .*\) does not listen on .*; process {pid} ",
            ),
            ([(one, HERE), (two, shell)], "--pid", f"process {HERE} .* does not listen on"),
            ([(one, pid), (nobody, shell)], "--attach", "no process of ours listens on port"),
            ([(one, pid), (one.replace("127.0.0.1", "localhost"), shell)], "--attach", "is there twice"),
            ([(one, pid), (two, pid)], "--pid", f"{pid} is there twice"),
        ):
            result = CliRunner().invoke(chaos.main, ["kill-worker", *attach(*named)])
            assert result.exit_code == 2, result.output
            assert f"'{option}'" in result.output
            assert re.search(problem, result.output, re.DOTALL), result.output


@pytest.mark.parametrize(
    ("name", "flags", "option", "problem"),
    [
        ("kill-sidecar", ["--after-streams", "9"], "--after-streams", "only 8 of 16 requests are streams"),
        ("kill-sidecar", ["--sse", "0"], "--after-streams", "only 0 of 16"),
        ("kill-sidecar", ["--after-tokens", "50", "--tokens", "8-90"], "--after-tokens", "may end at token 8"),
        ("kill-sidecar", ["--after-streams", "1", "--at", "3s"], "--at", "either this"),
        ("kill-sidecar", ["--at", "soon"], "--at", "'soon' is no time, as 5s"),
        ("kill-sidecar", ["--tokens", "9-2"], "--tokens", "9 is more than 2"),
        ("kill-sidecar", ["--tokens", "0"], "--tokens", "at least 1"),
        ("kill-sidecar", ["--tokens", "1.5"], "--tokens", "1.5 are no whole numbers"),
        ("kill-sidecar", ["--prompt", "3"], "--prompt", "at least 4"),
        ("kill-sidecar", ["--prompt", "log:4-8.5"], "--prompt", "log:4-8.5 are no whole numbers"),
        ("kill-sidecar", ["--sse", "2"], "--sse", "'2' is no share"),
        ("kill-sidecar", ["--mode", "two"], "--mode", "'two' is none of one, all"),
        ("kill-sidecar", ["--mode", "3"], "--mode", "3 of 2 workers"),
        ("kill-sidecar", ["--target", "worker-2"], "--target", "none of busiest, idlest, random, sidecar-0, sidecar-1"),
        ("kill-sidecar", ["--signal", "STOP"], "--signal", "'STOP' is not one of"),
        ("kill-sidecar", ["--user", "areal"], "--user", "areal sends no streams"),
        ("kill-sidecar", ["--relay-flag", "--log-level 'warning"], "--relay-flag", "No closing quotation"),
        ("kill-sidecar", ["--relay-flag", "--no-such 1"], "--relay-flag", "--no-such"),
        ("kill-sidecar", ["--relay-flag", "--migration-limit x"], "--relay-flag", "migration"),
        ("kill-sidecar", ["--relay-flag", "--help"], "--relay-flag", "--help serves nothing"),
        ("kill-sidecar", ["--relay-flag", "--trace-file x"], "--relay-flag", "--trace-file is the campaign's"),
        ("kill-sidecar", ["--relay-flag", "--worker-urls http://a:1"], "--relay-flag", "--worker-urls is the campaign"),
        ("kill-sidecar", ["--relay-flag", "--port 0"], "--relay-flag", "--port is the campaign's to say"),
        ("kill-sidecar", ["--relay-flag", "--host ::"], "--relay-flag", "--host is the campaign's to say"),
        ("kill-sidecar", ["--relay-flag", "--api-key s"], "--relay-flag", "have no key"),
        ("kill-sidecar", ["--relay-flag", "--admin-api-key s"], "--relay-flag", "have no key"),
        ("kill-sidecar", ["--engine-flag", "--help"], "--engine-flag", "--help serves nothing"),
        ("kill-sidecar", ["--engine-flag", "--tick x"], "--engine-flag", "--tick"),
        ("kill-sidecar", ["--engine-cmd", ""], "--engine-cmd", "it is empty"),
        ("kill-sidecar", ["--out", "/dev/null/a"], "--out", "Not a directory"),
        ("kill-sidecar", ["--engine-cmd", "serve"], "--engine-cmd", "nothing in it says {port}"),
        ("kill-sidecar", [*CMD, *ATTACH], "--engine-cmd", "either this or --attach"),
        ("kill-sidecar", [*CMD, "--engine-flag", "--tick 1"], "--engine-flag", "mock workers only"),
        ("kill-sidecar", ATTACH[:2], "--pid", "0 of them for 1 --attach"),
        ("kill-sidecar", ATTACH[:4], "--attach", "name at least two"),
        ("kill-sidecar", ["--attach", "http://10.0.0.1:3", "--pid", HERE], "--attach", "engines of this machine"),
        ("kill-sidecar", ["--attach", "http://127.0.0.1:99999", "--pid", HERE], "--attach", "there is no such port"),
        ("kill-sidecar", ["--pid", str(2**22 + 1)], "--pid", "there is no process"),
        ("kill-engine", [*ATTACH, "--duration", "1s"], "--duration", "cannot be started again"),
        ("kill-sidecar", [*ATTACH, "--workers", "2"], "--workers", "either this"),
        ("soak", ATTACH, "--attach", "cannot be started again"),
        ("soak", ["--after-tokens", "4"], "--after-streams", "a load without end needs a number"),
        ("soak", ["--minutes", "0"], "--minutes", "0.0 is not in the range"),
        ("soak", ["--kill-every", "x"], "--kill-every", "'x' is no time"),
        ("partition", CMD, "--engine-cmd", "nothing in it says {host}"),
        ("partition", ATTACH, "--attach", "cannot be moved into a network namespace"),
        ("partition", ["--loss", "0"], "--loss", "nothing would be lost"),
    ],
)
def test_a_mistake_names_its_flag(name: str, flags: list[str], option: str, problem: str) -> None:
    result = CliRunner().invoke(chaos.main, [name, *flags])
    assert result.exit_code == 2, result.output
    [last] = re.findall(r"^Error: .*", result.output, re.MULTILINE | re.DOTALL)
    assert f"'{option}'" in last
    assert problem in last


def test_every_option_has_a_help_and_names_are_not_taken_twice() -> None:
    for row in CAMPAIGNS.values():
        command = chaos.main.commands[row.name]
        spelled = [spelling for param in command.params for spelling in param.opts]
        assert len(spelled) == len(set(spelled))
        assert all(param.help for param in command.params if isinstance(param, click.Option))
        assert "--out" in CliRunner().invoke(command, ["--help"]).output
    assert set(SENDERS) >= set(commands.STREAMING)


async def test_namespaces_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(Unable, match="need root"):
        async with namespaces.namespaces(1):
            pass
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda program: None)
    with pytest.raises(Unable, match="no ip and no nft on the PATH"):
        async with namespaces.namespaces(1):
            pass


def test_a_campaign_that_this_machine_cannot_run_ends_with_3_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = CliRunner().invoke(chaos.main, ["partition"])
    assert result.exit_code == 3
    assert result.output == "Error: SKIPPED, nothing was tested: network namespaces need root\n"
    assert list(tmp_path.iterdir()) == []


async def test_a_namespace_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ip = tmp_path / "ip"
    ip.write_text("#!/bin/sh\necho not permitted >&2\nexit 1\n")
    ip.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Unable, match="`ip netns add x` failed: not permitted"):
        await Namespace("x", "10.0.0.2", "10.0.0.1").make()
