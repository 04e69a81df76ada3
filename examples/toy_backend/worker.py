"""A mock worker: the testkit's engine behind a wire of its own.

`{"prompt": [5, 6], "n": 4, "by": 2}` gives the lines `{"t": [..]}`, each of `by` tokens, and `{"end": "length"}`; or
"stop", after an EOS token.
"""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import trio

from dyn_relay.net import Connection, ConnectionBroken, Listener
from dyn_testkit import faults
from dyn_testkit.engine import Model, Sampling, generate
from dyn_testkit.faults import Kind, Where
from dyn_testkit.laws import Attempt, Case
from dyn_testkit.worker.wire import LAST_CHUNK, chunk, read_request

MODEL = Model(vocab_size=40, eos_rate=0.03)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"


class Cut(Exception):
    """The fault of this attempt has happened."""


async def serve(listener: Listener, case: Case, attempts: list[Attempt]) -> None:
    """Serve until cancelled, fail as the case says, and note what was got and sent."""
    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(_serve, await listener.accept(), case, attempts)


async def _serve(connection: Connection, case: Case, attempts: list[Attempt]) -> None:
    got = await read_request(connection, b"")
    assert got is not None
    attempt = Attempt(got[0].body, fault=case.fault(len(attempts)))
    attempts.append(attempt)
    try:
        await _answer(connection, attempt)
    except (Cut, ConnectionBroken):
        pass
    connection.close()


async def _answer(connection: Connection, attempt: Attempt) -> None:
    async def send(data: bytes) -> None:
        attempt.wire += data
        await connection.send(data)

    def reach(where: Where) -> None:
        if attempt.fault is not None and attempt.fault[0] == where:
            attempt.fired = True
            if attempt.fault[1].kind is Kind.RESET:
                connection.abort()
            raise Cut

    reach(faults.AT_HEAD)
    await send(HEAD)
    asked, line = attempt.sent, list[int]()
    finish = "length"
    steps = generate(MODEL, asked["prompt"], Sampling(max_new_tokens=asked["n"], temperature=0))
    for number, step in zip(count(1), steps, strict=False):
        line.append(step.token)
        finish = step.finish["type"] if step.finish else finish
        cut_here = attempt.fault is not None and attempt.fault[0] == faults.at_token(number)
        if len(line) == asked["by"] or step.finish or cut_here:
            await send(chunk(spell({"t": line})))
            line = []
        reach(faults.at_token(number))
    reach(faults.AFTER_LAST_TOKEN)
    await send(chunk(spell({"end": finish})))
    reach(faults.AFTER_FINISH)
    await send(LAST_CHUNK)


def spell(value: dict[str, Any]) -> bytes:
    """One line."""
    return json.dumps(value).encode() + b"\n"
