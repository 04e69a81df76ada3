"""`dyn-chaos simulate`: seeds of a scenario in virtual time, goals counted, the first failure made small."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dyn_testkit.simulation.campaign import Result, search, smallest, try_plan
from dyn_testkit.simulation.goals import goals_of
from dyn_testkit.simulation.scenario import Plan, Scenario, draw

#: From this many seeds on, a goal that was never met fails the campaign.
ENOUGH = 500


def commit() -> str:
    """The commit of the checkout that this runs from; "unknown" outside of one."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def simulate(
    scenario: Scenario,
    seeds: Sequence[int],
    *,
    processes: int | None,
    again: str,
    out: Path,
    console: Console,
    goals: bool = True,
) -> bool:
    """Run all seeds; True if nothing was found. `again`: the command that replays one, up to its seed."""
    began, virtual, done = time.monotonic(), 0.0, 0
    counts: Counter[str] = Counter()
    failed: Result | None = None
    columns = (TextColumn(scenario.name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(seeds))
        for result in search(scenario, seeds, processes):
            done, virtual = done + 1, virtual + result.duration
            counts += result.goals
            progress.advance(bar)
            failed = result if result.findings else failed
    _show_counts(goals_of(scenario), counts, console)
    minutes = (time.monotonic() - began) / 60
    console.print(
        f"{done} seeds, {virtual / 3600:.0f} virtual hours in {minutes:.1f} minutes: "
        f"{virtual / 3600 / minutes:.0f} virtual hours a minute",
        highlight=False,
    )
    if failed is not None:
        _explain(draw(scenario, failed.seed), failed, f"{again}{failed.seed}", out, console)
        return False
    missing = [goal for goal in goals_of(scenario) if not counts[goal]]
    if goals and missing and len(seeds) >= ENOUGH:
        console.print(f"[bold red]never happened[/]: {'; '.join(missing)}", highlight=False)
        return False
    return True


def replay(plan: Plan, console: Console) -> bool:
    """Run one plan; True if nothing was found."""
    result = try_plan(plan)
    _show_findings(result, console)
    if not result.findings:
        console.print(f"nothing was found in {result.duration / 3600:.1f} virtual hours", highlight=False)
    return not result.findings


def _explain(plan: Plan, result: Result, again: str, out: Path, console: Console) -> None:
    _show_findings(result, console)
    console.print(f"[bold red]FAILED[/] seed={plan.seed} commit={commit()}", highlight=False)
    console.print(f"replay: {again}", highlight=False, soft_wrap=True)
    console.print("making it smaller ...")
    small = smallest(plan, result.findings)
    path = out / f"{plan.scenario}-{plan.seed}.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(small), indent=1) + b"\n")
    console.print(
        f"{len(small.requests)} requests and {len(small.faults)} faults are enough, of {len(plan.requests)} and "
        f"{len(plan.faults)}:",
        highlight=False,
    )
    for fault in small.faults:
        console.print(f"  {fault.at:8.1f} s  {fault.kind} of worker {fault.worker} for {fault.duration:g} s")
    for request in small.requests:
        console.print(f"  {request.at:8.1f} s  {msgspec.json.encode(request.body).decode()}", highlight=False)
    _show_findings(try_plan(small), console)
    console.print(f"replay: dyn-chaos simulate --plan {path}", highlight=False, soft_wrap=True)


def _show_findings(result: Result, console: Console, most: int = 8) -> None:
    for finding in result.findings[:most]:
        console.print(f"[red]{finding.key} {finding.check}[/]: {finding.message[-1500:]}", highlight=False)
    if len(result.findings) > most:
        console.print(f"[red]... {len(result.findings)} findings[/]")


def _show_counts(goals: Sequence[str], counts: Counter[str], console: Console) -> None:
    table = Table(title="what happened", title_justify="left")
    table.add_column("goal")
    table.add_column("times", justify="right")
    for goal in goals:
        table.add_row(goal, str(counts[goal]) if counts[goal] else "[red]never[/]")
    console.print(table)
