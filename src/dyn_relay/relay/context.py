"""What every logical request works with: one value, made by the application."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from dyn_relay.config import Config
from dyn_relay.fleet.registry import Fleet
from dyn_relay.formats.base import Format
from dyn_relay.http11.client import Pool
from dyn_relay.net import Network
from dyn_relay.observe.metrics import Metrics
from dyn_relay.observe.trace import TraceFile
from dyn_relay.relay.chores import Chores
from dyn_relay.relay.fallback import Fallback
from dyn_relay.relay.live import LiveRequests
from dyn_relay.relay.orders import LastOrders
from dyn_relay.relay.queue import Queue
from dyn_relay.relay.rooms import Rooms
from dyn_relay.relay.turnstile import Turnstile


@dataclass(frozen=True, slots=True)
class Context:
    """The proxy's parts, as the relay uses them."""

    config: Config
    network: Network
    pool: Pool
    fleet: Fleet
    format: Format
    live: LiveRequests
    metrics: Metrics
    trace: TraceFile | None
    rng: random.Random
    #: Seconds since the epoch, for trace rows; the simulator gives its own.
    wall: Callable[[], float]
    chores: Chores
    last_orders: LastOrders
    queue: Queue
    #: For continuations without a token.
    permits: Turnstile
    rooms: Rooms
    fallback: Fallback
