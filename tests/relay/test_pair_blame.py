"""One worker of a pair cannot reach the other: whoever says so, the one that is lost is blamed, and avoided."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from dyn_testkit import faults
from dyn_testkit.client import Response, fetch
from dyn_testkit.faults import STALL, FaultPlan
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged
from tests.relay.pairs import Pairs, pairs
from tests.relay.test_pair_ends import finish, live, unblamed

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
KINDS = pytest.mark.parametrize("more", [{}, {"logprob_start_len": 0}], ids=["plain", "logprobs"])


def failures(w: Pairs) -> list[int]:
    """Of the prefill workers, then of the decode ones."""
    return [worker.failures for worker in w.app.fleet.workers]


async def served(w: Pairs, body: dict[str, Any]) -> list[str | None]:
    """The body is answered exactly; what had ended its attempts."""
    assert judged(await w.ask(body), body, ORACLE) == []
    await w.quiet()
    return [one["cause"] for one in w.rows[-1]["attempts"]]


@BOTH
@KINDS
async def test_a_prefill_worker_that_decode_never_finds(autojump_clock, stream, more):
    """Its bootstrap port is wrong, say. Nobody has aborted anything, though decode says so when it gives up."""
    async with pairs(policy="round_robin") as w:
        w.network.refuse(("p1", w.prefills[0].bootstrap_port))
        assert await served(w, {**generate(8, stream=stream), **more}) == ["failed", None]
        assert failures(w) == [1, 0, 0, 0]
        assert w.rows[0]["duration"] < 20  # 15 tries, a second apart


@BOTH
@KINDS
async def test_a_prefill_worker_that_decode_has_lost(autojump_clock, stream, more):
    """It had found it before; the heartbeat tells."""
    async with pairs(prefill=(None, None), decode=(None,), policy="round_robin") as w:
        for _ in range(2):
            await served(w, generate(2, stream=stream))
        w.network.partition("d1", "p1")
        assert await served(w, {**generate(8, stream=stream), **more}) == ["failed", None]
        assert failures(w) == [1, 0, 0]


@BOTH
@KINDS
async def test_a_decode_worker_that_never_comes(autojump_clock, stream, more):
    """The prefill worker has waited for it in vain, and says so."""
    plan = FaultPlan.in_order([(faults.AT_BOOTSTRAP, STALL)])
    async with pairs(decode=[plan, None], options=WorkerOptions(bootstrap_timeout=5), policy="round_robin") as w:
        assert await served(w, {**generate(8, stream=stream), **more}) == ["failed", None]
        assert failures(w) == [0, 0, 1, 0]


@BOTH
@KINDS
async def test_what_a_trainer_aborts_in_a_handshake_is_not_rescued(autojump_clock, stream, more):
    """H5: the words of decode are the same, but the prefill worker says that it was aborted, too."""
    async with pairs() as w:
        for decode in ("d1", "d2"):
            for prefill in ("p1", "p2"):
                w.network.partition(decode, prefill)
        answers: list[Response] = []

        async def client() -> None:
            answers.append(await w.ask({**generate(40, stream=stream), **more}))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: sum(live(w)) == 2)
            await trio.sleep(3)
            for worker in w.workers:
                await fetch(w.network, worker.url, "/abort_request", {"abort_all": True})
        assert answers[0].status == 200
        assert finish(answers[0]) == "abort"
        assert sum(len(worker.generates) for worker in w.workers) == 2
        await w.quiet()
        unblamed(w)
