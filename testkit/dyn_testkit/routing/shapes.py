"""Traces, drawn: what trainers, agents and people ask for, in shapes that public traces have.

Nothing here was recorded. What matters for routing is meant to be as in life: how much of a prompt was seen before, by
whom, and when.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

from dyn_testkit.routing.trace import Call, Runs

#: Of a trainer's step.
PROMPTS, SAMPLES = 64, 8
#: Prompts that chats begin with, the n-th n times rarer than the first.
SYSTEMS = 40


class _Blocks:
    """Fresh block numbers."""

    def __init__(self) -> None:
        self._next = 0

    def run(self, length: int) -> tuple[int, int]:
        """So many, one after the other."""
        first, self._next = self._next, self._next + length
        return first, length


def _drawn(rng: random.Random, median: float, spread: float, most: int) -> int:
    """Blocks, at least one: many short ones, few long ones."""
    return max(1, min(most, round(rng.lognormvariate(0.0, spread) * median)))


#: A shape gives sessions: its calls, each of which waits for the one before it; all that begin together in one list.
Shape = Callable[[random.Random, _Blocks], Iterator[list[list[Call]]]]


def _steps(rng: random.Random, blocks: _Blocks) -> Iterator[list[list[Call]]]:
    """A trainer: 64 prompts of a step, 8 samples of each, all at once; one instruction before them all."""
    instruction = blocks.run(4)
    while True:
        step = []
        for _ in range(PROMPTS):
            prompt = (instruction, blocks.run(_drawn(rng, 24, 0.8, 200)))
            step += [[Call(0.0, prompt, (blocks.run(_drawn(rng, 16, 0.9, 250)),))] for _ in range(SAMPLES)]
        yield step


def _agents(rng: random.Random, blocks: _Blocks) -> Iterator[list[list[Call]]]:
    """An agent: some tens of turns, each with all before it and what its tools have said, some seconds later."""
    tools = blocks.run(48)
    for number in count():
        seen: Runs = (tools, blocks.run(_drawn(rng, 16, 0.6, 100)))
        turns = []
        for turn in range(rng.randint(4, 24)):
            answer = blocks.run(_drawn(rng, 5, 0.8, 60))
            pause = 0.0 if turn == 0 else rng.expovariate(1 / 8)
            turns.append(Call(pause, seen, (answer,), f"agent-{number}"))
            seen = (*seen, answer, blocks.run(_drawn(rng, 6, 1.0, 120)))
        yield [turns]


def _chats(rng: random.Random, blocks: _Blocks) -> Iterator[list[list[Call]]]:
    """People: a system prompt, some very common; a few turns, a minute apart."""
    systems = [blocks.run(rng.randint(8, 60)) for _ in range(SYSTEMS)]
    weights = [1 / rank for rank in range(1, SYSTEMS + 1)]
    for number in count():
        seen: Runs = (rng.choices(systems, weights)[0], blocks.run(_drawn(rng, 2, 0.8, 40)))
        turns = []
        for turn in range(rng.randint(1, 5)):
            answer = blocks.run(_drawn(rng, 6, 0.7, 40))
            pause = 0.0 if turn == 0 else rng.expovariate(1 / 40)
            turns.append(Call(pause, seen, (answer,), f"chat-{number}"))
            seen = (*seen, answer, blocks.run(_drawn(rng, 2, 0.8, 40)))
        yield [turns]


SHAPES: dict[str, Shape] = {"rl": _steps, "agents": _agents, "chat": _chats}
#: Of the requests of a mix.
SHARES = {"rl": 0.4, "agents": 0.35, "chat": 0.25}


def make(requests: int, rate: float, seed: int, shape: str = "mix") -> list[Call]:
    """At least so many requests, about `rate` a second as long as none has to wait for the one before it.

    `shape`: one of `SHAPES`, or "mix".
    """
    blocks = _Blocks()
    calls: list[Call] = []
    for name, share in (SHARES if shape == "mix" else {shape: 1.0}).items():
        rng = random.Random(f"{seed} {name}")
        now, made = 0.0, 0
        for sessions in SHAPES[name](rng, blocks):
            for session in sessions:
                first = len(calls)
                calls += [
                    replace(call, at=round(now if turn == 0 else call.at, 3), after=first + turn - 1 if turn else None)
                    for turn, call in enumerate(session)
                ]
            born = sum(map(len, sessions))
            made += born
            if made >= requests * share:
                break
            now += born / (rate * share) if name == "rl" else rng.expovariate(rate * share / born)
    return calls
