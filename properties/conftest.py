"""A failing property tells how to run it again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from properties.prove import SEED


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return done.stdout.strip() or "unknown"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and report.failed:
        words = f"seed={SEED} commit={_commit()}\nDYN_SEED={SEED} pytest '{item.nodeid}'"
        report.sections.append(("replay", words))
    return report
