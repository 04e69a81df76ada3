"""A network in memory: hosts by name, links with latency and bandwidth, bytes cut anywhere, and faults on demand.

It implements `dyn_relay.net.Network`, so that a whole proxy and its workers run in one process, under
`trio.testing.MockClock(autojump_threshold=0)` in no real time:

    network = SimNetwork(seed=7, link=Link(latency=0.02, jitter=0.005))
    proxy, worker = network.host("proxy"), network.host("w1")  # each is a `Network` of its own
    network.link("proxy", "w1", Link(latency=0.2, bandwidth=1e6))
    network.partition("proxy", "w1")
    ...
    network.heal("proxy", "w1")

There are no background tasks: bytes carry the time of their arrival, and who reads sleeps until then. All that is
drawn (cuts, jitter) comes from the seed, for each direction of each connection apart: what one connection does changes
nothing in another. The rest is the program's own doing, and trio's: it runs ready tasks in an order that repeats only
in tests of Hypothesis, which seeds trio's scheduler, or where no two tasks are ready at once.

`link.py` says what a link is, `network.py` has the network and its faults, `connection.py` what one end of a connection
does, `pipe.py` how bytes travel one way, `lane.py` what all connections from one host to another share.
"""

from dyn_testkit.simnet.connection import Address, SimConnection
from dyn_testkit.simnet.events import NetEvent, Observer
from dyn_testkit.simnet.fragmentation import WHOLE, Fragmentation
from dyn_testkit.simnet.host import SimHost
from dyn_testkit.simnet.link import Link
from dyn_testkit.simnet.listener import SimListener
from dyn_testkit.simnet.network import CLIENT, SimNetwork

__all__ = [
    "CLIENT",
    "WHOLE",
    "Address",
    "Fragmentation",
    "Link",
    "NetEvent",
    "Observer",
    "SimConnection",
    "SimHost",
    "SimListener",
    "SimNetwork",
]
