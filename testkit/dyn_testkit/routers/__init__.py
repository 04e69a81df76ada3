"""The laws, asked of anybody's router.

`check_router` puts a router in front of mock workers that fail at every hard place of an answer, reads what its clients
and its workers saw, and says which laws hold. It asks for nothing but native `/generate` over HTTP.
`python -m dyn_testkit.routers --command '...'` does the same to a program.
"""

from dyn_testkit.factories import Endpoint
from dyn_testkit.routers.report import LawsBroken, NoRouter, Outcome, Report
from dyn_testkit.routers.run import FLEETS, check_router
from dyn_testkit.routers.table import LAWS, Law

__all__ = [
    "FLEETS",
    "LAWS",
    "Endpoint",
    "Law",
    "LawsBroken",
    "NoRouter",
    "Outcome",
    "Report",
    "check_router",
]
