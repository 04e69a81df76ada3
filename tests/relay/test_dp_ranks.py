"""`--dp-aware`: attempts go to data-parallel ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio

from dyn_relay.fleet.worker import State
from dyn_testkit import faults
from dyn_testkit.client import fetch
from dyn_testkit.faults import CLOSE, KILL_WORKER, STALL, FaultPlan, at_token, every, first, status
from dyn_testkit.relay import until
from dyn_testkit.worker import MockWorker, WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import World, judged, world

FOUR, TWO, ONE = (WorkerOptions(dp_size=count) for count in (4, 2, 1))
BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


def ranks(worker: MockWorker, field: str = "routed_dp_rank") -> list[Any]:
    """What its requests named, in order; "none" for nothing."""
    return [recorded.json().get(field, "none") for recorded in worker.generates]


def counts(w: World) -> list[int]:
    return [len(worker.generates) for worker in w.workers]


def loads(w: World) -> list[int]:
    return [target.load for worker in w.app.fleet.workers for target in worker.targets]


async def test_each_rank_is_a_target(autojump_clock):
    """O2 (miles PR 2012): 16 at once before one worker of four ranks and one of two: not 8 and 8, but by rank."""
    plans = [FaultPlan.of(faults.Fault(at_token(0), STALL, every)) for _ in range(2)]
    async with world(plans=plans, options=[FOUR, TWO], dp_aware=True) as w:
        async with trio.open_nursery() as clients:
            for _ in range(18):
                clients.start_soon(w.ask, generate())
            await until(lambda: counts(w) == [12, 6])
            assert Counter(ranks(w.workers[0])) == dict.fromkeys(range(4), 3)
            assert Counter(ranks(w.workers[1])) == dict.fromkeys(range(2), 3)
            listed = (await w.ask(None, "/workers", method="GET")).json()["workers"]
            assert [[(one["id"], one["dp_rank"], one["load"]) for one in row["targets"]] for row in listed] == [
                [(f"w1@{rank}", rank, 3) for rank in range(4)],
                [(f"w2@{rank}", rank, 3) for rank in range(2)],
            ]
            assert [row["load"] for row in listed] == [12, 6]
            for plan in plans:
                plan.release()
        await w.quiet()
        assert w.metric("dyn_relay_attempts_in_flight") == 0


async def test_without_the_option_nothing_is_said(autojump_clock):
    async with world(options=FOUR) as w:
        for _ in range(3):
            await w.ask(generate())
        assert ranks(w.workers[0]) + ranks(w.workers[1]) == ["none"] * 3
        listed = (await w.ask(None, "/workers", method="GET")).json()["workers"]
        assert [[one["id"] for one in row["targets"]] for row in listed] == [["w1"], ["w2"]]


@BOTH
async def test_the_rank_is_chosen_anew_after_a_death(autojump_clock, stream):
    """O2: W1 (four ranks) dies, W2 has two: the continuation names one of these, and is exact."""
    plan = FaultPlan.in_order([(at_token(3), KILL_WORKER)])
    async with world(plans=[plan, None], options=[FOUR, TWO], dp_aware=True, policy="round_robin") as w:
        body = generate(stream=stream, routed_dp_rank=3)
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        assert ranks(w.workers[0]) == [3]
        assert ranks(w.workers[1]) in ([0], [1])
        assert ranks(w.workers[1], "data_parallel_rank") == ["none"]


async def test_not_even_where_there_is_one_of_that_number(autojump_clock):
    """On another worker the number means nothing: the policy chooses."""
    plan = FaultPlan.in_order([(at_token(3), KILL_WORKER)])
    async with world(plans=[plan, None], options=FOUR, dp_aware=True, policy="round_robin") as w:
        await w.ask(generate(routed_dp_rank=3))
        assert [ranks(worker) for worker in w.workers] == [[3], [0]]
        plan.verify()


@BOTH
@pytest.mark.parametrize("field", ["routed_dp_rank", "data_parallel_rank"])
async def test_a_rank_that_is_asked_for(autojump_clock, stream, field):
    """It takes the first attempt, which is the client's own; the load is counted there."""
    plan = FaultPlan.of(faults.Fault(at_token(3), STALL, every))
    async with world(plans=[plan], options=FOUR, dp_aware=True) as w, trio.open_nursery() as clients:
        clients.start_soon(w.ask, generate(stream=stream, **{field: 2}))
        await until(lambda: counts(w) == [1])
        assert loads(w) == [0, 0, 1, 0]
        assert ranks(w.workers[0], field) == [2]
        assert ranks(w.workers[0], ({"routed_dp_rank", "data_parallel_rank"} - {field}).pop()) == ["none"]
        plan.release()


@BOTH
async def test_a_rank_that_nobody_has_is_the_engines_to_refuse(autojump_clock, stream):
    """Its own 400, word for word; and what is no rank at all."""
    async with world(options=[FOUR, TWO], dp_aware=True) as w:
        for odd in (7, -1, "1", 2.5):
            body = generate(stream=stream, routed_dp_rank=odd)
            direct = await fetch(w.network, w.workers[0].url, "/generate", body)
            through = await w.ask(body)
            assert (through.status, through.body) in {
                (direct.status, direct.body),
                (direct.status, direct.body.replace(b"[0, 4)", b"[0, 2)")),
            }
        assert [worker.state for worker in w.app.fleet.workers] == ["ready", "ready"]


async def test_a_rank_whose_worker_is_away_is_chosen_anew(autojump_clock):
    """O2: never forwarded as 3 to a worker of two, be it that nothing had been sent yet."""
    async with world(options=[FOUR, TWO], dp_aware=True) as w:
        w.workers[0].kill()
        body = generate(routed_dp_rank=3)
        response = await w.ask(body)
        assert judged(response, body, ORACLE) == []
        response = await w.ask(body)  # now it is known to be away
        assert judged(response, body, ORACLE) == []
        assert set(ranks(w.workers[1])) <= {0, 1}


async def test_a_busy_rank_is_not_its_whole_worker(autojump_clock):
    """A8: one rank's queue is full: another rank of the same worker may take it."""
    plan = FaultPlan.of(faults.Fault(faults.AT_HEAD, status(503), first(2)))
    async with world(plans=[plan], options=FOUR, dp_aware=True) as w:
        response = await w.ask(generate())
        assert judged(response, generate(), ORACLE) == []
        assert len(set(ranks(w.workers[0]))) == 3
        plan.verify()


@pytest.mark.parametrize("state", ["busy", "suspect", "unready"])
async def test_a_worker_whose_ranks_are_all_full_hides_nobody(autojump_clock, state):
    """A8: W1 is ready, and both its queues are full; W2 is no ready worker, and takes the request all the same."""
    full = FaultPlan.of(faults.Fault(faults.AT_HEAD, status(503, "0"), every))
    settings = {"policy": "round_robin", "dp_aware": True, "health_check_interval_secs": 1000}
    async with world(plans=[full, None], options=TWO, **settings) as w:
        other = w.app.fleet.workers[1]
        other.state, other.bad_probes = State(state), 2
        for target in other.targets:
            target.full_until = trio.current_time() + 60
        response = await w.ask(generate())
        assert judged(response, generate(), ORACLE) == []
        assert ranks(w.workers[0]) == [0, 1]
        assert counts(w) == [2, 1]


async def test_what_was_moved_names_a_rank_of_its_new_worker(autojump_clock):
    """O2: the worker whose rank its client had asked for is leaving, and no other one has a rank of that number."""
    options = [WorkerOptions(tick=1.0, dp_size=count) for count in (4, 2)]
    async with world(options=options, dp_aware=True) as w:
        body, answers = generate(20, routed_dp_rank=3), []

        async def client() -> None:
            answers.append(judged(await w.ask(body), body, ORACLE))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: counts(w) == [1, 0])
            await w.ask({}, "/workers/w1/drain?after=0")
        assert answers == [[]]
        assert ranks(w.workers[0]) == [3]
        assert ranks(w.workers[1]) in ([0], [1])


async def test_batches_and_other_unprotected_ones_go_to_a_rank(autojump_clock):
    """A batch is one attempt at one rank; a split one is spread."""
    body = {**generate(stream=False), "input_ids": [[1, 2], [3, 4]]}
    async with world(plans=[None], options=FOUR, dp_aware=True) as w:
        for _ in range(4):
            response = await w.ask(body)
            alone = [ORACLE.answer({**body, "input_ids": ids}) for ids in body["input_ids"]]
            assert [item["output_ids"] for item in response.json()] == [item["output_ids"] for item in alone]
        assert sorted(ranks(w.workers[0])) == [0, 1, 2, 3]
    async with world(plans=[None], options=FOUR, dp_aware=True, split_batches=True) as w:
        await w.ask(body)
        assert len(set(ranks(w.workers[0]))) == 2


async def test_an_old_release_gets_the_old_name(autojump_clock):
    options = WorkerOptions(dp_size=2, version="0.5.9")
    async with world(plans=[None], options=options, dp_aware=True) as w:
        for _ in range(2):
            await w.ask(generate(stream=False))
        assert sorted(ranks(w.workers[0], "data_parallel_rank")) == [0, 1]
        assert ranks(w.workers[0]) == ["none"] * 2


async def test_a_worker_of_one_rank_is_asked_for_none(autojump_clock):
    async with world(options=[ONE, FOUR], dp_aware=True) as w:
        for _ in range(10):
            await w.ask(generate())
        assert ranks(w.workers[0]) == ["none"] * 2
        assert Counter(ranks(w.workers[1])) == dict.fromkeys(range(4), 2)


async def test_ranks_change_with_a_restart(autojump_clock):
    """A worker that comes back with fewer ranks has fewer targets; its former ones hold nothing for ever."""
    async with world(plans=[None], options=FOUR, dp_aware=True, health_check_interval_secs=1) as w:
        await w.ask(generate())
        await w.quiet()
        worker = w.app.fleet.workers[0]
        assert [target.id for target in worker.targets] == [f"w1@{rank}" for rank in range(4)]
        lease = w.app.fleet.lease(worker.targets[3])
        with lease:
            worker.divide(2)
            assert [target.id for target in worker.targets] == ["w1@0", "w1@1"]
            assert worker.in_flight == worker.load == 1
        assert worker.in_flight == 0
        worker.divide(1)
        assert [target.id for target in worker.targets] == ["w1"]


async def test_what_is_bridged_names_no_rank(autojump_clock):
    async with world(plans=[None], options=FOUR, dp_aware=True) as w:
        assert (await w.ask(None, "/v1/models", method="GET")).status == 200
        await w.quiet()


@pytest.mark.parametrize("url", ["http://w0:30000@3", "http://user:secret@w0"])
async def test_a_rank_in_a_url_is_refused_by_name(autojump_clock, url):
    """SMG's way to write ranks."""
    async with world() as w:
        response = await w.ask({"url": url}, "/workers")
        assert response.status == 400
        assert "--dp-aware" in response.json()["message"]


async def test_a_dead_workers_streams_spread_over_ranks(autojump_clock):
    """A9, O2: 32 streams on the four ranks of W1; it dies: no rank of the others gets more than one more."""
    options = [WorkerOptions(tick=0.01, dp_size=count) for count in (4, 2, 2)]
    async with world(plans=[None] * 3, options=options, dp_aware=True) as w:
        answers = []

        async def one(number: int) -> None:
            body = generate(60, rid=f"r{number}")
            answers.append(judged(await w.ask(body), body, ORACLE))

        async with trio.open_nursery() as clients:
            for number in range(64):
                clients.start_soon(one, number)
            await until(lambda: counts(w) == [32, 16, 16])
            assert loads(w) == [8] * 8
            w.workers[0].kill()
            await until(lambda: sum(counts(w)[1:]) == 64)
            assert loads(w) == [0] * 4 + [16] * 4
        assert answers == [[]] * 64


@BOTH
async def test_a_stale_connection_is_redialled_at_the_same_rank(autojump_clock, stream):
    plan = FaultPlan.of(faults.Fault(faults.AT_HEAD, CLOSE, lambda seen: seen.index == 1))
    async with world(plans=[plan], options=FOUR, dp_aware=True, policy="round_robin") as w:
        for _ in range(2):
            response = await w.ask(generate(stream=stream))
            assert judged(response, generate(stream=stream), ORACLE) == []
        assert ranks(w.workers[0]) == [0, 1, 1]
