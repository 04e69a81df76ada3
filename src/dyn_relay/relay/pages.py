"""The generated parts of `docs/relay.md` and `docs/operations.md`.

    python -m dyn_relay.relay.pages docs/relay.md docs/operations.md

brings them up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from dyn_relay.fleet.worker import HEALTHY, MEANING, TIER, TRANSITIONS, Signal, State
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


def worker_states() -> str:
    """The states of a worker in Markdown."""
    asked = ("first", "if there is none of the former", "if there is none of these either", "last")
    lines = ["| state | | healthy | gets requests |", "|---|---|---|---|"]
    for state, meaning in MEANING.items():
        when = "never" if state not in TIER else asked[TIER[state]]
        when = f"one at a time; others {when}" if state is State.HALF_OPEN else when
        lines.append(f"| `{state}` | {meaning} | {'yes' if state in HEALTHY else ''} | {when} |")
    return "\n".join(lines)


def worker_transitions() -> str:
    """The table of their changes in Markdown, by what causes them."""
    lines = ["| cause | before | after |", "|---|---|---|"]
    for signal in Signal:
        before: dict[State, list[str]] = {}
        for state in State:
            after = TRANSITIONS.get((state, signal))
            if after is not None:
                before.setdefault(after, []).append(f"`{state}`")
        lines += [f"| {signal} | {', '.join(states)} | `{after}` |" for after, states in before.items()]
    return "\n".join(lines)


#: By page: what makes each of its sections.
SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "relay.md": {"states": lambda: f"```mermaid\n{diagram()}\n```", "failures": failures},
    "operations.md": {"worker-states": worker_states, "worker-transitions": worker_transitions},
}


def refresh(name: str, page: str) -> str:
    """The page with each generated section made anew. Raises `ValueError` if a marker is missing."""
    for section, make in SECTIONS[name].items():
        begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
        start, stop = page.index(begin) + len(begin), page.index(end)
        page = f"{page[:start]}\n{make()}\n{page[stop:]}"
    return page


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(refresh(path.name, path.read_text()))
