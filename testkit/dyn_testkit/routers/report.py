"""What a run of the laws found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from dyn_testkit.routers.table import LAWS, Law

Verdict = Literal["held", "broken", "not run"]


@dataclass(slots=True)
class Outcome:
    """What became of one law."""

    law: Law
    #: Trials so far, and those in which it did not hold.
    trials: int = 0
    broken: int = 0
    #: In which ways, and how often: the first lines of what the law said.
    reasons: Counter[str] = field(default_factory=Counter)
    #: Counter-examples, the whole story of each.
    examples: list[str] = field(default_factory=list)
    #: Why it did not see all its trials.
    stopped: str = ""

    @property
    def verdict(self) -> Verdict:
        """What can be said."""
        if self.broken:
            return "broken"
        return "not run" if self.stopped else "held"

    def why(self, most: int = 3) -> str:
        """Its most common reasons."""
        found = [f"{count}x {reason}" for reason, count in self.reasons.most_common(most)]
        more = len(self.reasons) - len(found)
        return "; ".join([*found, *([f"{more} other reasons"] if more > 0 else [])]) or self.stopped

    def text(self) -> str:
        """Everything about a broken law, several lines."""
        lines = [f"law {self.law.number}, {self.law.name}: {self.law.fact}"]
        lines.append(f"broken in {self.broken} of {self.trials} trials: {self.why()}")
        lines += [f"  {line}" for example in self.examples for line in ("", *example.splitlines())]
        return "\n".join(lines)


@dataclass(slots=True)
class Report:
    """All outcomes, in the order of the laws."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    #: Requests that the router continued: laws about continuations say nothing about a router without any.
    continued: int = 0
    #: It says which requests it would continue.
    tells: bool = False

    def _with(self, verdict: Verdict) -> dict[str, str]:
        return {name: outcome.why() for name, outcome in self.outcomes.items() if outcome.verdict == verdict}

    @property
    def held(self) -> list[str]:
        """Names of the laws that hold."""
        return list(self._with("held"))

    @property
    def broken(self) -> dict[str, str]:
        """Name -> in which ways."""
        return self._with("broken")

    @property
    def not_run(self) -> dict[str, str]:
        """Name -> why: the router hangs."""
        return self._with("not run")

    def summary(self) -> str:
        """The numbers."""
        words = [f"{len(self.held)} laws held, {len(self.broken)} broken"]
        words += [f"{len(self.not_run)} not run"] if self.not_run else []
        return ", ".join([*words, f"{self.continued} requests were continued"])

    @classmethod
    def of(cls, names: list[str]) -> Report:
        """An empty one for these laws."""
        return cls({name: Outcome(LAWS[name]) for name in names})


class LawsBroken(AssertionError):
    """At least one law is broken; the message lists them all, with counter-examples."""

    def __init__(self, report: Report) -> None:
        self.report = report
        parts = [f"the router breaks laws: {report.summary()}"]
        parts += [outcome.text() for outcome in report.outcomes.values() if outcome.verdict == "broken"]
        if report.not_run:
            parts.append(f"not run, {next(iter(report.not_run.values()))}: {', '.join(report.not_run)}")
        super().__init__("\n\n".join(parts))


class NoRouter(LawsBroken):
    """Nothing there routes anything; no law was asked."""

    def __init__(self, why: str) -> None:
        AssertionError.__init__(self, why)
        self.report = Report()
