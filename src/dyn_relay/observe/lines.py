"""Lines for a descriptor whose reader may be slow or gone, or whose disk may be full.

What a proxy has to say is worth less than what it serves, so nobody waits for a line, or fails by one: a thread writes
them, and what cannot be written is dropped and counted. The thread writes to the descriptor itself: a buffer of
Python's would keep what failed, fail once more at exit, and have a lock that a fork might copy while it is held.
"""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable

#: Lines that wait at most. Thousands of streams may end in one moment, a line each, and have to find room; at some
#: hundred bytes a line these are about two megabytes.
ROOM = 4096


class Lines:
    """Writes lines, in order, to a descriptor (-1: to none, all are dropped). Any thread may call it.

    The thread begins with the first line, so that it is one of the process that has something to say. `notice`: the
    line that says how many were lost, written once there is room and writing works again; None: nothing is said.
    """

    def __init__(self, descriptor: int, notice: Callable[[int], str | None] = lambda lost: None) -> None:
        self.descriptor = descriptor
        self._notice = notice
        self.begin()

    def begin(self) -> None:
        """Start from nothing, as a forked process must: what waits is its parent's, whose thread it has not got.

        The parent's thread may have held the lock.
        """
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: So far: those that found no room, and those that could not be written.
        self.dropped = 0
        #: Of these, what notices have said.
        self._told = 0
        #: The last line that was dropped is there in part.
        self._torn = False

    def put(self, line: str) -> None:
        """Hand over a line, without its end. Never blocks, never raises."""
        with self._lock:
            if self._waiting.qsize() < ROOM and self._runs():
                self._waiting.put(_encoded(line))
            else:
                self.dropped += 1

    def flush(self, timeout: float) -> None:
        """Return once all that was handed over is written or dropped, or after `timeout` seconds."""
        if self._thread is not None:
            done = threading.Event()
            self._waiting.put(done)
            done.wait(timeout)

    def _runs(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"lines-{self.descriptor}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no room for one; perhaps at the next line
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            one = self._waiting.get()
            if isinstance(one, bytes) and not self._written(one):
                with self._lock:
                    self.dropped += 1
            elif self._waiting.empty():
                self._tell()
            if isinstance(one, threading.Event):
                one.set()

    def _tell(self) -> None:
        lost = self.dropped - self._told
        if lost and (notice := self._notice(lost)) and self._written(_encoded(notice)):
            self._told += lost

    def _written(self, line: bytes) -> bool:
        whole = b"\n" + line if self._torn else line
        rest = memoryview(whole)
        try:
            while rest:
                rest = rest[self._write(rest) :]
        except OSError:
            self._torn = self._torn or len(rest) < len(whole)
            return False
        self._torn = False
        return True

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self.descriptor, data)
        except BlockingIOError:  # whoever shares it with us has made it non-blocking
            select.select([], [self.descriptor], [])
            return 0


def _encoded(line: str) -> bytes:
    return line.encode(errors="backslashreplace") + b"\n"
