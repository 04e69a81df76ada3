"""What a campaign is: a row of a table. What happens to whom, when, for how long, and what it must have shown."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dyn_chaos.actions import Action
from dyn_chaos.distribution import Distribution
from dyn_chaos.selection import BUSIEST, Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a row's action can be told."""

    signal: signal.Signals = signal.SIGKILL
    #: Seconds until what minds no signal is killed.
    grace: float = 30.0
    #: Of packets, in (0, 1].
    loss: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """When the first strike comes: by what clients have seen, or by the clock."""

    #: So many streams have `tokens` tokens each; None: all of them.
    streams: int | None = None
    tokens: int = 1
    #: Seconds since the load began; None: streams are counted.
    at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How those that are chosen are struck."""

    mode: Mode = field(default_factory=lambda: Mode("one"))
    target: str = BUSIEST
    #: Seconds until it is undone; None: never.
    duration: float | None = None
    #: Seconds between two of them; they are undone in another order.
    gap: float = 0.0
    #: Each is undone before the next one is struck.
    rolling: bool = False
    #: Seconds from one round to the next, until the load ends; None: one round.
    every: float | None = None


_TOKENS, _PROMPT, _AT_ONCE = Distribution(256, 256), Distribution(8, 32), Distribution(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What clients send."""

    #: Requests; None: as many as the clients send in `minutes`.
    requests: int | None = 16
    minutes: float = 0.0
    #: Clients, each with one request at a time; None: as many as requests.
    clients: int | None = None
    tokens: Distribution = _TOKENS
    prompt: Distribution = _PROMPT
    #: Seconds that a client waits before its next request.
    think: Distribution = _AT_ONCE
    #: The share of streams.
    sse: float = 0.5
    #: Of `dyn_testkit.users`.
    users: tuple[str, ...] = ()

    @property
    def streams(self) -> int:
        """How many of the requests are streams."""
        return round((self.requests or 0) * self.sse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """One row."""

    name: str
    #: The command's help.
    text: str
    action: Callable[[Choices], Action]
    #: The options of `Choices` that it looks at.
    options: frozenset[str] = frozenset()
    choices: Choices = Choices()
    when: When = When()
    order: Order = Order()
    load: Load = Load()
    workers: int = 2
    #: Flags of the proxy.
    relay: tuple[str, ...] = ()
    #: Whether something must have moved (True), must not have (False), or either (None).
    moves: bool | None = True
    #: A request that the faults explain may fail loudly.
    lenient: bool = False
    #: A sidecar stands beside each engine, and this one of the two is struck; "": there is none.
    beside: Literal["", "sidecar", "engine"] = ""
    #: Workers must run in network namespaces.
    isolated: bool = False
    #: Undoing starts processes again.
    restarts: bool = False
