"""A contract test for SGLang workers and mocks of them, anybody's.

`check_worker` asks a worker some hundreds of small things and compares what comes with what stock SGLang 0.5.23 does,
and the worker with itself: its unary answers with its streams, continuations with uninterrupted answers. It knows
nothing of the model behind it. `python -m dyn_testkit.contract URL` does the same to a server that runs.

The section numbers (`§4.2`) are those of the contract that was read from SGLang's source; beside them stand the files
and lines where they say it. `recorded` was seen on a live engine.
"""

from dyn_testkit.contract import checks as _checks  # fills the table
from dyn_testkit.contract.facts import Facts
from dyn_testkit.contract.report import ContractBroken, NoWorker, Outcome, Report
from dyn_testkit.contract.run import check_worker
from dyn_testkit.contract.table import CHECKS, Check
from dyn_testkit.factories import Endpoint

__all__ = [
    "CHECKS",
    "Check",
    "ContractBroken",
    "Endpoint",
    "Facts",
    "NoWorker",
    "Outcome",
    "Report",
    "check_worker",
]
del _checks
