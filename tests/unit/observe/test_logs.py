"""What reaches the log."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from dyn_relay.observe import log


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def lines(level: str = "info") -> tuple[io.StringIO, structlog.typing.FilteringBoundLogger]:
    out = io.StringIO()
    log.setup(level, json=True, stream=out)
    return out, structlog.get_logger("fleet")


def test_a_json_line_an_event() -> None:
    out, logger = lines()
    logger.info("worker is dead", worker="w1", tokens=3)
    row = json.loads(out.getvalue())
    assert row.pop("timestamp").endswith("Z")
    assert row == {"event": "worker is dead", "logger": "fleet", "level": "info", "worker": "w1", "tokens": 3}


@pytest.mark.parametrize(("level", "seen"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels(level: str, seen: int) -> None:
    out, logger = lines(level)
    for method in ("debug", "info", "warning", "error"):
        getattr(logger, method)("x")
    assert len(out.getvalue().splitlines()) == seen


def test_text_lines() -> None:
    out = io.StringIO()
    log.setup("info", stream=out)
    structlog.get_logger("fleet").info("worker is dead", worker="w1")
    assert "worker is dead" in out.getvalue()
    assert "worker=w1" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_keys_are_blanked_and_long_strings_cut() -> None:
    """L1: a second fence behind not passing them at all."""
    out, logger = lines()
    logger.info("x", authorization="Bearer hunter2", api_key="hunter2", detail="e" * 100_000)
    assert "hunter2" not in out.getvalue()
    assert len(out.getvalue()) < 1000
    assert "(100000 characters)" in out.getvalue()


def test_an_error_is_logged_with_its_traceback() -> None:
    out, logger = lines()
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError as exc:
        logger.error("a defect", exc_info=exc)
    assert "ZeroDivisionError: by zero" in json.loads(out.getvalue())["exception"]
