"""Rows reach the file, whole, once, in order."""

from __future__ import annotations

import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import dyn_relay.observe.trace
from dyn_relay.observe.trace import TraceFile


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_once_and_in_order(tmp_path: Path) -> None:
    """M3: rows == requests."""
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as trace:
        for n in range(1000):
            trace.write({"rid": f"r{n}", "attempts": [{"worker": "w1", "tokens": n}]})
    assert rows(path) == [{"rid": f"r{n}", "attempts": [{"worker": "w1", "tokens": n}]} for n in range(1000)]


def test_it_appends(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for rid in ("a", "b"):
        with TraceFile(path) as trace:
            trace.write({"rid": rid})
    assert [row["rid"] for row in rows(path)] == ["a", "b"]


def test_a_disk_that_blocks_does_not_block_the_writer(tmp_path: Path) -> None:
    """The trace goes into a pipe that nobody reads until every row has been handed over."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    trace = TraceFile(path)
    row = {"rid": "x" * 1000}
    for _ in range(1000):  # 1 MB: more than a pipe holds
        trace.write(row)
    os.set_blocking(reader, True)
    received = bytearray()

    def drain() -> None:
        while data := os.read(reader, 65536):
            received.extend(data)

    thread = threading.Thread(target=drain)
    thread.start()
    trace.close()
    thread.join()
    os.close(reader)
    assert [json.loads(line) for line in received.splitlines()] == [row] * 1000


def test_a_write_that_takes_only_a_part_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dribble(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(memoryview(data)[:3])

        def close(self) -> None:
            written.append(self.getvalue())
            super().close()

    written: list[bytes] = []
    monkeypatch.setattr(dyn_relay.observe.trace, "open", lambda *args, **kwargs: Dribble(), raising=False)
    with TraceFile("anywhere") as trace:
        trace.write({"rid": "abcdefgh"})
    assert written == [b'{"rid":"abcdefgh"}\n']


def test_a_disk_that_is_full_is_logged_once() -> None:
    with capture_logs() as logs, TraceFile("/dev/full") as trace:
        for _ in range(3):
            trace.write({"rid": "a"})
        trace.close()
    assert trace.lost == 3
    assert [entry["event"] for entry in logs] == ["the trace file cannot be written"]


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        TraceFile(tmp_path)


def test_nothing_is_taken_after_the_end(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.jsonl")
    trace.close()
    trace.close()
    with pytest.raises(ValueError, match="closed"):
        trace.write({"rid": "late"})
