"""Batches and samples in one piece, as without `--split-batches`: passed through, weighed, and loud when cut."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import trio
import trio.testing

from dyn_testkit import faults
from dyn_testkit.client import fetch
from dyn_testkit.faults import CLOSE, KILL_WORKER, STALL, Fault, FaultPlan, at_token, inside_json
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import world
from tests.relay.several import TOKENS, judged, several

both = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])
dialects = pytest.mark.parametrize("dialect", ["cumulative", "incremental"])

#: What makes several answers of one request, and the reason in its header; each with every kind of rid.
SHAPES = {"batch": ({}, "batch"), "n": ({"input_ids": [5, 6, 7], "n": 2}, "n"), "both": ({"n": 2}, "batch")}
RIDS = {"batch": (None, "job", ["x", "y", "z"]), "n": (None, "job"), "both": (None, "job", ["x", "y", "z"])}
CASES = [pytest.param(shape, rid, id=f"{shape}-{rid}") for shape in SHAPES for rid in RIDS[shape]]


def shaped(shape: str, rid: object, stream: bool) -> dict[str, object]:
    extra = dict(SHAPES[shape][0])
    body = several(n=extra.pop("n", 1), stream=stream, **extra)
    return body if rid is None else {**body, "rid": rid}


@both
@dialects
@pytest.mark.parametrize(("shape", "rid"), CASES)
async def test_it_passes_through(autojump_clock, shape, rid, stream, dialect):
    """N2: the worker sees the client's own bytes, the client the worker's, and the header names the field."""
    body = json.dumps(shaped(shape, rid, stream)).encode()

    def timeless(data: bytes) -> bytes:
        return re.sub(rb'"(id|response_sent_to_client_ts|e2e_latency)":("[^"]*"|[^,}]+)', b"", data)

    options = WorkerOptions(dialect=dialect, radix_cache=False)
    async with world(options=options, policy="round_robin") as w:
        response = await w.ask(body)
        direct = await fetch(w.network, w.workers[1].url, "/generate", body)
        assert w.workers[0].generates[0].request.body == body
        assert response.header("x-dyn-relay-migratable") == f"no; reason={SHAPES[shape][1]}"
        assert response.complete
        # Which of the answers comes first is the engine's choice.
        key = sorted if stream else list
        assert key(map(timeless, response.body.split(b"\n\n"))) == key(map(timeless, direct.body.split(b"\n\n")))
        if isinstance(json.loads(body)["input_ids"][0], list):
            assert judged(response, json.loads(body), ORACLE, dialect) == []


@both
@dialects
@pytest.mark.parametrize(("shape", "rid"), CASES)
async def test_a_death_is_loud(autojump_clock, shape, rid, stream, dialect):
    """N6: its worker dies, wherever: an error, not half a list, nor a stream that looks complete; no second call."""
    body, reason = shaped(shape, rid, stream), SHAPES[shape][1]
    places = [faults.AT_HEAD, *map(at_token, range(TOKENS + 1)), *(inside_json(1, byte) for byte in (0, 1, 60, 5000))]
    places += [faults.AFTER_FINISH] if stream else []
    for where, what in itertools.product(places, (CLOSE, KILL_WORKER)):
        plans = [FaultPlan.of(Fault(where, what)) for _ in range(2)]
        async with world(plans=plans, options=WorkerOptions(dialect=dialect), policy="round_robin") as w:
            response = await w.ask(body)
            plans[0].verify()
            assert plans[1].count() == 0
            assert [len(worker.generates) for worker in w.workers] == [1, 0]
            if response.status == 200:
                assert stream, where
                assert not response.complete
                assert b"[DONE]" not in response.events()
                assert response.values()[-1]["error"]["reason"] == reason
            else:
                assert (response.status, response.json()["reason"]) == (502, reason), where
                assert response.json()["object"] == "error"
            await w.quiet()
            assert [worker.load for worker in w.app.fleet.workers] == [0, 0]


@both
@pytest.mark.parametrize(
    ("body", "weight"),
    [
        (several(6, 2), 12),
        ({**several(1, 16), "input_ids": [5, 6]}, 16),
        ({**several(2, 1), "sampling_params": [{"n": 3}, {"n": 3}]}, 6),
        ({"text": ["a", "b", "c"], "sampling_params": None}, 3),
        (generate(), 1),
        ({"input_ids": [[5, 6]]}, 1),
        ({"input_ids": [[5], [6]], "rid": ["a", "b"]}, 2),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_its_weight_while_it_lives(autojump_clock, body, weight, stream):
    """A11: load is what an engine has to generate: single requests go elsewhere until the others have as much."""
    stall = Fault(faults.AT_HEAD, STALL, faults.first(weight + 1))
    plans = [FaultPlan.of(stall) for _ in range(2)]
    async with world(plans=plans, policy="least_loaded") as w, trio.open_nursery() as nursery:

        async def ask(one: dict[str, object]) -> None:
            await w.ask(one)

        nursery.start_soon(ask, {**body, "stream": stream})
        await trio.testing.wait_all_tasks_blocked()
        [heavy] = [at for at, worker in enumerate(w.workers) if worker.generates]
        loads = [row["load"] for row in (await w.ask(None, "/workers")).json()["workers"]]
        assert loads[heavy] == weight
        assert loads[1 - heavy] == 0
        for _ in range(weight):
            nursery.start_soon(ask, generate(2))
            await trio.testing.wait_all_tasks_blocked()
        assert len(w.workers[heavy].generates) == 1
        assert [worker.load for worker in w.app.fleet.workers] == [weight, weight]
        for plan in plans:
            plan.release()
        nursery.cancel_scope.deadline = trio.current_time() + 60
    assert [worker.load for worker in w.app.fleet.workers] == [0, 0]
    assert not nursery.cancel_scope.cancelled_caught


@both
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
async def test_a_pair_and_samples_end_within_the_deadline(autojump_clock, stream, split):
    """I4: a prefill/decode body with n = 3, which stays whole: if its worker never answers, the client is told in time.

    Of an unprotected unary answer no first token is seen: there it is the deadline of the whole request.
    """
    body = {**several(1, 3, stream=stream), "input_ids": [5, 6]}
    body |= {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2**63 - 1}
    limit = "first_token_timeout_secs" if stream else "request_timeout_secs"
    plans = [FaultPlan.of(Fault(faults.AT_HEAD, STALL)) for _ in range(2)]
    async with world(plans=plans, split_batches=split, **{limit: 30}) as w:
        began = trio.current_time()
        response = await w.ask(body)
        assert trio.current_time() - began == pytest.approx(30, abs=1)
        assert response.status == 504
        assert response.header("x-dyn-relay-migratable") == "no; reason=bootstrap_host"
        [recorded] = [recorded for worker in w.workers for recorded in worker.generates]
        assert recorded.json() == body
    async with world(split_batches=split) as w:
        assert (await w.ask(body)).complete
