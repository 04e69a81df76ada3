"""All campaigns. A new one is a new row."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from dyn_chaos.actions import Drain, Drop, Kill, Replace, Stall, leader, members, port_owner
from dyn_chaos.campaigns.base import Campaign, Choices, Load, Order, When
from dyn_chaos.distribution import Distribution
from dyn_chaos.selection import RANDOM, Mode

#: The proxy notices within a second that a worker is well again.
ALERT = ("--health-check-interval-secs", "0.5", "--health-success-threshold", "1")
#: It gives a silent worker up after some seconds.
IMPATIENT = (
    *ALERT,
    *("--stall-timeout-secs", "2", "--first-token-timeout-secs", "5"),
    *("--health-check-timeout-secs", "2", "--connect-timeout-secs", "2"),
)

_ROWS = (
    Campaign(
        name="kill-sidecar",
        text="""End a sidecar in the middle of its streams; the engine behind it lives on.

        dyn-sidecar stands beside each engine, and registers it at the proxy with a lease.""",
        action=lambda choices: Kill("kill-sidecar", members, choices.signal),
        options=frozenset({"signal"}),
        relay=ALERT,
        restarts=True,
        beside="sidecar",
    ),
    Campaign(
        name="kill-engine",
        text="End all processes of an engine in the middle of its streams; the sidecar before it lives on.",
        action=lambda choices: Kill("kill-engine", members, choices.signal),
        options=frozenset({"signal"}),
        relay=ALERT,
        restarts=True,
        beside="engine",
    ),
    Campaign(
        name="stall-sidecar",
        text="SIGSTOP a sidecar in the middle of its streams, and let it go on later: its lease may lapse meanwhile.",
        action=lambda _: Stall(),
        order=Order(duration=6.0),
        relay=IMPATIENT,
        beside="sidecar",
    ),
    Campaign(
        name="stall-engine",
        text="SIGSTOP an engine behind a live sidecar, and let it go on later: what is silent there is silent here.",
        action=lambda _: Stall(),
        order=Order(duration=6.0),
        relay=IMPATIENT,
        beside="engine",
    ),
    Campaign(
        name="kill-server",
        text="""End the process that owns a worker's port, in the middle of its streams.

        The engine's other processes, such as SGLang's scheduler, live on.""",
        action=lambda choices: Kill("kill-server", port_owner, choices.signal),
        options=frozenset({"signal"}),
        relay=ALERT,
        restarts=True,
    ),
    Campaign(
        name="kill-worker",
        text="End all processes of a worker, in the middle of its streams.",
        action=lambda choices: Kill("kill-worker", members, choices.signal),
        options=frozenset({"signal"}),
        relay=ALERT,
        restarts=True,
    ),
    Campaign(
        name="stall-worker",
        text="SIGSTOP a worker, in the middle of its streams, and let it go on later: it is silent, not gone.",
        action=lambda _: Stall(),
        order=Order(duration=6.0),
        relay=IMPATIENT,
    ),
    Campaign(
        name="partition",
        text="""Lose all packets between the proxy and a worker, or with --loss some of them.

        Workers run in network namespaces, which needs root, ip and nft; without, this ends with status 3.""",
        action=lambda choices: Drop(choices.loss),
        options=frozenset({"loss"}),
        order=Order(duration=6.0),
        relay=IMPATIENT,
        isolated=True,
    ),
    Campaign(
        name="drain",
        text="""Take a worker out of the proxy while it works, and bring it back.

        What runs there ends there: nothing may move, and nothing new may come.""",
        action=lambda _: Drain(),
        order=Order(duration=3.0),
        load=Load(requests=48, clients=12, tokens=Distribution(64, 192)),
        when=When(streams=4),
        relay=ALERT,
        moves=False,
    ),
    Campaign(
        name="rolling-restart",
        text="End and start one worker after the other, each once the proxy uses the one before it again.",
        action=lambda choices: Kill("rolling-restart", leader, choices.signal, choices.grace),
        options=frozenset({"signal", "grace"}),
        choices=Choices(signal=signal.SIGTERM),
        order=Order(mode=Mode("all"), target=RANDOM, duration=0.0, rolling=True),
        load=Load(requests=32, clients=8, tokens=Distribution(64, 256)),
        when=When(streams=4),
        workers=3,
        relay=ALERT,
        lenient=True,
        restarts=True,
    ),
    Campaign(
        name="rolling-drain",
        text="""Empty, end and start one worker after the other, round after round, under clients that never rest.

        The proxy moves what a worker does before that ends: no request may fail.""",
        action=lambda choices: Replace(Kill("rolling-drain", members, choices.signal)),
        options=frozenset({"signal"}),
        order=Order(mode=Mode("all"), target=RANDOM, duration=0.0, rolling=True, every=0.0),
        load=Load(requests=None, minutes=1.0, clients=24, tokens=Distribution(64, 512)),
        when=When(streams=8),
        workers=3,
        relay=ALERT,
        restarts=True,
    ),
    Campaign(
        name="swizzle",
        text="Kill all workers but one, one by one; they come back one by one, in another order.",
        action=lambda choices: Kill("swizzle", members, choices.signal),
        options=frozenset({"signal"}),
        order=Order(mode=Mode("all-but-one"), target=RANDOM, duration=1.0, gap=0.5),
        load=Load(requests=48, clients=8, tokens=Distribution(64, 256)),
        when=When(streams=4),
        workers=4,
        relay=ALERT,
        lenient=True,
        restarts=True,
    ),
    Campaign(
        name="soak",
        text="""Kill one worker after the other for minutes, under clients that never rest.

        Each answer is checked when it ends. Whole events are kept of those with which something is wrong.""",
        action=lambda choices: Kill("soak", members, choices.signal),
        options=frozenset({"signal"}),
        order=Order(target=RANDOM, duration=0.5, every=5.0),
        load=Load(
            requests=None,
            minutes=20.0,
            clients=8,
            tokens=Distribution(16, 512, skewed=True),
            think=Distribution(0, 0.5),
        ),
        when=When(at=5.0),
        workers=3,
        relay=ALERT,
        lenient=True,
        restarts=True,
    ),
)

CAMPAIGNS: Mapping[str, Campaign] = {row.name: row for row in _ROWS}
