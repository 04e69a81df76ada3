"""`dyn-chaos`: campaigns from a shell. Every command exits with 1 if anything was found, 3 if it had to be skipped."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import click
import trio
from click.core import ParameterSource
from rich.console import Console

try:
    from dyn_chaos import html, report, simulate
    from dyn_chaos.campaigns.demo import demo
except ModuleNotFoundError as missing:
    if missing.name not in ("httpx", "httpcore", "h11", "hypothesis"):  # what the proxy alone does without
        raise
    raise SystemExit(f"dyn-chaos needs {missing.name}: pip install '.[chaos]' in a checkout") from None
from dyn_chaos.campaigns.base import Campaign
from dyn_chaos.campaigns.table import CAMPAIGNS
from dyn_chaos.commands import command
from dyn_chaos.namespaces import Unable
from dyn_chaos.processes import NotReady
from dyn_chaos.report import Outcome
from dyn_chaos.run import HISTORY, SUMMARY, Setup, run
from dyn_chaos.verdict import verdict
from dyn_testkit import fold, history
from dyn_testkit.history import Fault
from dyn_testkit.simulation import scenario
from dyn_testkit.simulation.campaign import quiet

T = TypeVar("T")

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


class Skipped(click.ClickException):
    """This machine cannot do what was asked for."""

    exit_code = 3


class BrokenOff(click.ClickException):
    """A signal ended it."""

    def __init__(self, sig: int) -> None:
        super().__init__(f"broken off by {signal.Signals(sig).name}")
        self.exit_code = 128 + sig  # type: ignore[misc] # as shells say it; click reads it of the instance


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Kill workers under load, then check every answer token by token."""


def _tell(fault: Fault) -> None:
    click.echo(f"{fault.at:8.1f} s  {fault.kind} of {fault.target}: {fault.proof or 'NOTHING IS TO BE SEEN OF IT'}")


def _campaign(row: Campaign, setup: Setup, out: Path | None) -> None:
    with _evidence(out) as folder:
        outcome = _run(partial(run, row, setup, heard=_tell), folder)
        if not outcome.ok:
            click.echo(f"seed={setup.seed} commit={simulate.commit()} {shlex.join(['dyn-chaos', *sys.argv[1:]])}")
        _finish(outcome)


for _row in CAMPAIGNS.values():
    main.add_command(command(_row, _campaign))


@main.command("check")
@click.argument("recorded", type=click.Path(path_type=Path, exists=True), metavar="DIR")
def check_command(recorded: Path) -> None:
    """Run the checks again on the folder of a run, or on one history (JSONL)."""
    path = recorded / HISTORY if recorded.is_dir() else recorded
    try:
        outcome = verdict(history.load(path))
    except (OSError, ValueError, fold.Incomplete) as error:
        raise click.ClickException(str(error)) from None
    _finish(outcome)


@main.command("report")
@click.argument("recorded", type=click.Path(path_type=Path, exists=True))
def report_command(recorded: Path) -> None:
    """Check a recorded history (a JSONL file, or a folder with history.jsonl) and draw it: report.html beside it."""
    source = recorded / "history.jsonl" if recorded.is_dir() else recorded
    page = source.with_name(html.REPORT)
    try:
        seen = history.load(source)
        outcome = verdict(seen)
        page.write_text(html.render(seen, outcome.findings), encoding="utf-8")
    except (OSError, ValueError, fold.Incomplete) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{page}: {len(seen.records)} requests, {len(outcome.findings)} findings")
    if not outcome.ok:
        sys.exit(1)


@main.command("simulate")
@click.option("--scenario", "file", type=_FILE, help="A TOML file; see docs/testkit.md.  [default: the built-in one]")
@click.option("--pairs", is_flag=True, help="The built-in scenario of prefill/decode pairs instead.")
@click.option("--grpc", is_flag=True, help="The built-in scenario of workers over gRPC and HTTP instead.")
@click.option("--sidecars", is_flag=True, help="The built-in scenario of workers behind sidecars instead.")
@click.option("--seeds", type=click.IntRange(1), default=200, show_default=True, help="How many.")
@click.option("--seed", "first", type=click.IntRange(0), help="Only this one.")
@click.option("--from", "start", type=click.IntRange(0), default=0, show_default=True, help="The first of many.")
@click.option("--plan", "planned", type=_FILE, help="A plan in every detail, as a failed run leaves it.")
@click.option("--processes", type=click.IntRange(1), help="[default: one a core]")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default="simulations", show_default=True)
def simulate_command(
    file: Path | None,
    pairs: bool,
    grpc: bool,
    sidecars: bool,
    seeds: int,
    first: int | None,
    start: int,
    planned: Path | None,
    processes: int | None,
    out: Path,
) -> None:
    """A whole fleet in one process and in virtual time: random requests under random faults, every answer checked.

    The same seed and commit give the same run on every machine. The first failure ends it and is made small.
    """
    console = Console()
    quiet()
    _one_of("--scenario", "--pairs", "--grpc", "--sidecars")
    _one_of("--pairs", "--grpc", "--sidecars")
    _one_of("--grpc", "--sidecars")
    _one_of("--plan", "--scenario", "--pairs", "--grpc", "--sidecars", "--seed", "--seeds", "--from")
    _one_of("--seed", "--seeds", "--from")
    try:
        if planned:
            sys.exit(not simulate.replay(scenario.read_plan(planned), console))
        named = next((name for name, said in (("pairs", pairs), ("grpc", grpc), ("sidecars", sidecars)) if said), "")
        wanted = scenario.read(file) if file else scenario.BUILT_IN[named]
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    which = f"--scenario {file} " if file else f"--{named} " if named else ""
    again = f"dyn-chaos simulate {which}--seed "
    numbers = [first] if first is not None else range(start, start + seeds)
    if not simulate.simulate(wanted, numbers, processes=processes, again=again, out=out, console=console):
        sys.exit(1)


def _one_of(option: str, *others: str) -> None:
    """A usage error if the option is said together with one of the others."""
    context = click.get_current_context()
    names = {param.opts[0]: param.name or "" for param in context.command.params}
    said = {each for each, name in names.items() if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if option in said and said & set(others):
        raise click.UsageError(f"either {option} or {min(said & set(others))}")


@main.command("demo")
def demo_command() -> None:
    """Two mock workers, one stream; the worker that serves it is killed; the stream completes and is verified."""
    with _evidence(None) as logs:
        if not _run(demo, logs):
            sys.exit(1)


@contextmanager
def _evidence(out: Path | None) -> Iterator[Path]:
    """Where a campaign leaves what it recorded: `out`, or a new folder that goes if the block is left without error."""
    folder = out or Path(tempfile.mkdtemp(prefix="dyn-chaos-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Of an earlier run: they would pass for this one's, should it be broken off.
        for name in (HISTORY, SUMMARY, html.REPORT):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise click.BadParameter(str(error), param_hint="'--out'") from None
    try:
        yield folder
    except BaseException:
        if kept := sorted(path.name for path in folder.iterdir()):
            click.echo(f"kept in {folder}: {', '.join(kept)}", err=True)
        elif out is None:
            folder.rmdir()
        raise
    if out is None:
        shutil.rmtree(folder)


def _run(campaign: Callable[[Path], Awaitable[T]], logs: Path) -> T:
    """Run it. A process or a reference that is not there is the user's to mend: a message, no traceback."""
    problem: BaseException
    try:
        return trio.run(_until_broken_off, campaign, logs)
    except* (NotReady, Unable, fold.Incomplete, BrokenOff) as group:
        problem = group
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
    if isinstance(problem, BrokenOff):
        raise problem
    if isinstance(problem, Unable):
        raise Skipped(f"SKIPPED, nothing was tested: {problem}")
    raise click.ClickException(str(problem))


async def _until_broken_off(campaign: Callable[[Path], Awaitable[T]], logs: Path) -> T:
    """A scheduler's SIGTERM and a closed terminal's SIGHUP end it as Ctrl-C does: by cancellation, so all is undone.

    Raises `BrokenOff`. A second signal does what signals do by default.
    """
    # A job in the background has no Ctrl-C, and one under nohup survives its terminal.
    heeded = [sig for sig in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(sig) is not signal.SIG_IGN]
    async with trio.open_nursery() as nursery:

        async def listen(task_status: trio.TaskStatus[None]) -> None:
            with trio.open_signal_receiver(signal.SIGTERM, *heeded) as signals:
                task_status.started()
                got = await anext(signals)
            raise BrokenOff(got)

        await nursery.start(listen)
        came = await campaign(logs)
        nursery.cancel_scope.cancel()
    return came


def _finish(outcome: Outcome) -> None:
    report.show([outcome])
    if not outcome.ok:
        sys.exit(1)
