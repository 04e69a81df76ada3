"""`--decode-fallback`: whole requests for workers that were named for decode, where no pair can be made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
import structlog
import trio

from dyn_testkit.client import Response
from dyn_testkit.faults import STALL, FaultPlan, at_token
from dyn_testkit.fleet import open_fleet
from dyn_testkit.relay import Relay, open_relay
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged
from tests.relay.pairs import pairs

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
AGGREGATED = b"x-dyn-relay-aggregated"


class Fallback(NamedTuple):
    relay: Relay
    prefills: list[MockWorker]
    decodes: list[MockWorker]
    spares: list[MockWorker]


@pytest.fixture
def said() -> Iterator[Callable[[str], int]]:
    """How many lines of the log have these words."""
    with structlog.testing.capture_logs() as lines:
        yield lambda words: sum(words in line["event"] for line in lines)


async def ask(relay: Any, stream: bool) -> Response:
    body = generate(8, stream=stream, logprob_start_len=0, sampling={"stream_interval": 1})
    response: Response = await relay.ask(body)
    assert judged(response, body, ORACLE) == []
    return response


@BOTH
async def test_decode_fallback(autojump_clock, stream):
    """While no prefill worker is left whole requests go to a worker that says it is regular; then no more."""
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet:
        [prefill] = await fleet(1, options=WorkerOptions(disaggregation="prefill"))
        [decode] = await fleet(1, options=WorkerOptions(disaggregation="decode"))
        [spare] = await fleet(1)
        settings: dict[str, Any] = {"prefill": (prefill.url,), "decode": (decode.url, spare.url), "seed": 1}
        settings |= {"pd_disaggregation": True, "decode_fallback": True, "log_level": "error"}
        async with open_relay(network, "proxy", 30000, (), **settings) as relay:
            await relay.ready()
            for _ in range(4):
                assert AGGREGATED not in dict((await ask(relay, stream)).headers)
            assert spare.generates == []
            assert not relay.app.fleet.workers[2].misplaced

            prefill.kill()
            response = await ask(relay, stream)  # before any probe has seen it
            assert dict(response.headers)[AGGREGATED] == b"yes"
            assert "bootstrap_room" not in spare.generates[0].json()
            await trio.sleep(60)
            for _ in range(3):
                await ask(relay, stream)
            assert len(spare.generates) == 4
            await relay.quiet()
            assert [row["attempts"][-1]["aggregated"] for row in relay.rows] == [False] * 4 + [True] * 4
            assert relay.metric("dyn_relay_aggregated_attempts_total") == 4

            await prefill.restart()
            await relay.ready()
            assert AGGREGATED not in dict((await ask(relay, stream)).headers)
            assert len(spare.generates) == 4
            await relay.quiet()
            assert len(relay.app.rooms) == 0


@BOTH
@pytest.mark.parametrize("token", [1, 4])
async def test_an_answer_that_falls_back_in_its_midst(autojump_clock, stream, token):
    """Both workers of the only pair die: the rest is made by one that does all, and is exact."""
    network = SimNetwork(1)
    plan = FaultPlan.in_order([(at_token(token), STALL)])
    async with open_fleet(network, "w{}", 30000) as fleet:
        [prefill] = await fleet(1, options=WorkerOptions(disaggregation="prefill"))
        [decode] = await fleet(1, options=WorkerOptions(disaggregation="decode"), faults=[plan])
        [spare] = await fleet(1)
        settings: dict[str, Any] = {"prefill": (prefill.url,), "decode": (decode.url, spare.url), "seed": 1}
        settings |= {"pd_disaggregation": True, "decode_fallback": True, "log_level": "error"}
        async with open_relay(network, "proxy", 30000, (), **settings) as relay:
            await relay.ready()

            async def deaths() -> None:
                await plan.fired()
                prefill.kill()
                decode.kill()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(deaths)
                await ask(relay, stream)
            # The last token may not have come to the proxy, or may have waited there for the prefill worker's answer.
            assert len(spare.generates[0].json()["input_ids"]) in (3, 3 + token)


async def test_without_the_option_such_a_worker_is_misplaced(autojump_clock):
    """And there is no answer without a prefill worker."""
    async with pairs(prefill=[None], decode=[None, None]) as w:
        w.decodes[1].kill()
        await trio.sleep(60)
        await w.decodes[1].restart(WorkerOptions())
        await w.ready()
        w.prefills[0].kill()
        await trio.sleep(60)
        response = await w.ask(generate(stream=False))
        assert response.status == 503
        [spare] = [worker for worker in w.app.fleet.workers if worker.url == w.decodes[1].url]
        assert spare.misplaced
        assert w.decodes[1].generates == []


@asynccontextmanager
async def fallback(prefills: int = 1, decodes: int = 1, spares: int = 1) -> AsyncIterator[Fallback]:
    """A proxy with the option before workers of each kind; `spares` say that they are regular."""
    network = SimNetwork(1)
    async with open_fleet(network, "w{}", 30000) as fleet:
        made = [
            await fleet(count, options=WorkerOptions(disaggregation=role)) if count else []
            for count, role in ((prefills, "prefill"), (decodes, "decode"), (spares, "null"))
        ]
        named = [worker.url for worker in (*made[1], *made[2])]
        settings: dict[str, Any] = {
            "prefill": tuple(worker.url for worker in made[0]),
            "decode": tuple(named),
            "seed": 1,
        }
        settings |= {"pd_disaggregation": True, "decode_fallback": True, "log_level": "error"}
        async with open_relay(network, "proxy", 30000, (), **settings) as relay:
            await relay.ready()
            yield Fallback(relay, *made)


@BOTH
async def test_no_decode_worker_is_left(autojump_clock, stream):
    """Whoever does all is asked then, too, though there are prefill workers; the fleet is ready for requests."""
    async with fallback() as f:
        f.decodes[0].kill()
        assert dict((await ask(f.relay, stream)).headers)[AGGREGATED] == b"yes"
        await trio.sleep(60)
        assert dict((await ask(f.relay, stream)).headers)[AGGREGATED] == b"yes"
        assert (await f.relay.ask(None, "/readiness", method="GET")).status == 200
        await f.decodes[0].restart()
        await f.relay.ready()
        assert AGGREGATED not in dict((await ask(f.relay, stream)).headers)


@BOTH
async def test_a_prefill_worker_that_was_dead_is_asked_when_nobody_else_is_there(autojump_clock, stream):
    """As without the option: before a probe has seen that it is back."""
    async with fallback(spares=0) as f:
        f.prefills[0].kill()
        await trio.sleep(60)
        assert (await f.relay.ask(generate(stream=stream))).status == 503
        await f.prefills[0].restart()
        await ask(f.relay, stream)


@BOTH
async def test_it_is_said_once(autojump_clock, stream, said):
    """Not at each request that tries the dead worker first."""
    async with fallback() as f:
        f.prefills[0].kill()
        for _ in range(3):
            await ask(f.relay, stream)
        assert said("no pair can be made") == 1
        assert said("has answered: requests go to pairs again") == 0
        await f.prefills[0].restart()
        await f.relay.ready()
        for _ in range(2):
            await ask(f.relay, stream)
        assert said("no pair can be made") == 1
        assert said("has answered: requests go to pairs again") == 1


async def test_what_is_bridged_goes_to_whoever_is_there(autojump_clock):
    async with fallback() as f:
        f.decodes[0].kill()
        await trio.sleep(60)
        assert (await f.relay.ask(None, "/get_model_info", method="GET")).status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_what_else_generates_is_refused(autojump_clock, path):
    """A decode worker would wait for the other half of the request until its timeout."""
    async with pairs() as w:
        response = await w.ask({"prompt": "x"}, path)
        assert (response.status, response.json()["code"]) == (501, 501)
        assert "/generate" in response.json()["message"]
        assert [worker.requests[-1].path for worker in w.workers if worker.requests[-1].path == path] == []
        assert response.header("x-dyn-relay-migratable") == "no; reason=path"
