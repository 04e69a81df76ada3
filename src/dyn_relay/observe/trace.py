"""The trace file: one JSON line a logical request. What a row says is up to its writer.

A row is handed to a thread of its own. Trace files lie on network disks, whose writes can block for seconds, and the
event loop carries thousands of streams. Rows are few (a request lasts seconds to hours) and small (about 1 KB), so the
queue has no bound.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
import structlog

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("trace")


class TraceFile:
    """Appends rows to a file. A context manager; what was written before its end is in the file afterwards.

    Raises `OSError` if the file cannot be opened. A row that cannot be written later is counted in `lost`, and logged
    once: a full disk does not stop the serving.
    """

    def __init__(self, path: str | Path) -> None:
        # Unbuffered and in append mode: each row is one write, and a reader sees whole lines.
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 - the thread closes it
        self._rows: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._encode = msgspec.json.Encoder().encode
        self._closing = False
        self.lost = 0
        self._thread = threading.Thread(target=self._write, name="trace", daemon=True)
        self._thread.start()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, row: Mapping[str, object]) -> None:
        """Hand over a row of JSON values. Never blocks. Raises `ValueError` after `close`."""
        if self._closing:
            raise ValueError("the trace file is closed")
        self._rows.put(self._encode(row) + b"\n")

    def close(self) -> None:
        """Write what is left and close the file. Blocks until then. Idempotent."""
        if not self._closing:
            self._closing = True
            self._rows.put(None)
        self._thread.join()

    def _write(self) -> None:
        with self._file:
            while (row := self._rows.get()) is not None:
                try:
                    self._append(row)
                except OSError as exc:
                    if not self.lost:
                        log.error("the trace file cannot be written", error=str(exc))
                    self.lost += 1

    def _append(self, row: bytes) -> None:
        rest = memoryview(row)
        while rest:
            rest = rest[self._file.write(rest) :]
