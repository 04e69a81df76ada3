"""Requests that kill a worker of a pair, whichever leg dies of them."""

from __future__ import annotations

import json

import pytest
import trio

from dyn_testkit import faults
from dyn_testkit.client import Response
from dyn_testkit.faults import KILL_WORKER, FaultPlan
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged
from tests.relay.pairs import pairs

#: Requests that have it go to the same decode worker.
KEY = {"x-smg-routing-key": "s"}
BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


@BOTH
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("where", [faults.AT_BOOTSTRAP, faults.AFTER_TRANSFER], ids=lambda where: where.spot.value)
async def test_poison_that_kills_workers_of_one_side(autojump_clock, stream, side, where):
    """One more worker is risked on it, then the request is refused."""
    plans = [FaultPlan.of(faults.Fault(where, KILL_WORKER)) for _ in range(4)]
    body = generate(stream=stream, logprob_start_len=0)
    async with pairs(**{side: plans}, policy="round_robin", migration_limit=9) as w:
        killed, others = (w.prefills, w.decodes) if side == "prefill" else (w.decodes, w.prefills)
        response = await w.ask(body)
        assert response.status == 502
        assert response.json()["reason"] == "suspected_poison"
        assert sum(not worker.alive for worker in killed) == 2
        assert all(worker.alive for worker in others)
        again = await w.ask(body)
        assert again.json()["reason"] == "suspected_poison"
        assert sum(not worker.alive for worker in killed) == 2
        await w.quiet()
        assert len(w.app.rooms) == 0


@BOTH
async def test_who_dies_beside_a_suspect_is_no_suspect(autojump_clock, stream):
    """Two suspects are never tried on one decode worker at a time, and none is convicted of the other's deed."""
    poison = generate(8, stream=stream, input_ids=[9, 9])

    def poisonous(seen: faults.Seen) -> bool:
        return json.loads(seen.body)["input_ids"] == [9, 9]

    plans = [FaultPlan.of(faults.Fault(faults.AFTER_TRANSFER, KILL_WORKER, poisonous)) for _ in range(5)]
    options = WorkerOptions(tick=0.05)
    config = {"policy": "round_robin", "decode_policy": "consistent_hashing", "migration_limit": 9}
    async with pairs(prefill=[None] * 6, decode=plans, options=options, **config) as w:
        answers: dict[int, list[str]] = {}
        refused: list[Response] = []

        async def client(number: int) -> None:
            body = generate(8, stream=stream, input_ids=[number, 1])
            answers[number] = judged(await w.ask(body, headers=KEY), body, ORACLE)

        async def culprit() -> None:
            refused.append(await w.ask(poison, headers=KEY))

        async with trio.open_nursery() as clients:
            for number in range(12):
                clients.start_soon(client, number)
                if number == 6:
                    clients.start_soon(culprit)
        assert answers == {number: [] for number in range(12)}
        assert refused[0].json()["reason"] == "suspected_poison"
        assert sum(not worker.alive for worker in w.decodes) == 2


@BOTH
@pytest.mark.parametrize("seed", range(4))
async def test_many_suspects_take_turns(autojump_clock, stream, seed):
    """Two workers of each side die with requests that have no token; all of these are tried alone, and none did it."""
    options = WorkerOptions(tick=0.05)
    config = {"policy": "random", "migration_limit": 9, "seed": seed}
    async with pairs(prefill=[None] * 5, decode=[None] * 5, options=options, **config) as w:
        wrong: dict[int, list[str]] = {}

        async def client(number: int) -> None:
            body = generate(4, stream=stream, input_ids=[number, 1])
            wrong[number] = judged(await w.ask(body), body, ORACLE)

        async with trio.open_nursery() as clients:
            for number in range(40):
                clients.start_soon(client, number)
            await until(lambda: all(worker.live for worker in w.workers))
            for worker in (w.prefills[0], w.decodes[0], w.prefills[1], w.decodes[1]):
                worker.kill()
        assert wrong == {number: [] for number in range(40)}
        await w.quiet()
        assert len(w.app.rooms) == 0
