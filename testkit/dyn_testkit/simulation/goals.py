"""Goals against vacuous campaigns: what must have happened at least once in many runs, or they have shown little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dyn_testkit.checkers.base import INNOCENT
from dyn_testkit.checkers.tenure import held
from dyn_testkit.history import Fault, History
from dyn_testkit.simulation.nemeses.legs import PHASES
from dyn_testkit.simulation.scenario import Scenario

_Row = Mapping[str, Any]
#: Prefill's answer has one token.
NEVER = ("prefill", "kill_amid_tokens")


def _cuts(row: _Row) -> list[str]:
    return [attempt["cause"] for attempt in row["attempts"] if attempt["cause"] not in (None, "left")]


def _resumed(row: _Row) -> list[int]:
    return [attempt["resumed_from"] for attempt in row["attempts"] if attempt["resumed_from"]]


def _ended_by(cause: str) -> Callable[[_Row], bool]:
    return lambda row: cause in _cuts(row)


#: Of one row: its name and how to tell that it happened.
OF_ROWS: Mapping[str, Callable[[_Row], bool]] = {
    "a stream continued": lambda row: bool(_resumed(row)) and row["streaming"],
    "a unary answer continued": lambda row: bool(_resumed(row)) and not row["streaming"],
    "continued twice": lambda row: len(set(_resumed(row))) > 1,
    "continued three times": lambda row: len(set(_resumed(row))) > 2,
    "begun again, nothing was delivered": lambda row: len(row["attempts"]) > 1 and not _resumed(row),
    "finished here, nothing was left to generate": lambda row: row["outcome"] == "completed_here",
    "tokens of several versions": lambda row: row["crossed_versions"],
    "failed loudly": lambda row: row["outcome"] == "failed",
    "the budget of attempts was spent": lambda row: row["error"] == "migration_limit",
    "an innocent suspect": lambda row: row["error"] == "suspected_poison",
    "aborted": lambda row: row["outcome"] == "aborted",
    "aborted after a cut": lambda row: row["outcome"] == "aborted" and bool(_cuts(row)),
    "the client left": lambda row: row["outcome"] == "client_gone",
    "the client left after a cut": lambda row: row["outcome"] == "client_gone" and bool(_cuts(row)),
    **{f"an attempt ended by {cause}": _ended_by(cause) for cause in ("connect", "cut", "stall", "busy")},
}

#: What makes pairs: where either leg's worker died, and that the other one went on.
OF_PAIRS = tuple(f"{role}: {kind}" for role in ("prefill", "decode") for kind in PHASES if (role, kind) != NEVER)

#: What befalls workers with sidecars, and ends attempts there.
AT_SIDECARS = ("kill", "stall", "partition", "kill_sidecar", "stall_sidecar", "sever")
#: What becomes of leases.
LAPSED, GIVEN_BACK, BACK = "a lease lapsed", "a lease was given back", "a worker was back with another lease"
OF_LEASES = (LAPSED, GIVEN_BACK, BACK, *(f"an attempt at a sidecar ended by {kind}" for kind in AT_SIDECARS))


def goals_of(scenario: Scenario) -> tuple[str, ...]:
    """What a long campaign must have met."""
    paired = OF_PAIRS if scenario.prefills[1] else ()
    leased = OF_LEASES if scenario.sidecars else ()
    return (*OF_ROWS, *(f"fault: {kind}" for kind in scenario.kinds), *paired, *leased)


def met(history: History) -> Counter[str]:
    """How often each goal was met in a run."""
    return Counter(_met(history))


def _met(history: History) -> Iterator[str]:
    for row in history.rows:
        yield from (name for name, happened in OF_ROWS.items() if happened(row))
    yield from (f"fault: {kind}" for kind in {(fault.kind, fault.at): fault.kind for fault in history.faults}.values())
    prefills = history.run.prefills
    yield from (
        f"{'prefill' if fault.target in prefills else 'decode'}: {fault.kind}"
        for fault in history.faults
        if fault.kind in PHASES
    )
    yield from _of_leases(history)


def _of_leases(history: History) -> Iterator[str]:
    spans = held(history.leases)
    for mine in spans.values():
        for before in mine[:-1]:
            yield GIVEN_BACK if before.given_back else LAPSED
            yield BACK
    for row in history.rows:
        for attempt in row["attempts"]:
            ended = row["time"] - history.run.began + attempt["ended"]
            if attempt["cause"] not in INNOCENT and attempt["url"] in spans:
                kinds = {fault.kind for fault in history.faults if _befell(fault, attempt["url"], ended)}
                yield from (f"an attempt at a sidecar ended by {kind}" for kind in sorted(kinds & {*AT_SIDECARS}))


def _befell(fault: Fault, worker: str, when: float) -> bool:
    return fault.target == worker and fault.at <= when and (fault.until is None or when <= fault.until)
