"""Samples to tables: medians with their spread, and ratios to the baseline taken repetition by repetition."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from peers import BASELINE

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


def table(samples: list[Sample], workload: str) -> str:
    """A Markdown table of one workload: a row for each peer, `median (lowest-highest)`, ratios behind `x`."""
    rows = [sample for sample in samples if sample["workload"] == workload]
    columns = [column for column in COLUMNS if any(sample[column[0]] is not None for sample in rows)]
    base = {sample["rep"]: sample for sample in rows if sample["peer"] == BASELINE}
    lines = [
        "| peer | " + " | ".join(heading for _, heading, _, _ in columns) + " | errors |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for peer in dict.fromkeys(sample["peer"] for sample in rows):
        mine = [sample for sample in rows if sample["peer"] == peer]
        cells = [_cell(mine, base, key, form, ratio and peer != BASELINE) for key, _, form, ratio in columns]
        errors = sum(sum(sample["load"]["errors"].values()) for sample in mine)
        lines.append(f"| {peer} | " + " | ".join(cells) + f" | {errors} |")
    return "\n".join(lines)


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
        if other is not None and sample[key] is not None and other[key]:
            yield sample[key] / other[key]
