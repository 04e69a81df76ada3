"""`python -m dyn_testkit.routers --command '...'`: the laws, asked of a program."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import click
import trio
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dyn_testkit.laws.answers import DIALECTS
from dyn_testkit.routers import FLEETS, LAWS, LawsBroken, NoRouter, Outcome, Report, check_router
from dyn_testkit.routers.command import NotListening, expand, program

_COLOURS = {"held": "green", "broken": "bold red", "not run": "bold red"}
_NAMES = click.Choice(list(LAWS))


@click.command()
@click.option("--command", "line", help="With {port}, and {workers} or a word with {worker} in it; maybe {spare}.")
@click.option("--only", type=_NAMES, multiple=True, help="Ask for this law; repeat.")
@click.option("--skip", type=_NAMES, multiple=True, help="Do not ask for this law; repeat.")
@click.option("--list", "listing", is_flag=True, help="Print the laws and stop.")
@click.option("--dialect", type=click.Choice(DIALECTS), multiple=True, help="Fleets of this one only; repeat.")
@click.option("--examples", type=click.IntRange(0), default=0, show_default=True, help="Drawn, beside the hard cases.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the examples.")
@click.option("--counterexamples", type=click.IntRange(1), default=1, show_default=True, help="Kept of each law.")
@click.option("--answer-timeout", type=click.FloatRange(0.1), default=10.0, show_default=True)
@click.option("--recovery-timeout", type=click.FloatRange(0.1), default=30.0, show_default=True)
@click.option("--start-timeout", type=click.FloatRange(0.1), default=60.0, show_default=True)
def main(
    line: str | None,
    only: tuple[str, ...],
    listing: bool,
    dialect: tuple[Any, ...],
    start_timeout: float,
    **given: Any,
) -> None:
    """Start a router before mock workers, fail them, and say which laws hold. Exits with 1 if any is broken.

    For example: --command 'dyn-relay serve --port {port} --worker-urls={worker} --inhibited-duration-secs 0'
    """
    console = Console()
    if listing:
        console.print(_list())
        return
    if line is None:
        raise click.UsageError("--command is missing")
    try:
        expand(line, [], [0, 0])
    except ValueError as exc:
        raise click.BadParameter(str(exc), param_hint="--command") from None
    fleets = tuple((name,) * 4 for name in dialect) or FLEETS
    try:
        with console.status("starting") as status:

            def show(outcome: Outcome) -> None:
                status.update(f"{outcome.law.name}: {outcome.verdict}")

            # The program's own time to listen ends first: it knows what the program has said.
            started = partial(program, line, start_timeout)
            run = partial(check_router, started, start_timeout=2 * start_timeout, fleets=fleets, on_outcome=show)
            report = trio.run(partial(run, only=only or None, raise_on_broken=False, **given))
    except (NoRouter, NotListening, OSError) as exc:
        raise click.ClickException(str(exc)) from None
    except ValueError as exc:
        raise click.UsageError(str(exc)) from None
    if report.broken or report.not_run:
        console.print(escape(str(LawsBroken(report))), highlight=False, soft_wrap=True)
    console.print(_table(report))
    console.print(report.summary(), highlight=False)
    sys.exit(bool(report.broken or report.not_run))


def _list() -> Table:
    made = Table("", "law", "what it says")
    for law in LAWS.values():
        made.add_row(str(law.number), law.name, escape(law.fact))
    return made


def _table(report: Report) -> Table:
    made = Table()
    made.add_column("", justify="right")
    made.add_column("law", no_wrap=True)
    made.add_column("verdict", no_wrap=True)
    made.add_column("trials", justify="right")
    made.add_column("broken", justify="right")
    made.add_column("why", overflow="fold")
    for outcome in report.outcomes.values():
        verdict = f"[{_COLOURS[outcome.verdict]}]{outcome.verdict}[/]"
        numbers = (str(outcome.trials), str(outcome.broken))
        made.add_row(str(outcome.law.number), outcome.law.name, verdict, *numbers, escape(outcome.why()))
    return made


if __name__ == "__main__":
    main()
