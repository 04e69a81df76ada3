"""With `--split-batches`: whatever dies under whichever answer, the client gets the whole that it would have got."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from dyn_testkit import faults
from dyn_testkit.determinism import run_seeded
from dyn_testkit.faults import (
    CLOSE,
    KILL_WORKER,
    RESET,
    Fault,
    FaultPlan,
    at_token,
    inside_chunk_size,
    inside_json,
    nth,
    rid_begins,
)
from dyn_testkit.simnet import Fragmentation
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE
from tests.relay.harness import judged as judged_alone
from tests.relay.harness import world
from tests.relay.several import PROMPTS, TOKENS, judged, several

both = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
dialects = pytest.mark.parametrize("dialect", ["cumulative", "incremental"])


@both
@dialects
async def test_a_cut_of_any_item_at_any_token(autojump_clock, stream, dialect):
    """Batches of one to six: one item's connection ends at one token; the other items do not notice."""
    for size in range(1, len(PROMPTS) + 1):
        for item, k in itertools.product(range(size), range(TOKENS + 1)):
            # Each worker would cut it; the first that gets it does, once.
            [one, two] = [FaultPlan.of(Fault(at_token(k), CLOSE, rid_begins(f"job_{item}"))) for _ in range(2)]
            body = several(size, stream=stream, rid="job")
            async with world(plans=[one, two], options=WorkerOptions(dialect=dialect), split_batches=True) as w:
                response = await w.ask(body)
                assert judged(response, body, ORACLE, dialect) == [], (size, item, k)
                assert one.count() + two.count() == 1
                await w.quiet()
                attempts = [len(row["attempts"]) for row in sorted(w.rows, key=lambda row: row["index"])]
                again = 1 if k == TOKENS else 2  # the last token has its finish with it
                assert attempts == [again if at == item else 1 for at in range(size)], k


@both
@dialects
@pytest.mark.parametrize("n", [1, 2, 3])
async def test_a_worker_dies_under_all_of_its_items(autojump_clock, stream, dialect, n):
    """A kill takes half of the answers with it, each at a place of its own."""
    for nth_request, k in itertools.product(range(n), range(1, TOKENS + 1)):
        plan = FaultPlan.of(Fault(at_token(k), KILL_WORKER, nth(nth_request)))
        body = several(3, n, stream=stream)
        async with world(plans=[plan, None], options=WorkerOptions(dialect=dialect), split_batches=True) as w:
            assert judged(await w.ask(body), body, ORACLE, dialect) == [], (nth_request, k)
            plan.verify()
            await w.quiet()
            assert len(w.rows) == 3 * n


@st.composite
def misfortunes(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], list[FaultPlan]]:
    """A request for several answers, how the world is, and what happens to its attempts on each of three workers."""
    size, n = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    rid = draw(st.sampled_from([None, "job", [f"r{at}" for at in range(size)]]))
    body = several(size, n, stream=draw(st.booleans()), **({} if rid is None else {"rid": rid}))
    places = st.one_of(
        st.integers(0, TOKENS).map(at_token),
        st.builds(inside_json, st.integers(1, TOKENS), st.integers(0, 400)),
        st.builds(inside_chunk_size, st.integers(1, TOKENS)),
        st.sampled_from([faults.AT_HEAD, faults.AFTER_LAST_TOKEN, faults.AFTER_FINISH, faults.BEFORE_LAST_CHUNK]),
    )
    # An attempt each: what three workers do to one request is within its budget of three migrations.
    cuts = st.builds(Fault, places, st.sampled_from([CLOSE, RESET]), st.integers(0, 2 * size).map(nth))
    plans = [FaultPlan.of(*draw(st.lists(cuts, max_size=1))) for _ in range(3)]
    setting = {
        "options": WorkerOptions(
            dialect=draw(st.sampled_from(["cumulative", "incremental", "mixed"])),
            tick=draw(st.sampled_from([0.0, 0.02])),
            tokens_per_tick=draw(st.integers(1, 2)),
        ),
        "fragmentation": Fragmentation(largest=draw(st.sampled_from([65536, 700, 37]))),
        "policy": draw(st.sampled_from(["round_robin", "least_loaded"])),
    }
    return body, setting, plans


@settings(max_examples=400)
@given(misfortunes(), st.integers(0, 2**32))
def test_any_misfortune(case: tuple[dict[str, Any], dict[str, Any], list[FaultPlan]], seed: int) -> None:
    body, setting, plans = case

    async def main() -> None:
        async with world(plans=plans, split_batches=True, upstream_pool_idle_timeout_secs=0, **setting) as w:
            response = await w.ask(body)
            dialect = setting["options"].dialect
            assert judged(response, body, ORACLE, dialect) == []
            await w.quiet()
            answers = len(body["input_ids"]) * body["sampling_params"].get("n", 1)
            assert len(w.rows) == answers
            assert sorted(row["index"] for row in w.rows) == list(range(answers))
            assert not any(w.gauges.values()), w.gauges
            event(f"{sum(plan.count() for plan in plans)} cuts")

    run_seeded(main, seed)


async def test_the_sweep_does_cut(autojump_clock):
    """Without the split the same misfortune is a failure: the tests above are about something."""
    plan = FaultPlan.of(Fault(at_token(2), CLOSE))
    body = several(3)
    async with world(plans=[plan, None], policy="round_robin", split_batches=False) as w:
        assert judged(await w.ask(body), body, ORACLE) != []
    # And requests for one answer are served as ever where the option is on.
    async with world(
        plans=[FaultPlan.of(Fault(at_token(2), CLOSE)), None], policy="round_robin", split_batches=True
    ) as w:
        single = {**several(1), "input_ids": [5, 6, 7]}
        assert judged_alone(await w.ask(single), single, ORACLE) == []
        await w.quiet()
        assert [(row["bundle"], row["index"]) for row in w.rows] == [(None, None)]
