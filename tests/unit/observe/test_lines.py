"""Lines for a descriptor: nobody waits for its reader, and what is lost is counted and told."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from dyn_relay.observe.lines import ROOM, Lines

#: s; what is waited for has come long before, or never comes.
PATIENCE = 60.0


def notice(lost: int) -> str:
    return f"lost {lost}"


@pytest.fixture
def ends() -> Iterator[tuple[BinaryIO, int]]:
    """The two ends of a pipe that takes a page."""
    taken, given = os.pipe()
    fcntl.fcntl(given, fcntl.F_SETPIPE_SZ, 4096)
    with open(taken, "rb") as reader:
        yield reader, given
    os.close(given)


def fill(given: int) -> int:
    """Bytes after which the pipe takes no more."""
    os.set_blocking(given, False)
    filled = 0
    try:
        while True:
            filled += os.write(given, b"\n")
    except BlockingIOError:
        return filled
    finally:
        os.set_blocking(given, True)


def test_lines_come_in_order(ends) -> None:
    reader, given = ends
    lines = Lines(given, notice)
    for line in ("one", "two", "a half of a pair: \ud83d"):
        lines.put(line)
    assert [reader.readline() for _ in range(3)] == [b"one\n", b"two\n", b"a half of a pair: \\ud83d\n"]
    assert lines.dropped == 0


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_does_not_read_costs_lines_and_no_time(ends, blocking) -> None:
    reader, given = ends
    filled = fill(given)
    os.set_blocking(given, blocking)
    lines = Lines(given, notice)
    for number in range(ROOM + 100):
        lines.put(str(number))
    dropped = lines.dropped
    assert dropped in (99, 100)  # the thread may have one in its hands
    assert reader.read(filled) == b"\n" * filled
    written = ROOM + 100 - dropped
    assert [int(reader.readline()) for _ in range(written)] == list(range(written))
    assert reader.readline() == f"lost {dropped}\n".encode()
    lines.put("again")
    assert reader.readline() == b"again\n"
    assert lines.dropped == dropped


def test_a_reader_that_is_gone_costs_lines_until_there_is_one_again(ends) -> None:
    reader, given = ends
    reader.close()
    lines = Lines(given, notice)
    for _ in range(3):
        lines.put("x")
    lines.flush(PATIENCE)
    assert lines.dropped == 3
    taken, new = os.pipe()
    os.dup2(new, given)
    os.close(new)
    with open(taken, "rb") as again:
        lines.put("y")
        assert [again.readline(), again.readline()] == [b"y\n", b"lost 3\n"]
        lines.put("z")
        assert again.readline() == b"z\n"
    assert lines.dropped == 3


def test_a_line_that_was_cut_off_does_not_spoil_the_next_one(ends, monkeypatch) -> None:
    """A disk takes what it has room for, and refuses the rest."""
    reader, given = ends
    room = [3, 0]

    def write(descriptor: int, data: memoryview, write=os.write) -> int:
        if descriptor != given or not room:
            return write(descriptor, data)
        if left := room.pop(0):
            return write(descriptor, data[:left])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", write)
    lines = Lines(given, notice)
    lines.put("abcdef")
    lines.put("next")
    lines.flush(PATIENCE)
    assert os.read(reader.fileno(), 4096) == b"abc\nnext\nlost 1\n"


def test_no_descriptor_drops_all() -> None:
    lines = Lines(-1)
    lines.put("x")
    lines.flush(PATIENCE)
    assert lines.dropped == 1


def test_flush_waits_for_all_but_not_for_ever(ends) -> None:
    reader, given = ends
    lines = Lines(given)
    lines.flush(PATIENCE)  # nothing was said
    fill(given)
    lines.put("x")
    lines.flush(0.01)
    threading.Thread(target=reader.read, args=(4096 + 2,), daemon=True).start()
    lines.flush(PATIENCE)
    assert lines.dropped == 0


def test_a_system_without_threads_costs_lines(ends, monkeypatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reader, given = ends
    lines = Lines(given, notice)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        lines.put("x")
    assert lines.dropped == 1
    lines.put("y")
    assert [reader.readline(), reader.readline()] == [b"y\n", b"lost 1\n"]


def test_a_forked_process_begins_with_nothing(ends) -> None:
    """Also if its parent was in the middle of something: what waits there is written once, by the parent."""
    reader, given = ends
    fill(given)
    lines = Lines(given, notice)
    for number in range(ROOM + 100):
        lines.put(str(number))
    lines._lock.acquire()
    lines.begin()
    assert lines.dropped == 0
    lines.put("the child's")
    while reader.readline() != b"the child's\n":
        pass
