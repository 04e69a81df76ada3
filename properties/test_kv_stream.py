"""What is known of an engine's cache is what is in it, whatever happens to its events on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import trio
import trio.testing
from hypothesis import strategies as st

from dyn_relay.fleet.kv.events import read_batch
from dyn_relay.fleet.kv.index import PrefixIndex, RankId
from dyn_relay.fleet.kv.subscriber import QUIET, Follower, Source, Subscriber
from dyn_testkit.worker.kv_cache import KvOptions
from dyn_testkit.worker.kv_log import KvFaults, KvLog
from properties.prove import for_all

TOKENS, DEPTH, CAPACITY = 2, 4, 6
ID, END = RankId("w1"), (2**64 - 1).to_bytes(8)
TOPIC = KvOptions().topic.encode()

paths = st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=DEPTH)
#: What happens to the batch of a step: it arrives, is only kept for a replay, or is lost for good.
fates = st.sampled_from(["sent", "sent", "sent", "skipped", "lost"])
#: A step of the engine: what it caches, None for a flush, a number for pages that others displace; then the fate.
changes = st.tuples(paths | st.none() | st.integers(1, 3), fates)
#: Between the steps: the engine's process is another one; everything waits until nothing moves; a long silence.
steps = st.lists(changes | st.sampled_from(["restart", "settle", "silence"]), max_size=30)


class Wire:
    """One end of a queue in memory."""

    def __init__(self, receive: Callable[[], object], send: Callable[[list[bytes]], None]) -> None:
        self.receive = receive
        self.send = send


class Line:
    """An engine's publisher, and the wires to it."""

    def __init__(self, first: int, coalesce: bool, arrays: bool) -> None:
        options = KvOptions(page_size=1, capacity=CAPACITY, first=first, coalesce=coalesce, arrays=arrays)
        self.log = KvLog(0, options, KvFaults())
        self.lost = False
        self._live, self._incoming = trio.open_memory_channel[list[bytes]](10_000)
        self.log.listeners.append(lambda number, load: self._live.send_nowait([TOPIC, number.to_bytes(8), load]))

    @contextmanager
    def subscribe(self) -> Iterator[Wire]:
        yield Wire(self._incoming.receive, lambda frames: None)

    @contextmanager
    def ask(self) -> Iterator[Wire]:
        out, into = trio.open_memory_channel[list[bytes]](10_000)

        def answer(frames: list[bytes]) -> None:
            for number, load in self.log.kept:
                if number >= int.from_bytes(frames[1]):
                    out.send_nowait([b"", TOPIC, number.to_bytes(8), load])
            out.send_nowait([b"", b"", END, b""])

        yield Wire(into.receive, answer)

    def step(self, change: list[int] | int | None, fate: str) -> None:
        log, before = self.log, self.log.next
        if fate != "sent":
            (log.faults.skip if fate == "skipped" else log.faults.lose).add(before)
        if change is None:
            log.cache.clear()
        elif isinstance(change, int):
            log.cache.evict(change)
        else:
            log.cache.insert(change)
        self.lost = self.lost or (fate == "lost" and log.next > before)
        log.faults.skip.clear()
        log.faults.lose.clear()

    def restart(self) -> None:
        self.log.begin_anew()
        self.lost = False
        self._live.send_nowait([])


async def follow(line: Line, happens: list[object]) -> PrefixIndex:
    index = PrefixIndex(1000, random.Random(1))
    rank = index.join(ID)
    follower = Follower(
        lambda load: index.apply(rank, read_batch(load, lambda what: None)),
        lambda: index.clear(rank),
        lambda: None,
        lambda what: None,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Subscriber(Source(line.subscribe, line.ask, TOPIC), follower).run)
        for step in happens:
            if step == "restart":
                line.restart()
                await trio.sleep(0.001)  # no two processes write at the same instant
            elif step == "settle":
                await trio.testing.wait_all_tasks_blocked()
            elif step == "silence":
                await trio.sleep(2 * QUIET)
            else:
                line.step(*step)  # type: ignore[misc]
        line.step([TOKENS], "sent")  # nothing tells that a batch was lost for good but a later one
        await trio.sleep(2 * QUIET)
        nursery.cancel_scope.cancel()
    return index


def check(happens: list[object], how: tuple[int, bool, bool]) -> None:
    async def run() -> None:
        line = Line(*how)
        index = await follow(line, happens)
        for depth in range(1, DEPTH + 1):
            for path in product(range(TOKENS), repeat=depth):
                known = sum(index.match(index.chain(path, 1)).get(ID, []))
                has = line.log.cache.match(path)
                assert known <= has, f"{path}: {known} of {has} are there"
                assert known == has or line.lost, f"{path}: {known} of {has} are known"

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def test_what_is_known_is_what_is_there():
    """O4: gaps with and without a replay, restarts, replays beside live batches, sequences from 0 and 1."""
    for_all(check, steps, st.tuples(st.integers(0, 1), st.booleans(), st.booleans()))
