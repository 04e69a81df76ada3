"""What a campaign found: a table for people, JSON for machines, an exit status for scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from dyn_testkit.checkers import Finding

#: Findings shown of one outcome; the JSON has them all.
SHOWN = 8


@dataclass(slots=True)
class Outcome:
    """One campaign's result: measured facts, and findings, which are failures."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return not self.findings

    def expect(self, holds: bool, check: str, message: str, key: str = "campaign") -> None:
        """Note a finding unless `holds`."""
        if not holds:
            self.findings.append(Finding(key, check, message))

    def summary(self) -> str:
        """One line about the findings: how many of which check, in how many records."""
        counts = Counter(finding.check for finding in self.findings)
        return ", ".join(f"{check} x{count}" for check, count in counts.most_common())


def table(outcomes: Iterable[Outcome]) -> Table:
    """A row an outcome."""
    made = Table(title="dyn-chaos", title_justify="left")
    made.add_column("campaign")
    made.add_column("verdict")
    made.add_column("what was seen", overflow="fold")
    for outcome in outcomes:
        facts = ", ".join(f"{name} {_plain(value)}" for name, value in outcome.facts.items())
        verdict = "[green]pass[/]" if outcome.ok else "[bold red]FAIL[/]"
        made.add_row(outcome.name, verdict, facts)
        for finding in outcome.findings[:SHOWN]:
            made.add_row("", "", f"[red]{finding.key} {finding.check}[/]: {finding.message}")
        if len(outcome.findings) > SHOWN:
            made.add_row("", "", f"[red]... {len(outcome.findings)} findings: {outcome.summary()}[/]")
    return made


def line(outcome: Outcome) -> str:
    """One line for a log."""
    return f"{'pass' if outcome.ok else 'FAIL'}  {outcome.name}" + (
        f"  ({outcome.summary()})" if not outcome.ok else ""
    )


def show(outcomes: Iterable[Outcome], console: Console | None = None) -> None:
    """Print the table."""
    (console or Console()).print(table(outcomes))


def save(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Write `{"ok": bool, "outcomes": [...]}`."""
    listed = list(outcomes)
    document = {
        "ok": all(outcome.ok for outcome in listed),
        "outcomes": [
            {"name": each.name, "ok": each.ok, "facts": each.facts, "findings": each.findings} for each in listed
        ],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def _plain(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
