"""What a run of the checks found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dyn_testkit.contract.facts import Facts
from dyn_testkit.contract.table import CHECKS

Verdict = Literal["passed", "skipped", "broken", "not run"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one check."""

    name: str
    verdict: Verdict
    #: Why it was skipped or not run, or in which way the contract is broken.
    reason: str = ""
    sent: str = ""
    came: str = ""

    def text(self, others: Sequence[str] = ()) -> str:
        """Everything about a broken check, several lines; `others` are broken for the same reason."""
        check = CHECKS[self.name]
        lines = [
            f"{self.name} ({check.source})",
            f"  contract: {check.fact}",
            f"  broken:   {self.reason}",
            f"  sent:     {self.sent}",
            f"  came:     {self.came}",
        ]
        lines += [f"  so, too:  {len(others)} other checks: {', '.join(others)}"] if others else []
        return "\n".join(lines)


@dataclass(slots=True)
class Report:
    """All outcomes, in the order of the checks."""

    url: str
    #: What was found out about the worker, or given.
    facts: Facts = field(default_factory=Facts)
    outcomes: list[Outcome] = field(default_factory=list)

    def _named(self, verdict: Verdict) -> dict[str, str]:
        return {outcome.name: outcome.reason for outcome in self.outcomes if outcome.verdict == verdict}

    @property
    def passed(self) -> Sequence[str]:
        """Names of the checks that hold."""
        return list(self._named("passed"))

    @property
    def skipped(self) -> dict[str, str]:
        """Name -> why nothing can be said."""
        return self._named("skipped")

    @property
    def broken(self) -> dict[str, str]:
        """Name -> in which way."""
        return self._named("broken")

    @property
    def not_run(self) -> dict[str, str]:
        """Name -> why: the worker had gone by then."""
        return self._named("not run")

    def summary(self) -> str:
        """The numbers."""
        numbers = (f"{len(self.passed)} passed", f"{len(self.skipped)} skipped", f"{len(self.broken)} broken")
        return ", ".join((*numbers, f"{len(self.not_run)} not run")[: 4 if self.not_run else 3])


class ContractBroken(AssertionError):
    """At least one check is broken; the message lists them all."""

    def __init__(self, report: Report) -> None:
        self.report = report
        parts = [f"the worker at {report.url} does not keep SGLang's contract: {report.summary()}"]
        alike: dict[str, list[Outcome]] = {}
        for outcome in report.outcomes:
            if outcome.verdict == "broken":
                alike.setdefault(outcome.reason, []).append(outcome)
        parts += [first.text([outcome.name for outcome in others]) for first, *others in alike.values()]
        if report.not_run:
            parts.append(f"not run, {next(iter(report.not_run.values()))}: {', '.join(report.not_run)}")
        super().__init__("\n\n".join(parts))


class NoWorker(ContractBroken):
    """Nothing at that URL is a worker at all; no check has run."""

    def __init__(self, url: str, why: str) -> None:
        AssertionError.__init__(self, why)
        self.report = Report(url)
