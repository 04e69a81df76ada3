"""KV events of stock engines, followed through a gap, a kill and a restart, and requests that go where their prefix is.

The proxy runs in this process: what it knows is looked at, and batches are lost on its side of the wire.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import trio
from lab import Lab, flush

from dyn_chaos.engines import StockServer
from dyn_chaos.processes import free_port
from dyn_chaos.report import Outcome
from dyn_relay.fleet.kv.index import RankId
from dyn_relay.fleet.kv.sockets import Socket
from dyn_relay.fleet.policies.kv_aware import KvAware
from dyn_relay.fleet.worker import Role
from dyn_relay.sockets import open_network
from dyn_testkit.client import fetch
from dyn_testkit.relay import Relay, open_relay, until

PAGE = 16
A, B = RankId("w1"), RankId("w2")
#: Seconds; an engine needs 20 to 40 to start.
PATIENCE = 120.0


@dataclass
class Engine:
    """A stock engine that publishes; it comes back at the same ports."""

    lab: Lab
    #: Batches that it keeps for a replay.
    kept: int
    server: StockServer | None = None

    def __post_init__(self) -> None:
        self.port, self.events, self.replays = free_port(), free_port(), free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        config = {
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replays}",
            "buffer_steps": self.kept,
        }
        flags = (*self.lab.stock.flags, "--page-size", str(PAGE), "--kv-events-config", json.dumps(config))
        self.server = await replace(self.lab.stock, flags=flags).start(self.lab.nursery, self.port, self.lab.logs)

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.stop()


class Loss:
    """Loses the next batches that subscriptions bring from a worker's port."""

    def __init__(self) -> None:
        self.left = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        whole = Socket.receive

        async def receive(socket: Socket) -> list[bytes]:
            frames = await whole(socket)
            while self.left and len(frames) == 3:  # replays have four
                self.left -= 1
                frames = await whole(socket)
            return frames

        Socket.receive = receive  # type: ignore[method-assign]
        try:
            yield
        finally:
            Socket.receive = whole  # type: ignore[method-assign]


class Following:
    """A proxy, and what it knows."""

    def __init__(self, relay: Relay, outcome: Outcome) -> None:
        policy = relay.app.fleet.policies[Role.REGULAR]
        assert isinstance(policy, KvAware)
        self.relay, self.policy, self.outcome = relay, policy, outcome

    def known(self, tokens: Sequence[int]) -> dict[RankId, int]:
        index = self.policy.index
        return {rank: sum(blocks) for rank, blocks in index.match(index.chain(tokens, PAGE)).items()}

    def count(self, what: str) -> int:
        return self.policy.counts().get(what, 0)

    async def routed(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Send a request to the proxy: who has answered it, and how many tokens that one had cached."""
        before = len(self.relay.rows)
        _, cached = await ask(self.relay.url, tokens)
        await until(lambda: len(self.relay.rows) > before)
        [attempt] = self.relay.rows[before]["attempts"]
        return attempt["worker"], cached

    async def follows(self, subscriptions: int) -> None:
        with trio.fail_after(PATIENCE):
            await until(lambda: self.policy.sizes()["subscriptions"] == subscriptions)

    async def expect(self, what: str, tokens: Sequence[int], want: dict[RankId, int]) -> None:
        """A finding if this does not become known in time."""
        with trio.move_on_after(30):
            await until(lambda: self.known(tokens) == want)
        self.outcome.expect(self.known(tokens) == want, what, f"{self.known(tokens)} are known, not {want}")


def prompt(seed: int, pages: int = 8) -> list[int]:
    return Random(seed).choices(range(10, 1000), k=pages * PAGE + 3)


async def ask(url: str, tokens: Sequence[int], new: int = 30) -> tuple[list[int], int]:
    """A whole answer, of an engine or the proxy: all tokens whose cache was computed, and how many had been cached."""
    sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    async with open_network() as network:
        reply = await fetch(network, url, "/generate", {"input_ids": list(tokens), "sampling_params": sampling})
    answer: dict[str, Any] = reply.json()
    return [*tokens, *answer["output_ids"][:-1]], answer["meta_info"]["cached_tokens"]


async def follow(engines: Sequence[Engine], outcome: Outcome, lost: Loss) -> None:
    """Everything but a restart that nobody sees."""
    a, b = engines
    async with open_network() as network:
        probes: dict[str, Any] = {"health_check_interval_secs": 1.0, "health_failure_threshold": 2}
        urls = [engine.url for engine in engines]
        async with open_relay(network, workers=urls, policy="kv_aware", log_level="error", **probes) as relay:
            await relay.ready()
            w = Following(relay, outcome)
            await w.follows(2)

            shared = prompt(1)
            whole, had = await ask(a.url, shared)
            pages = len(whole) // PAGE
            await w.expect("events", whole, {A: pages})
            outcome.facts["pages of the first answer"] = f"{pages} of {len(whole)} tokens, {had} cached before"
            second = [*whole, *prompt(2, pages=1)]
            chosen, here = await w.routed(second)
            outcome.expect(chosen == "w1", "prefix", f"the second request went to {chosen}")
            _, there = await ask(b.url, second)
            outcome.facts["cached of the second request"] = f"{here} at its worker, {there} at the other one"
            outcome.expect(here == pages * PAGE and not there, "prefix", f"{here} and {there} tokens were cached")
            await w.expect("events", second[: len(whole)], {A: pages, B: pages})

            await ask(a.url, prompt(3), new=1)  # events come live from here on
            await w.expect("events", prompt(3), {A: 8})
            lost.left = 1
            for seed in (4, 5):
                await ask(a.url, prompt(seed), new=1)
            for seed in (4, 5):
                await w.expect("gap", prompt(seed), {A: 8})
            outcome.facts["gaps filled by a replay"] = w.count("gap")
            outcome.expect(w.count("gap") == 1 and not w.count("lost"), "gap", str(dict(w.policy.counts())))

            await ask(b.url, prompt(6), new=1)
            await w.expect("events", prompt(6), {B: 8})
            lost.left = 4
            for seed in (7, 8, 9, 10, 11):
                await ask(b.url, prompt(seed), new=1)
            await w.expect("lost", prompt(11), {B: 8})
            await w.expect("lost", prompt(6), {})
            await w.expect("lost", prompt(4), {A: 8})
            outcome.facts["gaps that nothing filled"] = w.count("lost")
            outcome.expect(w.count("lost") == 1, "lost", str(dict(w.policy.counts())))

            await flush(a.url)
            await w.expect("flush", prompt(4), {})
            await w.expect("flush", prompt(11), {B: 8})

            await b.stop()
            await w.follows(1)
            await w.expect("kill", prompt(11), {})
            await b.start()
            await relay.ready()
            await w.follows(2)
            await ask(b.url, prompt(12), new=1)
            await w.expect("kill", prompt(12), {B: 8})
            await w.expect("kill", prompt(11), {})
            went = await w.routed(prompt(12))
            outcome.expect(went == ("w2", 8 * PAGE), "kill", f"worker and cached tokens: {went}")
            unread = {
                what: w.count(what) for what in ("malformed", "unknown", "orphan", "foreign", "medium", "garbage")
            }
            outcome.facts["events"] = f"{w.count('batch')} batches, {unread}"
            outcome.expect(not unread["malformed"] and not unread["unknown"], "events", str(unread))


async def restart_unseen(b: Engine, outcome: Outcome) -> None:
    """No probe looks while the engine is another process; its events tell."""
    async with (
        open_network() as network,
        open_relay(
            network, workers=[b.url], policy="kv_aware", log_level="error", health_check_interval_secs=3600.0
        ) as relay,
    ):
        await relay.ready()
        w = Following(relay, outcome)
        await w.follows(1)
        await w.expect("cold start", prompt(12), {A: 8})
        await b.stop()
        await b.start()
        for seed in (20, 21):
            await ask(b.url, prompt(seed), new=1)
            await w.expect("restart", prompt(seed), {A: 8})
        await w.expect("restart", prompt(12), {})
        outcome.facts["restarts seen by events"] = w.count("restarted")
        outcome.expect(w.count("restarted") == 1, "restart", str(dict(w.policy.counts())))


async def kv_events(lab: Lab, outcome: Outcome) -> None:
    """Two engines with KV events: a second request finds its prefix; gaps, a flush, a kill, a restart."""
    await lab.engines("")  # memory for these two
    engines = [Engine(lab, kept=10_000), Engine(lab, kept=2)]
    lost = Loss()
    try:
        for engine in engines:
            await engine.start()
        with lost.installed():
            await follow(engines, outcome, lost)
            await restart_unseen(engines[1], outcome)
    finally:
        with trio.CancelScope(shield=True):
            for engine in engines:
                if engine.server is not None:
                    await engine.stop()
