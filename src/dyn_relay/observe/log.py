"""Logging: structlog to standard error, as text or JSON lines.

Modules take `structlog.get_logger(name)`; a call below the level costs one empty method. No prompt or key is ever
passed to a logger; as a second fence, long strings are cut and the values of key-like names are blanked.

Nobody waits for a line: see `lines`. Each process writes its own, also one that was forked.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from dyn_relay.observe.lines import Lines

#: Longest string that is logged whole. Base64 payloads and engines' error texts can be megabytes.
LONGEST = 500

#: Seconds that the process waits, at its end, for lines that are not written yet.
LAST = 1.0

_SECRET = frozenset({"authorization", "api_key", "worker_api_key", "admin_api_key", "key", "token"})


def _lost(lines: int) -> str | None:
    """A line as the others are; None if such ones are not wanted."""
    found: str | None = structlog.wrap_logger(structlog.ReturnLogger()).error("log lines were lost", lines=lines)
    return found


# Where Python has found a standard descriptor closed, its number may since be a client's socket.
_out = Lines(-1 if sys.__stdout__ is None else 1)
_err = Lines(-1 if sys.__stderr__ is None else 2, _lost)


def setup(level: str = "info", json: bool = False, stream: TextIO | None = None, process: int | None = None) -> None:
    """Configure logging for this process. `level`: debug, info, warning or error; `stream`: else standard error.

    `process`: its number, if it is one of several; each line has it.
    """
    tty = os.isatty(_err.descriptor) if stream is None else stream.isatty()
    renderer: Processor = structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=tty)
    structlog.configure(
        processors=[
            _Numbered(process),
            _name,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            tidy,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=_Named(_err.put if stream is None else _to(stream)),
        cache_logger_on_first_use=True,
    )


def say(line: str) -> None:
    """A line for standard output. Like all lines: it may be lost, and nobody waits for it."""
    _out.put(line)


def dropped() -> int:
    """Lines of this process's log that were lost."""
    return _err.dropped


def flush() -> None:
    """Write what is left, for at most `LAST` seconds. It is done at exit, but for a process that ends by `os._exit`."""
    end = time.monotonic() + LAST
    for lines in (_out, _err):
        lines.flush(max(0.0, end - time.monotonic()))


atexit.register(flush)
for _lines in (_out, _err):
    os.register_at_fork(after_in_child=_lines.begin)


def tidy(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Blank what looks like a key and cut what is long."""
    for name, value in event.items():
        if name in _SECRET:
            event[name] = "***"
        elif name != "exception" and isinstance(value, str) and len(value) > LONGEST:
            event[name] = f"{value[:LONGEST]}... ({len(value)} characters)"
    return event


class _Logger:
    """Takes rendered lines, and knows what `get_logger` was given."""

    def __init__(self, put: Callable[[str], object], name: str) -> None:
        self.name = name
        self.debug = self.info = self.warning = self.error = self.critical = put


class _Named:
    def __init__(self, put: Callable[[str], object]) -> None:
        self._put = put

    def __call__(self, name: str = "", *args: object) -> _Logger:
        return _Logger(self._put, name)


class _Numbered:
    """Adds the number of the process, in all its threads."""

    def __init__(self, process: int | None) -> None:
        self._own = {} if process is None else {"process": process}

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        return {**self._own, **event}


def _to(stream: TextIO) -> Callable[[str], object]:
    return lambda line: stream.write(line + "\n")


def _name(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if isinstance(logger, _Logger) and logger.name:
        event["logger"] = logger.name
    return event
