"""The generated parts of `docs/relay.md`: `python -m dyn_relay.relay.pages docs/relay.md` brings them up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from dyn_relay.relay.failure import RULES
from dyn_relay.relay.state import diagram


def failures() -> str:
    """The failure table in Markdown."""
    lines = [
        "| seen | when | then | counts | left out | abort | suspicious |",
        "|---|---|---|---|---|---|---|",
    ]
    for (kind, phase), rule in RULES.items():
        marks = (rule.counts, rule.penalty, rule.abort, rule.suspicious)
        cells = [kind.value, phase.value, rule.action.value, *("yes" if mark else "" for mark in marks)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


SECTIONS = {"states": lambda: f"```mermaid\n{diagram()}\n```", "failures": failures}


def refresh(page: str) -> str:
    """The page with each generated section made anew. Raises `ValueError` if a marker is missing."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        start, stop = page.index(begin) + len(begin), page.index(end)
        page = f"{page[:start]}\n{make()}\n{page[stop:]}"
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(refresh(path.read_text()))
