"""The generated parts of `docs/relay.md`: `python -m dyn_relay.relay.pages docs/relay.md` brings them up to date."""

from __future__ import annotations

import re
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
    """The page with each generated section made anew."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        page = re.sub(
            f"{re.escape(begin)}.*?{re.escape(end)}",
            lambda _, text=make(), b=begin, e=end: f"{b}\n{text}\n{e}",  # type: ignore[misc]
            page,
            flags=re.DOTALL,
        )
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(refresh(path.read_text()))
