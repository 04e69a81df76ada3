"""Generated pages are current, and the tables behind them are complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from dyn_relay.relay.failure import RULES, Kind, Phase
from dyn_relay.relay.pages import refresh
from dyn_relay.relay.state import FINAL, TRANSITIONS, IllegalStep, State, Step, advance

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("name", "holds"), [("relay.md", "stateDiagram-v2"), ("operations.md", "| `half_open` |")])
def test_a_page_is_current(name, holds):
    page = (DOCS / name).read_text()
    assert holds in page
    assert refresh(name, page) == page, f"run: python -m dyn_relay.relay.pages docs/{name}"


def test_every_kind_of_failure_has_a_rule():
    assert {kind for kind, _ in RULES} == set(Kind)
    assert {phase for _, phase in RULES} == set(Phase)


def test_nothing_leaves_a_final_state():
    for state in FINAL:
        for step in Step:
            with pytest.raises(IllegalStep):
                advance(state, step)


def test_every_state_can_end():
    """From each state that is not final, some path leads to a final one, and each is reachable from OPEN."""
    reachable = {State.OPEN}
    while True:
        more = {after for (before, _), after in TRANSITIONS.items() if before in reachable} - reachable
        if not more:
            break
        reachable |= more
    assert reachable == set(State)
    for state in set(State) - FINAL:
        assert {TRANSITIONS[state, step] for step in Step if (state, step) in TRANSITIONS} & FINAL


def test_dispatch_needs_that_no_attempt_is_live():
    assert {before for before, step in TRANSITIONS if step is Step.DISPATCH} == {State.OPEN, State.CUT}
