"""Processes are ready when they say so, and nothing of a killed group stays."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
import trio

from dyn_chaos import processes
from dyn_chaos.engines import Server, StockServer
from dyn_chaos.processes import LISTENING, Child, NotReady

WAIT = "import signal, sys; print('listening on http://127.0.0.1:9', flush=True); signal.pause()"
#: A leader with a child that has another title.
FAMILY = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print('born', flush=True); import signal; signal.pause()"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
{WAIT}
"""


async def start(nursery: trio.Nursery, tmp_path: Path, code: str) -> Child:
    return await Child.start(
        nursery, "child", [sys.executable, "-c", code], log=tmp_path / "child.log", ready=LISTENING
    )


async def test_ready_says_what_it_printed_and_the_output_is_kept(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        child = await start(nursery, tmp_path, "print('first');" + WAIT)
        assert child.ready == "http://127.0.0.1:9"
        assert child.alive
        assert child.log.read_text() == "first\nlistening on http://127.0.0.1:9\n"
        nursery.cancel_scope.cancel()
    assert not child.alive


async def test_a_process_that_ends_before_it_is_ready_tells_why(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(NotReady, match="no such flag"):
            await start(nursery, tmp_path, "print('no such flag')")


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(NotReady, match=r"child cannot be started: .*'/no/such/program'"):
            await Child.start(nursery, "child", ["/no/such/program"], log=tmp_path / "child.log", ready=None)


async def test_kill_ends_the_whole_group(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = trio.current_time() + 20  # one that lives on would keep its output open
        child = await start(nursery, tmp_path, FAMILY)
        members = processes.group(child.pid)
        assert child.pid in members
        assert len(members) == 2
        Server("http://x", child).kill()
        assert await child.wait() == -signal.SIGKILL
    assert not nursery.cancel_scope.cancelled_caught
    assert [pid for pid in members if "born" in processes.title(pid)] == []


async def test_a_signal_reaches_the_leader_alone(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        child = await start(nursery, tmp_path, FAMILY)
        [other] = [pid for pid in processes.group(child.pid) if pid != child.pid]
        child.send(signal.SIGTERM)
        assert await child.wait() == -signal.SIGTERM
        assert "born" in processes.title(other)
        child.kill()


async def test_members_are_found_by_the_start_of_their_title(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        child = await start(nursery, tmp_path, FAMILY)
        assert processes.member(child.pid, sys.executable) == child.pid
        with pytest.raises(LookupError):
            processes.member(child.pid, "sglang::scheduler")
        nursery.cancel_scope.cancel()


async def test_mapped_files_are_found(tmp_path: Path) -> None:
    file = tmp_path / "segment"
    file.write_bytes(b"x" * 4096)
    code = f"import mmap; f = open({str(file)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0);" + WAIT
    async with trio.open_nursery() as nursery:
        child = await start(nursery, tmp_path, code)
        assert processes.mapped([child.pid], re.compile("segment$")) == {file}
        nursery.cancel_scope.cancel()
    assert processes.mapped([child.pid], re.compile("segment$")) == set()


def test_a_process_that_is_gone_has_no_title() -> None:
    assert processes.title(2**22 + 1) == ""


async def test_a_stock_engine_dies_whole_but_for_what_tidies_up_after_it(tmp_path: Path) -> None:
    # Put together there, so that only the child's own title has the word.
    tracked = FAMILY.replace('signal.pause()"]', 'signal.pause()", "resource" + "_tracker"]')
    segment = tmp_path / "sglang_loads"
    segment.write_bytes(b"")
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = trio.current_time() + 20  # a leader that is spared would never end
        child = await start(nursery, tmp_path, tracked)
        [tracker] = [pid for pid in processes.group(child.pid) if pid != child.pid]
        await StockServer("http://x", child, 0, 0, frozenset({segment})).stop()
        assert not child.alive
        assert "resource_tracker" in processes.title(tracker)
        assert not segment.exists()
        child.kill()
    assert not nursery.cancel_scope.cancelled_caught
