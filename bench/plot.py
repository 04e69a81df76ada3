"""What a proxy's CPU time is of sglang-router's, workload by workload: `python bench/plot.py RESULTS.json OUT.svg`.

One bar a peer, on a logarithmic axis: to the left of the line at 1 is cheaper than sglang-router, to the right dearer.
A bar is the median of the ratios of the repetitions, its number printed beside it; RESULTS.json is what run.py wrote.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from xml.sax.saxutils import escape

from peers import BASELINE
from report import Sample, ratio

#: Pixels.
WIDTH, LEFT, RIGHT, TOP, BAR, SPACE = 860, 90, 60, 72, 11, 12
#: Of the peers, in the order of the samples.
COLORS = ("#0b6e4f", "#58b38a", "#a9d8c2", "#d1495b", "#e8a33d", "#5b6c8f", "#9a9a9a")


def text(x: float, y: float, words: str, more: str = "") -> str:
    """A piece of text; `y` is its base line."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, color: str) -> str:
    """A filled rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def plot(title: str, samples: list[Sample]) -> str:
    """The picture, as SVG."""
    peers = [peer for peer in dict.fromkeys(sample["peer"] for sample in samples) if peer != BASELINE]
    colors = {peer: COLORS[number % len(COLORS)] for number, peer in enumerate(peers)}
    groups = {
        name: [(peer, value) for peer in peers if (value := ratio(samples, name, peer, "cpu_ms"))]
        for name in dict.fromkeys(sample["workload"] for sample in samples)
    }
    ratios = [value for bars in groups.values() for _, value in bars]
    if not ratios:
        raise SystemExit(f"nothing to compare: no samples of {BASELINE} and another peer on the same workload")
    low = math.floor(math.log10(min(*ratios, 0.99)))
    high = math.ceil(math.log10(max(*ratios, 1.01)))

    def at(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(value) - low) / (high - low)

    bars, y = [], float(TOP)
    for name, group in groups.items():
        bars.append(text(LEFT - 8, y + BAR * len(group) / 2 + 4, name, 'text-anchor="end" font-weight="bold"'))
        for peer, size in group:
            left, right = sorted((at(1), at(size)))
            bars.append(rect(left, y, max(right - left, 1), BAR - 2, colors[peer]))
            bars.append(text(right + 4, y + BAR - 3, f"{size:.2f}", 'font-size="9"'))
            y += BAR
        y += SPACE
    ticks = []
    for tick in (factor * 10.0**power for power in range(low, high + 1) for factor in (1, 2, 5)):
        if tick <= 10.0**high:
            color, wide = ("#333", 1.5) if tick == 1 else ("#ddd", 1)
            ticks.append(rect(at(tick) - wide / 2, TOP - 6, wide, y - TOP, color))
            ticks.append(text(at(tick), y + 8, f"{tick:g}", 'text-anchor="middle"'))
    legend = []
    for number, (peer, color) in enumerate(colors.items()):
        legend += [rect(LEFT + 110 * number, 38, 10, 10, color), text(LEFT + 110 * number + 14, 47, peer)]
    words = [
        text(LEFT, 18, f"CPU time per request, as a multiple of {BASELINE}'s", 'font-size="14"'),
        text(LEFT, 31, title.split(";")[0], 'font-size="9" fill="#666"'),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 18:.0f}" font-family="sans-serif"'
    page = f'<rect width="{WIDTH}" height="{y + 18:.0f}" fill="white"/>'
    return "\n".join([f'{head} font-size="11">', page, *words, *legend, *ticks, *bars, "</svg>\n"])


def main() -> None:
    """Read the samples, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=argparse.FileType(), metavar="RESULTS.json")
    parser.add_argument("out", type=Path, metavar="OUT.svg")
    options = parser.parse_args()
    run = json.load(options.results)
    options.out.write_text(plot(run["title"], run["samples"]))


if __name__ == "__main__":
    main()
