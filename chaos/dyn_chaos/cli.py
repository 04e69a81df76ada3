"""`dyn-chaos`: campaigns from a shell. Every command exits with 1 if anything was found."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TypeVar

import click
import msgspec
import trio
from rich.console import Console

try:
    from dyn_chaos import engines, html, load, report, simulate
    from dyn_chaos.campaigns.demo import demo
    from dyn_chaos.campaigns.kill_worker import kill_worker
except ModuleNotFoundError as missing:
    if missing.name != "httpx":  # the only package that proxy and testkit do without
        raise
    raise SystemExit("dyn-chaos needs httpx: pip install '.[chaos]' in a checkout") from None
from dyn_chaos import processes
from dyn_chaos.engines import Given
from dyn_chaos.processes import NotReady
from dyn_chaos.report import Outcome
from dyn_testkit import checkers, fold, history
from dyn_testkit.simulation import scenario
from dyn_testkit.simulation.scenario import Plan, Scenario

T = TypeVar("T")

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


def _given(text: str) -> Given:
    """URL=PGID."""
    url, _, group = text.rpartition("=")
    if not url or not group.isdigit():
        raise click.BadParameter(f"{text!r} is not URL=PGID")
    if not processes.group(int(group)):
        raise click.BadParameter(f"{text!r}: there is no process group {group} on this machine")
    return Given(url.rstrip("/"), int(group))


def _words(text: str) -> list[str]:
    """As a shell splits them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}") from None


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Kill workers under load, then check every answer token by token."""


@main.command("kill-worker")
@click.option("--workers", type=click.IntRange(2), default=2, show_default=True, help="How many mock workers to start.")
@click.option(
    "--worker", "given", type=_given, metavar="URL=PGID", multiple=True, help="A running worker instead; repeat."
)
@click.option("--streams", type=click.IntRange(2), default=16, show_default=True, help="Requests; half of them SSE.")
@click.option("--tokens", type=click.IntRange(2), default=256, show_default=True, help="Tokens of each.")
@click.option("--after", type=click.IntRange(1), help="Kill once this many SSE streams began.  [default: all of them]")
@click.option(
    "--at-token", type=click.IntRange(1), default=1, show_default=True, help="... this far into their answers."
)
@click.option(
    *("--worker-flag", "worker_flags"),
    type=_words,
    metavar="FLAGS",
    multiple=True,
    default=("--tick 0.005",),
    show_default=True,
    help="For dyn-mock-worker, split as a shell does; repeat.",
)
@click.option(
    *("--relay-flag", "relay_flags"),
    type=_words,
    metavar="FLAGS",
    multiple=True,
    help="For dyn-relay serve, e.g. '--stall-timeout-secs 8', split as a shell does; repeat.",
)
@click.option("--seed", default=0, show_default=True, help="Chooses the prompts.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Histories, logs, report.json.")
def kill_worker_command(
    workers: int,
    given: tuple[Given, ...],
    streams: int,
    tokens: int,
    after: int | None,
    at_token: int,
    worker_flags: tuple[list[str], ...],
    relay_flags: tuple[list[str], ...],
    seed: int,
    out: Path | None,
) -> None:
    """SIGKILL the busiest of some workers behind the proxy, in the middle of its streams.

    References are asked of the first worker before the proxy starts. Workers that are given by URL must run on this
    machine, for they are killed by process group. Without --out, a run that finds nothing leaves nothing.
    """
    streamed = (streams + 1) // 2
    if after is not None and after > streamed:
        raise click.BadParameter(f"only {streamed} of {streams} requests are SSE streams", param_hint="--after")
    if at_token > tokens:
        raise click.BadParameter(f"the answers end at token {tokens} (--tokens)", param_hint="--at-token")

    async def run(logs: Path) -> Outcome:
        async with trio.open_nursery() as nursery:
            servers: Sequence[engines.Victim] = given or [
                await engines.mock(nursery, f"worker-{i}", logs, [*chain(*worker_flags)]) for i in range(workers)
            ]
            plans = load.plans(streams, tokens, seed=seed)
            outcome = await kill_worker(
                nursery, servers, plans, logs, after=after or streamed, tokens=at_token, flags=[*chain(*relay_flags)]
            )
            nursery.cancel_scope.cancel()
        return outcome

    with _evidence(out) as logs:
        outcome = _run(run, logs)
        report.save(logs / "report.json", [outcome])
        _finish(outcome)


@main.command("check")
@click.argument("recorded", type=_FILE)
def check_command(recorded: Path) -> None:
    """Run the checks again on a recorded history (JSONL)."""
    try:
        seen = history.load(recorded)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    facts = {"records": len(seen.records), "references": len(seen.references)}
    _finish(Outcome(recorded.name, facts, checkers.check(seen)))


@main.command("report")
@click.argument("recorded", type=click.Path(path_type=Path, exists=True))
def report_command(recorded: Path) -> None:
    """Check a recorded history (a JSONL file, or a folder with history.jsonl) and draw it: report.html beside it."""
    source = recorded / "history.jsonl" if recorded.is_dir() else recorded
    try:
        seen = history.load(source)
        findings = checkers.check(seen)
    except (OSError, ValueError, fold.Incomplete) as error:
        raise click.ClickException(str(error)) from None
    page = source.with_name("report.html")
    page.write_text(html.render(seen, findings), encoding="utf-8")
    click.echo(f"{page}: {len(seen.records)} requests, {len(findings)} findings")
    if findings:
        sys.exit(1)


@main.command("simulate")
@click.option("--scenario", "file", type=_FILE, help="A TOML file; see docs/testkit.md.  [default: the built-in one]")
@click.option("--seeds", type=click.IntRange(1), default=200, show_default=True, help="How many.")
@click.option("--seed", "first", type=click.IntRange(0), help="Only this one.")
@click.option("--from", "start", type=click.IntRange(0), default=0, show_default=True, help="The first of many.")
@click.option("--plan", "planned", type=_FILE, help="A plan in every detail, as a failed run leaves it.")
@click.option("--processes", type=click.IntRange(1), help="[default: one a core]")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default="simulations", show_default=True)
def simulate_command(
    file: Path | None,
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
    try:
        wanted = scenario.read(file) if file else Scenario()
        if planned:
            plan = msgspec.json.decode(planned.read_bytes(), type=Plan)
            sys.exit(not simulate.replay(plan, console))
    except (ValueError, msgspec.DecodeError) as error:
        raise click.ClickException(str(error)) from None
    again = f"dyn-chaos simulate {f'--scenario {file} ' if file else ''}--seed "
    numbers = [first] if first is not None else range(start, start + seeds)
    if not simulate.simulate(wanted, numbers, processes=processes, again=again, out=out, console=console):
        sys.exit(1)


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
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        click.echo(f"kept in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}", err=True)
        raise
    if out is None:
        shutil.rmtree(folder)


def _run(campaign: Callable[[Path], Awaitable[T]], logs: Path) -> T:
    """Run it. A process or a reference that is not there is the user's to mend: a message, no traceback."""
    problem: BaseException
    try:
        return trio.run(campaign, logs)
    except* (NotReady, fold.Incomplete) as group:
        problem = group
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
    raise click.ClickException(str(problem))


def _finish(outcome: Outcome) -> None:
    report.show([outcome])
    if not outcome.ok:
        sys.exit(1)
