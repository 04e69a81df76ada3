"""The trace file: one JSON line a logical request, its attempts nested. No prompts, no tokens, no keys.

A row is handed to a thread of its own. Trace files lie on network disks, whose writes can block for seconds, and the
event loop carries thousands of streams. Rows are few (a request lasts seconds to hours) and small (about 1 KB), so the
queue has no bound.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
import structlog

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("trace")


class AttemptRow(msgspec.Struct, kw_only=True):
    """One attempt. Times are seconds since the request began; None for what never came."""

    number: int
    worker: str
    url: str
    rid: str
    started: float
    first_token: float | None
    ended: float
    #: Tokens that this attempt gave.
    tokens: int
    #: Tokens that were delivered before it.
    resumed_from: int
    outcome: str
    cause: str


class Row(msgspec.Struct, kw_only=True):
    """One logical request."""

    #: When it began, in seconds since 1970.
    time: float
    rid: str
    path: str
    streaming: bool
    outcome: str
    status: int
    migratable: bool
    #: The field that forbids migration; "" if none does.
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    #: client, proxy or worker
    closed_by: str
    #: Seconds from the request to its first token, and to its end.
    ttft: float | None
    duration: float
    attempts: list[AttemptRow]


class Trace:
    """Appends rows to a file. A context manager; what was written before its end is in the file afterwards.

    Raises `OSError` if the file cannot be opened. A row that cannot be written later is counted in `lost`, and logged
    once: a full disk does not stop the serving.
    """

    def __init__(self, path: str | Path) -> None:
        # Unbuffered and in append mode: each batch is one write, and a reader sees whole lines.
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by the thread
        self._rows: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._encode = msgspec.json.Encoder().encode
        self._thread = threading.Thread(target=self._write, name="trace", daemon=True)
        self.lost = 0
        self._thread.start()

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, row: Row) -> None:
        """Hand over a row. Never blocks. Raises `ValueError` after `close`."""
        if self._file.closed:
            raise ValueError("the trace is closed")
        self._rows.put(self._encode(row) + b"\n")

    def close(self) -> None:
        """Write what is left and close the file. Blocks until then. Idempotent."""
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
