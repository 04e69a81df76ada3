"""SIGTERM: the proxy drains; a second one ends it at once."""

from __future__ import annotations

import json

from dyn_testkit import laws
from dyn_testkit.laws import Case, Observed
from dyn_testkit.laws.answers import sample
from tests.process.kit import RELAY, WORKER, Call, get, post, refused, started
from tests.process.test_kill import ORACLE, body


async def test_first_one_drains():
    """K1: eight live streams finish, new connections are refused, the exit code is 0."""
    requests = [body(number, 30, stream=True) for number in range(8)]
    async with (
        started(WORKER) as worker,
        started(RELAY, "serve", "--port", 0, "--worker-urls", worker.url) as relay,
    ):
        await post(worker, "/pause_generation", {"mode": "in_place"})
        calls = [await Call.post(relay, request) for request in requests]
        while (await get(relay, "/workers"))["workers"][0]["load"] < len(calls):
            pass
        relay.process.terminate()
        await refused(relay)
        await post(worker, "/continue_generation", {})
        for request, call in zip(requests, calls, strict=True):
            seen = Observed(Case(json.dumps(request).encode()), await call.rest())
            laws.equivalence(seen, ORACLE)
        assert await relay.process.wait() == 0


async def test_second_one_ends_at_once():
    """K1: the stream is broken off so that nobody takes it for a whole one, the exit code is 1."""
    async with (
        started(WORKER, "--tick", 0.01) as worker,
        started(RELAY, "serve", "--port", 0, "--worker-urls", worker.url) as relay,
    ):
        call = await Call.post(relay, body(1, 100_000, stream=True))
        await call.read(events=2)
        relay.process.terminate()
        await refused(relay)
        relay.process.terminate()
        assert await relay.process.wait() == 1
        answer = await call.rest()
        assert not answer.complete
        assert sample(answer, streaming=True) is None
