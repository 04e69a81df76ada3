"""The checks, by theme. Importing this package fills the table."""

from dyn_testkit.contract.checks import (
    aborts,
    answers,
    budgets,
    controls,
    experts,
    framing,
    infos,
    logprobs,
    refusals,
    rids,
    routes,
    streams,
    texts,
)
from dyn_testkit.contract.table import arrange

#: In the order in which they run: what disturbs a worker comes last.
THEMES = (infos, routes, framing, answers, streams, budgets, texts, logprobs, experts, rids, refusals, aborts, controls)
arrange([theme.__name__ for theme in THEMES])
