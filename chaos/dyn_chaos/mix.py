"""Requests as training frameworks send them, drawn by a seed, and what an undisturbed engine says to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import msgspec

from dyn_chaos.campaigns.base import Load
from dyn_chaos.load import Plan
from dyn_testkit.history import Record, Reference
from dyn_testkit.oracle import Oracle
from dyn_testkit.users import USERS, Wish

#: Those that send what every engine accepts and a router can continue.
SENDERS = tuple(name for name in USERS if name not in ("stopping", "penalized", "mistaken"))
#: Of them: those that can ask for a stream.
STREAMING = ("slime", "slime_agent", "miles", "greedy")
#: Prompts begin with numbers of their own, so that none is the beginning of another one.
NUMBERED = 3
#: The fewest ids that a prompt may have.
SHORTEST = NUMBERED + 1
VOCABULARY = 1024


def draw(load: Load, seed: int) -> Iterator[Plan]:
    """Requests without end. Of the first `load.requests`, exactly `load.streams` are streams, in random places."""
    random = Random(f"mix/{seed}")
    block = load.requests or 100
    users = load.users or SENDERS
    number = 0
    while True:
        streams = [place < round(block * load.sse) for place in range(block)]
        random.shuffle(streams)
        for stream in streams:
            yield _plan(load, seed, number, stream, [name for name in users if not stream or name in STREAMING], random)
            number += 1


def _plan(load: Load, seed: int, number: int, stream: bool, users: list[str], random: Random) -> Plan:
    key = f"{number:06d}-{'sse' if stream else 'unary'}"
    numbers = [number // VOCABULARY**2, number // VOCABULARY % VOCABULARY, number % VOCABULARY]
    rest = load.prompt.whole(random) - NUMBERED
    wish = Wish(
        prompt=[*numbers, *(random.randrange(3, VOCABULARY) for _ in range(rest))],
        tokens=load.tokens.whole(random),
        rid=f"chaos-{seed}-{key}",
        stream=stream,
        vocabulary=VOCABULARY,
    )
    return Plan(key, USERS[random.choice(users)](wish, random))


def repeatable(plan: Plan) -> Plan:
    """The same request at temperature 0: an engine says the same to it each time."""
    sampling = {name: value for name, value in plan.body["sampling_params"].items() if name != "sampling_seed"}
    return Plan(plan.key, {**plan.body, "sampling_params": {**sampling, "temperature": 0}})


def again(pool: list[Plan]) -> Iterator[Plan]:
    """The requests of a pool in turn, without end, each time under another key and another rid."""
    turn = 0
    while True:
        for plan in pool:
            body: dict[str, Any] = dict(plan.body)
            if "rid" in body:
                body["rid"] = f"{turn}-{body['rid']}"  # engines abort by prefix
            yield Plan(f"{turn}-{plan.key}", body)
        turn += 1


def of_oracle(oracle: Oracle, plan: Plan) -> Reference:
    """What the engine model says, whole."""
    body = {name: value for name, value in plan.body.items() if value is not None}
    text = msgspec.json.encode(oracle.answer(body)).decode()
    return Reference(plan.key, {**plan.body, "stream": False}, 200, text=text)


def of_pool(asked: Mapping[str, Record], plan: Plan) -> Reference:
    """What an engine said to the request of a pool that `again` made this one of."""
    record = asked[plan.key.partition("-")[2]]
    return Reference.of(msgspec.structs.replace(record, key=plan.key))
