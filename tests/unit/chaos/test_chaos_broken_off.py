"""A campaign that a signal ends takes all of its processes with it, and what it saw until then is in its file."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from dyn_chaos import audit, processes
from dyn_chaos.load import Plan
from dyn_chaos.recorder import Recorder
from dyn_testkit import history
from dyn_testkit.history import Reference, Run

PROGRAM = str(Path(sys.executable).with_name("dyn-chaos"))
#: Requests that take a minute, of which nothing disturbs any.
FLAGS = ("--streams", "2", "--tokens", "1200", "--engine-flag", "--tick 0.05", "--at", "50s")


def children(parent: int) -> list[int]:
    """What it has started and not waited for."""
    found = []
    for pid in processes.everybody():
        with suppress(FileNotFoundError, ProcessLookupError):
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(pid)
    return found


@asynccontextmanager
async def campaign(out: Path, prepare: Callable[[], object] | None = None) -> AsyncIterator[trio.Process]:
    """A campaign of two engines and a proxy, once its history has a sample of the proxy."""

    async def begun() -> str:
        file = out / "history.jsonl"
        return "yes" if file.exists() and b'"entry":"sample"' in file.read_bytes() else ""

    process = await trio.lowlevel.open_process(
        [PROGRAM, "kill-worker", *FLAGS, "--out", str(out)], stderr=subprocess.PIPE, preexec_fn=prepare
    )
    try:
        assert await audit.wait_for(begun, 60)
        yield process
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_nothing_is_left_of_a_campaign_that_a_signal_ends(tmp_path: Path, sig: signal.Signals) -> None:
    # Whoever runs the tests may have this signal ignored, under nohup say; then a campaign ignores it, too.
    async with campaign(tmp_path, partial(signal.signal, sig, signal.SIG_DFL)) as process:
        started = children(process.pid)
        assert len(started) == 3
        process.send_signal(sig)
        assert await process.wait() == 128 + sig
        assert [pid for pid in started if processes.state(pid)] == []
        assert process.stderr is not None
        said = bytes(await process.stderr.receive_some()).decode()
    assert f"Error: broken off by {sig.name}\n" in said
    assert "Traceback" not in said
    assert f"kept in {tmp_path}: history.jsonl" in said
    assert history.load(tmp_path / "history.jsonl").end is None


def test_what_was_seen_is_in_the_file_at_once(tmp_path: Path) -> None:
    def none(plan: Plan) -> Reference:
        raise AssertionError(plan)

    with Recorder(tmp_path / "h.jsonl", none, Run("mine"), whole=True):
        assert history.load(tmp_path / "h.jsonl").run.name == "mine"


async def test_what_its_parent_wants_it_to_survive_does_not_end_it(tmp_path: Path) -> None:
    def nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async with campaign(tmp_path, nohup) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 128 + signal.SIGTERM
