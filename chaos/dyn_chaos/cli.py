"""`dyn-chaos`: campaigns from a shell. Every command exits with 1 if anything was found."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import trio

from dyn_chaos import check, engines, history, load, report
from dyn_chaos.campaigns.demo import demo
from dyn_chaos.campaigns.kill_worker import kill_worker
from dyn_chaos.engines import Given
from dyn_chaos.report import Outcome

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


def _given(text: str) -> Given:
    """URL=PGID."""
    url, _, group = text.rpartition("=")
    if not url or not group.isdigit():
        raise click.BadParameter(f"{text!r} is not URL=PGID")
    return Given(url.rstrip("/"), int(group))


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
@click.option("--after", type=click.IntRange(1), help="Kill once this many streams began.  [default: all SSE ones]")
@click.option(
    "--at-token", type=click.IntRange(1), default=1, show_default=True, help="... this far into their answers."
)
@click.option("--worker-flag", "worker_flags", multiple=True, help="For dyn-mock-worker.  [default: --tick 0.005]")
@click.option("--relay-flag", "relay_flags", multiple=True, help="For dyn-relay serve.")
@click.option("--seed", default=0, show_default=True, help="Chooses the prompts.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Keep histories, logs, report.json here.")
def kill_worker_command(
    workers: int,
    given: tuple[Given, ...],
    streams: int,
    tokens: int,
    after: int | None,
    at_token: int,
    worker_flags: tuple[str, ...],
    relay_flags: tuple[str, ...],
    seed: int,
    out: Path | None,
) -> None:
    """SIGKILL the busiest of some workers behind the proxy, in the middle of its streams.

    References are asked of the first worker before the proxy starts. Workers that are given by URL must run on this
    machine, for they are killed by process group.
    """

    async def run(logs: Path) -> Outcome:
        async with trio.open_nursery() as nursery:
            servers: Sequence[engines.Victim] = given or [
                await engines.mock(nursery, f"worker-{i}", logs, worker_flags or ("--tick", "0.005"))
                for i in range(workers)
            ]
            plans = load.plans(streams, tokens, seed=seed)
            outcome = await kill_worker(
                nursery, servers, plans, logs, after=after or (streams + 1) // 2, tokens=at_token, flags=relay_flags
            )
            nursery.cancel_scope.cancel()
        return outcome

    with tempfile.TemporaryDirectory() as temporary:
        logs = out or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        outcome = trio.run(run, logs)
        report.save(logs / "report.json", [outcome])
    _finish(outcome)


@main.command("check")
@click.argument("records", type=_FILE)
@click.option("--reference", type=_FILE, required=True, help="The same requests' uninterrupted records.")
@click.option("--tolerance", default=check.TOLERANCE, show_default=True, help="Absolute, for logprobs.")
def check_command(records: Path, reference: Path, tolerance: float) -> None:
    """Run the checks again on a recorded history (JSONL)."""
    try:
        got, want = history.load(records), history.load(reference)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    outcome = Outcome(records.name, {"records": len(got)}, check.check_all(got, want, tolerance))
    _finish(outcome)


@main.command("demo")
def demo_command() -> None:
    """Two mock workers, one stream; the worker that serves it is killed; the stream completes and is verified."""
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(not trio.run(demo, Path(temporary)))


def _finish(outcome: Outcome) -> None:
    report.show([outcome])
    sys.exit(not outcome.ok)
