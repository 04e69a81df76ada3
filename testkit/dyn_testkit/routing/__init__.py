"""Routing policies, tried on a trace: how much is reused of what engines have cached, and how evenly they work.

`make` draws a trace, `replay` runs it in virtual time: the proxy's own policies before models of engines with a prefix
cache, without a socket. `python -m dyn_testkit.routing` does both and prints a table.
"""

from dyn_testkit.routing.engine import Engine, Hardware, Listener
from dyn_testkit.routing.replay import Result, replay
from dyn_testkit.routing.shapes import SHAPES, make
from dyn_testkit.routing.trace import BLOCK, Call, read, write

__all__ = ["BLOCK", "SHAPES", "Call", "Engine", "Hardware", "Listener", "Result", "make", "read", "replay", "write"]
