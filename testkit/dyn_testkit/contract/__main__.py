"""`python -m dyn_testkit.contract URL`: the checks against a server that runs."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import click
import trio
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dyn_testkit.contract import CHECKS, ContractBroken, NoWorker, Outcome, Report, check_worker

_COLOURS = {"passed": "green", "skipped": "yellow", "broken": "bold red", "not run": "bold red"}
_NAMES = click.Choice(list(CHECKS))


@click.command()
@click.argument("url", required=False)
@click.option("--only", type=_NAMES, metavar="CHECK", multiple=True, help="Run this check; repeat.")
@click.option("--skip", type=_NAMES, metavar="CHECK", multiple=True, help="Do not run this check; repeat.")
@click.option("--list", "listing", is_flag=True, help="Print the checks and stop.")
@click.option("--api-key", default=None)
@click.option("--dialect", type=click.Choice(["cumulative", "incremental", "mixed"]), help="Default: found out.")
@click.option("--prompt", default="5,6,7,8,9", show_default=True, help="Tokens of the usual request.")
@click.option("--longest-prompt", type=click.IntRange(16), default=8192, show_default=True)
@click.option("--tolerance", type=click.FloatRange(0), default=1e-3, show_default=True, help="Of logprobs.")
@click.option("--live-seconds", type=click.FloatRange(0.1), default=3.0, show_default=True)
@click.option("--answer-timeout", type=click.FloatRange(0.1), default=60.0, show_default=True)
@click.option("--start-timeout", type=click.FloatRange(0.1), default=10.0, show_default=True)
def main(url: str | None, only: tuple[str, ...], listing: bool, prompt: str, **given: Any) -> None:
    """Check that the server at URL speaks as SGLang 0.5.23 does. Exits with 1 if any check is broken.

    Use a worker without other users: requests are sent, some at a time, and aborted.
    """
    console = Console()
    if listing or url is None:
        if not listing:
            raise click.UsageError("URL is missing")
        console.print(_list())
        return
    try:
        tokens = [int(token) for token in prompt.split(",")]
    except ValueError:
        raise click.BadParameter(f"{prompt!r} is not a list of integers", param_hint="--prompt") from None

    @asynccontextmanager
    async def running() -> AsyncIterator[str]:
        yield url.rstrip("/")

    try:
        with console.status("") as status:

            def show(outcome: Outcome) -> None:
                status.update(f"{outcome.name}: {outcome.verdict}")

            run = partial(check_worker, running, only=only or None, prompt=tokens, on_outcome=show)
            report = trio.run(partial(run, **given))
    except NoWorker as exc:
        raise click.ClickException(str(exc)) from None
    except (TypeError, ValueError) as exc:
        raise click.UsageError(str(exc)) from None
    except ContractBroken as exc:
        report = exc.report
        console.print(escape(str(exc)), highlight=False, soft_wrap=True)
    facts = report.facts
    known = f"{facts.dialect or 'unknown'} dialect, {'a' if facts.tokenizer else 'no'} tokenizer"
    console.print(_table(report))
    console.print(f"{report.url}: {report.summary()} ({known})", highlight=False, soft_wrap=True)
    sys.exit(bool(report.broken or report.not_run))


def _list() -> Table:
    made = Table("check", "what the contract says", "where")
    for check in CHECKS.values():
        made.add_row(check.name, escape(check.fact), escape(check.source))
    return made


def _table(report: Report) -> Table:
    made = Table()
    made.add_column("check", no_wrap=True)
    made.add_column("verdict")
    made.add_column("why", overflow="fold")
    for outcome in report.outcomes:
        colour = _COLOURS[outcome.verdict]
        made.add_row(outcome.name, f"[{colour}]{outcome.verdict}[/]", escape(outcome.reason))
    return made


if __name__ == "__main__":
    main()
