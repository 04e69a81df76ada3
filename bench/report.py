"""Samples to tables: medians with their spread, and ratios to the baseline taken repetition by repetition.

`python bench/report.py results/TIME.json ...` prints the tables of earlier runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from typing import Any

from peers import BASELINE
from workloads import WORKLOADS

Sample = dict[str, Any]

#: (key of a sample, heading, format, ratio too)
COLUMNS = (
    ("cpu_ms", "CPU ms/request", "{:.3f}", True),
    ("rps", "requests/s", "{:.0f}", True),
    ("p50_ms", "p50 ms", "{:.2f}", False),
    ("p99_ms", "p99 ms", "{:.2f}", False),
    ("delay_p50_us", "event delay p50 us", "{:.0f}", True),
    ("delay_p99_us", "p99 us", "{:.0f}", False),
    ("peak_rss_mb", "peak RSS MB", "{:.0f}", True),
    ("kb_per_stream", "kB/live stream", "{:.1f}", True),
    ("other_load", "other load on the cores %", "{:.0f}", False),
)


def report(samples: list[Sample]) -> str:
    """All tables of a run, in Markdown: CPU time of all peers first, then one table a workload."""
    names = dict.fromkeys(sample["workload"] for sample in samples)
    parts = [overview(samples)]
    parts += [f"**{name}**: {WORKLOADS[name].what}\n\n{table(samples, name)}" for name in names]
    return "\n\n".join(parts)


def overview(samples: list[Sample]) -> str:
    """CPU ms per request: a row for each workload, a column for each peer, its ratio to the baseline behind `x`."""
    peers = list(dict.fromkeys(sample["peer"] for sample in samples))
    lines = ["| CPU ms/request | " + " | ".join(peers) + " |", "|---" * (len(peers) + 1) + "|"]
    for name in dict.fromkeys(sample["workload"] for sample in samples):
        cells = [_cell(_of(samples, name, peer), _base(samples, name), "cpu_ms", "{:.3f}", True) for peer in peers]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(samples: list[Sample], workload: str) -> str:
    """One workload: a row for each peer, `median (lowest-highest)`, ratios to the baseline behind `x`."""
    rows = [sample for sample in samples if sample["workload"] == workload]
    columns = [column for column in COLUMNS if any(sample[column[0]] is not None for sample in rows)]
    base = _base(samples, workload)
    lines = [
        "| peer | " + " | ".join(heading for _, heading, _, _ in columns) + " | errors |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for peer in dict.fromkeys(sample["peer"] for sample in rows):
        mine = _of(rows, workload, peer)
        cells = [_cell(mine, base, key, form, ratio) for key, _, form, ratio in columns]
        errors = sum(sum(sample["load"]["errors"].values()) for sample in mine)
        lines.append(f"| {peer} | " + " | ".join(cells) + f" | {errors} |")
    return "\n".join(lines)


def ratio(samples: list[Sample], workload: str, peer: str, key: str) -> float | None:
    """The median of a peer's ratios to the baseline; None if the two have no repetition in common."""
    ratios = list(_ratios(_of(samples, workload, peer), _base(samples, workload), key))
    return statistics.median(ratios) if ratios else None


def _of(samples: list[Sample], workload: str, peer: str) -> list[Sample]:
    return [sample for sample in samples if (sample["workload"], sample["peer"]) == (workload, peer)]


def _base(samples: list[Sample], workload: str) -> dict[int, Sample]:
    return {sample["rep"]: sample for sample in _of(samples, workload, BASELINE)}


def _cell(mine: list[Sample], base: dict[int, Sample], key: str, form: str, with_ratio: bool) -> str:
    values = [sample[key] for sample in mine if sample[key] is not None]
    if not values:
        return "-"
    text = f"{form.format(statistics.median(values))} ({form.format(min(values))}-{form.format(max(values))})"
    ratios = list(_ratios(mine, base, key)) if with_ratio else []
    return f"{text} **x{statistics.median(ratios):.2f}**" if ratios else text


def _ratios(mine: list[Sample], base: dict[int, Sample], key: str) -> Iterable[float]:
    for sample in mine:
        other = base.get(sample["rep"])
        if other is not None and other is not sample and sample[key] is not None and other[key]:
            yield sample[key] / other[key]


def main() -> None:
    """Print the tables of the runs in the files named on the command line, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="FILE", type=argparse.FileType(), help="samples that run.py wrote")
    for file in parser.parse_args().runs:
        run = json.load(file)
        print(f"{run['title']}\n\n{report(run['samples'])}\n")


if __name__ == "__main__":
    main()
