"""`python -m dyn_testkit.routing`: a table of policies, tried on one trace."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from dyn_relay.config import Config
from dyn_relay.fleet.policies.catalog import POLICIES
from dyn_testkit.routing.engine import Hardware
from dyn_testkit.routing.replay import Result, percentile, replay
from dyn_testkit.routing.shapes import SHAPES, make
from dyn_testkit.routing.trace import read, write

_PATH = click.Path(path_type=Path, dir_okay=False)
COLUMNS = ("policy", "reused", "p99 spread", "p99 max/mean", "most/fewest requests", "p99 first token", "whole", "took")


@click.command()
@click.option("--trace", type=_PATH, help="Replay this file instead of one that is drawn.")
@click.option("--save", type=_PATH, help="Keep the trace here.")
@click.option("--shape", type=click.Choice(["mix", *SHAPES]), default="mix", show_default=True)
@click.option("--requests", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--rate", type=click.FloatRange(0.001), default=10.0, show_default=True, help="Requests a second.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--engines", type=click.IntRange(1), default=8, show_default=True)
@click.option("--cache-blocks", type=click.IntRange(1), default=Hardware().cache_blocks, show_default=True)
@click.option("--balance-abs-threshold", type=click.IntRange(0), default=Config().balance_abs_threshold)
@click.option("--policy", type=click.Choice(list(POLICIES)), multiple=True, help="Repeat; default: all.")
def main(
    trace: Path | None,
    save: Path | None,
    shape: str,
    requests: int,
    rate: float,
    seed: int,
    engines: int,
    cache_blocks: int,
    balance_abs_threshold: int,
    policy: tuple[str, ...],
) -> None:
    """Replay a trace under each policy, in virtual time."""
    calls = list(read(trace)) if trace else make(requests, rate, seed, shape)
    if save:
        write(save, calls)
    table = Table(title=f"{len(calls)} requests, {engines} engines of {cache_blocks} blocks")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "policy" else "right")
    config = Config(balance_abs_threshold=balance_abs_threshold)
    hardware = Hardware(cache_blocks=cache_blocks)
    for name in policy or POLICIES:
        began = time.perf_counter()
        result = replay(calls, name, engines=engines, hardware=hardware, config=config, seed=seed)
        table.add_row(*row(result), f"{time.perf_counter() - began:.0f} s")
    Console().print(table)


def row(result: Result) -> list[str]:
    """A result's columns, but for the time that it took."""
    shares = result.shares.values()
    return [
        result.policy,
        f"{result.hit_rate:.1%}",
        f"{percentile(result.spreads, 0.99):.0f}",
        f"{percentile(result.peaks, 0.99):.2f}",
        f"{max(shares)}/{min(shares)}",
        f"{percentile(result.waits, 0.99):.1f} s",
        f"{result.seconds:.0f} s",
    ]


if __name__ == "__main__":
    main()
