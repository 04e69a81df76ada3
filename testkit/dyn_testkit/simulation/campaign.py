"""Many seeds of a scenario, in parallel processes, until one fails; then the smallest plan that fails that way."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context

from dyn_relay.observe import log as logs
from dyn_testkit.checkers import Finding
from dyn_testkit.simulation.goals import met
from dyn_testkit.simulation.run import run
from dyn_testkit.simulation.scenario import Plan, Scenario, draw
from dyn_testkit.simulation.shrink import shrink

#: The check of a finding that stands for an exception: a defect of the router or of the simulation.
CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one seed."""

    seed: int
    findings: tuple[Finding, ...] = ()
    #: Virtual seconds.
    duration: float = 0.0
    goals: Counter[str] = field(default_factory=Counter)


def quiet() -> None:
    """For a process that runs nothing but plans: their proxies have nothing to say to people."""
    logs.setup("critical")


def try_plan(plan: Plan) -> Result:
    """Run a plan; an exception is a finding, too."""
    try:
        ran = run(plan)
    except Exception:
        return Result(plan.seed, (Finding("run", CRASH, traceback.format_exc()),))
    return Result(plan.seed, tuple(ran.findings), ran.duration, met(ran.history))


def try_seed(scenario: Scenario, seed: int) -> Result:
    """Draw the plan of a seed and run it."""
    return try_plan(draw(scenario, seed))


def search(scenario: Scenario, seeds: Sequence[int], processes: int | None = None) -> Iterator[Result]:
    """The results of all seeds as they come, in any order; it ends after the first with a finding."""
    waiting = iter(seeds)
    count = processes or os.cpu_count() or 1
    with ProcessPoolExecutor(count, get_context("spawn"), quiet) as pool:
        running: set[Future[Result]] = set()
        while True:
            running |= {pool.submit(try_seed, scenario, seed) for seed in islice(waiting, 2 * count - len(running))}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                yield result
                if result.findings:
                    pool.shutdown(cancel_futures=True)
                    return


def smallest(plan: Plan, findings: Sequence[Finding]) -> Plan:
    """The smallest plan with a finding of one of the same checks."""
    wanted = {finding.check for finding in findings}
    return shrink(plan, lambda candidate: any(each.check in wanted for each in try_plan(candidate).findings))
