"""Logging: structlog to standard error, as text or JSON lines.

Modules take `structlog.get_logger(name)`; a call below the level costs one empty method. No prompt or key is ever
passed to a logger; as a second fence, long strings are cut and the values of key-like names are blanked.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

#: Longest string that is logged whole. Base64 payloads and engines' error texts can be megabytes.
LONGEST = 500

_SECRET = frozenset({"authorization", "api_key", "worker_api_key", "admin_api_key", "key", "token"})


def setup(level: str = "info", json: bool = False, stream: TextIO | None = None, process: int | None = None) -> None:
    """Configure logging for this process. `level`: debug, info, warning or error; `stream`: else standard error.

    `process`: its number, if it is one of several; each line has it.
    """
    out = stream or sys.stderr
    renderer: Processor = (
        structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=out.isatty())
    )
    structlog.contextvars.bind_contextvars(**({} if process is None else {"process": process}))
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _name,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            tidy,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=_Named(out),
        cache_logger_on_first_use=True,
    )


def tidy(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Blank what looks like a key and cut what is long."""
    for name, value in event.items():
        if name in _SECRET:
            event[name] = "***"
        elif name != "exception" and isinstance(value, str) and len(value) > LONGEST:
            event[name] = f"{value[:LONGEST]}... ({len(value)} characters)"
    return event


class _Logger(structlog.PrintLogger):
    """A print logger that knows what `get_logger` was given."""

    def __init__(self, out: TextIO, name: str) -> None:
        super().__init__(out)
        self.name = name


class _Named:
    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __call__(self, name: str = "", *args: object) -> _Logger:
        return _Logger(self._out, name)


def _name(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if isinstance(logger, _Logger) and logger.name:
        event["logger"] = logger.name
    return event
