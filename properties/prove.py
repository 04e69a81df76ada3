"""How a property is run: 512 examples, a seed that is told when it fails, goals that must have been met."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any
from zlib import crc32

from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis.strategies import SearchStrategy

from dyn_testkit.laws import Observed, Sometimes
from dyn_testkit.laws.cases import hard
from dyn_testkit.seed import run_seed

#: The same in every run of the tests; `make laws` looks for counterexamples under seeds that nobody has tried.
SEED = run_seed()
#: DYN_EXAMPLES=N makes a shorter (or longer) run; a shorter one need not meet every goal.
ENOUGH = 512
EXAMPLES = int(os.environ.get("DYN_EXAMPLES") or ENOUGH)

_SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)


def for_all(
    check: Callable[..., None], *strategies: SearchStrategy[Any], begin: Iterable[Any] = (), times: int = 1
) -> None:
    """Run `check` on examples of one or two strategies. Raises what the smallest failing one raises.

    `begin`: examples of a single strategy that are tried first. `times`: so many times as many as usual.
    """
    # Hypothesis wants to see the names of the parameters.
    test = (lambda case: check(case)) if len(strategies) == 1 else (lambda one, other: check(one, other))
    test.__name__ = check.__qualname__.partition(".")[0].strip("<>")  # failures are remembered under this name
    for value in begin:
        test = example(value)(test)
    many = settings(_SETTINGS, max_examples=EXAMPLES * times)
    seed(SEED ^ crc32(check.__qualname__.encode()))(many(given(*strategies)(test)))()


def prove(
    check: Callable[..., Observed],
    *strategies: SearchStrategy[Any],
    sometimes: Iterable[str] = (),
    begin: Iterable[Any] | None = None,
    times: int = 1,
) -> None:
    """`for_all`, where each check returns what it observed, and each goal must be met at least once.

    Checks of one case begin with the hard cases, if there are no others.
    """
    goals = Sometimes(sometimes)

    @wraps(check)
    def watched(*values: Any) -> None:
        goals.watch(check(*values))

    begin = (hard() if len(strategies) == 1 else ()) if begin is None else begin
    for_all(watched, *strategies, begin=begin, times=times)
    if EXAMPLES >= ENOUGH:
        goals.verify()
