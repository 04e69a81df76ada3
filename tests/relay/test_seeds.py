"""Sampling that goes on elsewhere: exact where a draw depends on (seed, position), else a valid sample, and said so."""

from __future__ import annotations

import pytest

from dyn_testkit.faults import CLOSE, FaultPlan, at_token
from dyn_testkit.oracle import fold
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world

N = 8
DIALECTS = ("cumulative", "incremental", "mixed")
SEEDED = {"temperature": 1.0, "sampling_seed": 7, "stream_interval": 1}
UNSEEDED_SAMPLING = {"temperature": 1.0, "stream_interval": 1}
both = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


async def cut_at(k, body, options, **config):
    """One cut after k tokens: the proxy's world when all is over, and the answer."""
    plan = FaultPlan.in_order([(at_token(k), CLOSE)])
    async with world(plans=[plan, None], options=options, policy="round_robin", **config) as w:
        response = await w.ask(body)
        await w.quiet()
        plan.verify()
        return w, response


@both
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("sampling", [SEEDED, UNSEEDED_SAMPLING], ids=["seeded", "unseeded"])
async def test_deterministic_engines_draw_what_was_to_come(autojump_clock, stream, dialect, sampling):
    """E12, law 1: at every cut. An unset seed is the same for everybody."""
    body = generate(N, stream=stream, sampling=sampling)
    for k in range(N + 1):
        w, response = await cut_at(k, body, WorkerOptions(dialect=dialect))
        assert judged(response, body, ORACLE, dialect) == [], k
        assert [row["resampled"] for row in w.rows] == [False], k


@both
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("sampling", [SEEDED, UNSEEDED_SAMPLING], ids=["seeded", "unseeded"])
async def test_others_give_a_valid_sample_and_it_is_said(autojump_clock, stream, dialect, sampling):
    """E12: the seed is ignored: equal in length and budget only."""
    body = generate(N, stream=stream, sampling=sampling)
    options = WorkerOptions(dialect=dialect, deterministic=False)
    other = 0
    for k in range(N + 1):
        w, response = await cut_at(k, body, options)
        assert (response.status, response.complete) == (200, True)
        answer = fold(response.values(), dialect) if stream else response.json()
        ids, meta = answer["output_ids"], answer["meta_info"]
        assert len(ids) == meta["completion_tokens"] == N
        assert meta["finish_reason"] == {"type": "length", "length": N}
        [row] = w.rows
        assert row["resampled"] is (0 < k < N), k
        for sent in [recorded.json() for recorded in w.workers[1].generates]:
            assert sent["input_ids"] == [*body["input_ids"], *ids[:k]]
            assert sent["sampling_params"]["max_new_tokens"] == N - k
        other += ids != ORACLE.answer(body)["output_ids"]
    assert other > N // 2, "an engine that ignores seeds draws by none"


@both
async def test_the_most_likely_token_is_the_same_everywhere(autojump_clock, stream):
    for sampling in ({"temperature": 0}, {"temperature": 1e-7}, {"temperature": 1.0, "top_k": 1}):
        body = generate(N, stream=stream, sampling={**sampling, "stream_interval": 1})
        w, response = await cut_at(3, body, WorkerOptions(deterministic=False))
        assert judged(response, body, ORACLE) == []
        assert [row["resampled"] for row in w.rows] == [False]


async def test_one_worker_that_does_not_say_so_is_enough(autojump_clock):
    """The first was deterministic, the second is not: what follows the cut was drawn anew."""
    body = generate(N, sampling=SEEDED)
    for kinds in ((True, False), (False, True)):
        options = [WorkerOptions(deterministic=kind) for kind in kinds]
        w, _ = await cut_at(3, body, options)
        assert [row["resampled"] for row in w.rows] == [True], kinds


async def test_what_never_went_on_is_no_resample(autojump_clock):
    """Begun again with nothing delivered, or served by one: one attempt drew all of it."""
    body = generate(N, sampling=SEEDED)
    options = WorkerOptions(deterministic=False)
    async with world(plans=[None], options=options) as w:
        await w.ask(body)
        await w.quiet()
        assert [row["resampled"] for row in w.rows] == [False]
