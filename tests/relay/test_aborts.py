"""Somebody wishes a request to end: the client that leaves, an abort request, a trainer that drains its engines."""

from __future__ import annotations

import json

import pytest
import trio

from dyn_relay.relay import orders
from dyn_testkit import faults
from dyn_testkit.client import ask, fetch
from dyn_testkit.faults import CLOSE, RESET, STALL, FaultPlan, at_token
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import aborted_in_between, judged, world

SLOW = WorkerOptions(tick=0.05)
BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


def finish(response, stream):
    value = response.values()[-1] if stream else response.json()
    return value["meta_info"]["finish_reason"]


@BOTH
async def test_an_operators_abort_is_relayed(autojump_clock, stream):
    """H1: an abort without a status code is somebody's wish: relayed as it is, never resumed."""
    plan = FaultPlan.in_order([(at_token(3), faults.abort_event(None))])
    async with world(plans=[plan, None], policy="round_robin") as w:
        response = await w.ask(generate(stream=stream))
        assert response.status == 200
        assert response.complete
        assert finish(response, stream)["type"] == "abort"
        assert w.workers[1].generates == []
        await w.quiet()
        assert w.metric('dyn_relay_requests_total{outcome="aborted"}') == 1


@BOTH
async def test_resume_policy(autojump_clock, stream):
    """H1: with --on-abort resume it goes on elsewhere."""
    plan = FaultPlan.in_order([(at_token(3), faults.abort_event(None))])
    async with world(plans=[plan, None], policy="round_robin", on_abort="resume") as w:
        response = await w.ask(generate(stream=stream))
        assert judged(response, generate(stream=stream), ORACLE) == []


@BOTH
async def test_abort_follows_a_migrated_request(autojump_clock, stream):
    """C2: aborted by its own rid after two migrations: the current owner ends it, nothing is resumed."""
    plans = [FaultPlan.in_order([(at_token(2), RESET)]), FaultPlan.in_order([(at_token(2), RESET)]), None]
    async with world(plans=plans, options=SLOW, policy="round_robin") as w:
        answers = []

        async def client():
            answers.append(await w.ask(generate(400, stream=stream, rid="R")))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: w.workers[2].generates)
            await trio.sleep(0.5)
            assert (await w.ask({"rid": "R"}, "/abort_request")).status == 200
        [response] = answers
        assert response.complete
        reason = finish(response, stream)
        assert reason["type"] == "abort"
        value = response.values()[-1] if stream else response.json()
        assert value["meta_info"]["id"] == "R"
        assert value["meta_info"]["completion_tokens"] > 4
        assert sum(len(worker.generates) for worker in w.workers) == 3
        await w.quiet()


async def test_an_unprotected_request_that_was_rerouted_is_aborted_by_its_own_name(autojump_clock):
    """A request that is never continued goes to every worker under the client's name: that is what they are told."""
    async with world(options=SLOW, policy="round_robin") as w:
        w.workers[0].scheduler.full = True
        answers = []

        async def client():
            answers.append(await w.ask(generate(400, rid="mine", sampling={"frequency_penalty": 0.5})))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: w.workers[1].scheduler.live)
            await fetch(w.network, w.url, "/abort_request", {"rid": "mine"})
        assert answers[0].complete
        assert finish(answers[0], stream=True)["type"] == "abort"
        assert [order["rid"] for order in w.workers[1].aborts] == ["mine"]
        await w.quiet()
    [row] = w.rows
    assert row["outcome"] == "aborted"
    assert [attempt["rid"] for attempt in row["attempts"]] == ["mine", "mine"]


async def test_aborts_match_by_prefix_as_stock_does(autojump_clock):
    """C3, N4: an adapter's prefix aborts its requests, whatever rids their attempts have, and no other."""
    plan = FaultPlan.in_order([(at_token(2), RESET)] * 3)
    async with world(plans=[plan, None], options=SLOW) as w:
        answers = {}

        async def client(rid):
            answers[rid] = await w.ask(generate(100, rid=rid))

        async with trio.open_nursery() as clients:
            for rid in ("adapterA-1", "adapterA-2", "adapterB-1"):
                clients.start_soon(client, rid)
            await trio.sleep(1)
            await w.ask({"rid": "adapterA", "prefix": True}, "/abort_request")
        reasons = {rid: answer.values()[-1]["meta_info"]["finish_reason"]["type"] for rid, answer in answers.items()}
        assert reasons == {"adapterA-1": "abort", "adapterA-2": "abort", "adapterB-1": "length"}


async def test_abort_all_drains_every_worker(autojump_clock):
    """H5: a trainer aborts everything: every stream ends, nothing is resumed, every worker comes to rest."""
    async with world(options=SLOW) as w:
        answers = []

        async def client(number):
            answers.append(await w.ask(generate(400, rid=f"r{number}", stream=bool(number % 2))))

        async with trio.open_nursery() as clients:
            for number in range(8):
                clients.start_soon(client, number)
            await trio.sleep(0.5)
            await w.ask({"abort_all": True}, "/abort_request")
        assert [worker.live for worker in w.workers] == [0, 0]
        assert len(answers) == 8
        assert sum(len(worker.generates) for worker in w.workers) == 8


async def test_a_trainers_abort_at_the_workers_is_not_rescued(autojump_clock):
    """H5: the trainer talks to the workers directly."""
    async with world(options=SLOW) as w:
        answers = []

        async def client(number):
            answers.append(await w.ask(generate(400, rid=f"r{number}")))

        async with trio.open_nursery() as clients:
            for number in range(8):
                clients.start_soon(client, number)
            await trio.sleep(0.5)
            for worker in w.workers:
                await fetch(w.network, worker.url, "/abort_request", {"abort_all": True})
        assert [answer.values()[-1]["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort"] * 8
        assert [worker.live for worker in w.workers] == [0, 0]


@BOTH
async def test_abort_while_no_worker_has_it(autojump_clock, stream):
    """Between two attempts: the answer ends as an abort with what was delivered, and no attempt follows."""
    plan = FaultPlan.in_order([(at_token(3), CLOSE)])
    async with world(plans=[plan, None], policy="round_robin") as w:
        response = await aborted_in_between(w, plan, generate(stream=stream, rid="R"))
        value = response.values()[-1] if stream else response.json()
        assert value["meta_info"]["finish_reason"]["type"] == "abort"
        assert value["meta_info"]["completion_tokens"] == 3
        assert w.workers[1].generates == []


@BOTH
async def test_abort_of_a_request_whose_worker_does_not_obey(autojump_clock, stream):
    """It ends here, with the tokens whose weights are known for sure; the trace counts no others."""
    plan = FaultPlan.in_order([(at_token(9), STALL)])
    options = WorkerOptions(tick=0.05, stream_interval=4)
    async with world(plans=[plan], options=options) as w:
        answers = []

        async def client():
            answers.append(await w.ask(generate(20, stream=stream, rid="R")))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await until(lambda: any(live.versions for live in w.workers[0].scheduler.live.values()))
            w.workers[0].scheduler.weight_version = "8"
            await plan.fired()
            await w.ask({"rid": "R"}, "/abort_request")
        [response] = answers
        assert finish(response, stream)["type"] == "abort"
        [row] = w.rows
        assert row["completion_tokens"] == (9 if stream else 1)
        assert [attempt["tokens"] for attempt in row["attempts"]] == [row["completion_tokens"]]


async def test_unknown_and_malformed_aborts(autojump_clock):
    async with world() as w:
        assert (await w.ask({"rid": "nobody"}, "/abort_request")).status == 200
        for worker in w.workers:
            await worker.reaches(aborts=1)
        assert w.workers[0].aborts == [{"rid": "nobody"}]
        assert (await w.ask({"rid": ""}, "/abort_request")).status == 200
        response = await w.ask({"rid": 5}, "/abort_request")
        assert (response.status, response.json()["message"]) == (400, "rid: must be a string")
        assert (await w.ask(b"[", "/abort_request")).status == 400


@BOTH
async def test_the_lost_attempt_is_aborted_once(autojump_clock, stream):
    """C1: a reset at a worker that goes on generating: one abort with that attempt's rid, one continuation."""
    plan = FaultPlan.in_order([(at_token(3), RESET)])
    async with world(plans=[plan, None], policy="round_robin") as w:
        response = await w.ask(generate(stream=stream))
        assert judged(response, generate(stream=stream), ORACLE) == []
        await w.workers[0].reaches(aborts=1)
        await trio.sleep(10)
        assert w.workers[0].aborts == [{"rid": w.workers[0].generates[0].json()["rid"]}]
        assert w.workers[1].aborts == []
        assert len(w.workers[1].generates) == 1


@BOTH
@pytest.mark.parametrize("silent", [True, False], ids=["silent-worker", "streaming-worker"])
async def test_a_client_that_leaves_frees_the_worker(autojump_clock, stream, silent, tmp_path):
    """C12: the worker is free within a second, also when it was silent; the trace says that the client left."""
    plan = FaultPlan.in_order([(at_token(2), STALL)]) if silent else None

    async with world(plans=[plan], options=SLOW) as w:
        connection = await w.network.connect("proxy", 30000)
        data = json.dumps(generate(1000, stream=stream)).encode()
        head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
        await connection.send(head + data)
        await until(lambda: w.workers[0].generates)
        await trio.sleep(1)
        connection.close()
        await trio.sleep(1)
        assert w.workers[0].disconnects == 1
        assert [worker.in_flight for worker in w.app.fleet.workers] == [0]
        assert [(row["outcome"], row["closed_by"]) for row in w.rows] == [("client_gone", "client")]


@BOTH
@pytest.mark.parametrize("again", ["x", "xy"], ids=["the same rid", "one that extends it"])
async def test_who_leaves_and_comes_back_under_the_same_rid_is_not_dropped_with_what_was_left(
    autojump_clock, monkeypatch, stream, again
):
    """A client's own time limit, and its retry: the order to drop the first may reach the worker after the second."""
    fetch = orders.fetch

    async def slow(*args, **kwargs):
        await trio.sleep(3)
        return await fetch(*args, **kwargs)

    monkeypatch.setattr(orders, "fetch", slow)
    async with world(plans=[None], options=WorkerOptions(tick=1.0)) as w:
        with trio.move_on_after(4.5):
            await w.ask(generate(20, stream=stream, rid="x"))
        answer = await w.ask(generate(20, stream=stream, rid=again))
        assert judged(answer, generate(20, stream=stream, rid=again), ORACLE) == []
        await w.ask(generate(2, stream=stream, rid=again))
        names = [json.loads(recorded.request.body)["rid"] for recorded in w.workers[0].generates]
        assert [name in ("x", "xy") for name in names] == [True, False, True]  # the order has been heard by then
        aborts = [one.request.body for one in w.workers[0].requests if one.path == "/abort_request"]
        assert [json.loads(body)["rid"] for body in aborts] == ["x"]


async def test_duplicate_live_rid(autojump_clock):
    """As stock: 400 while the first is live, in the shape of the client's mode; free again afterwards."""
    async with world(options=SLOW) as w:
        async with trio.open_nursery() as clients:
            clients.start_soon(w.ask, generate(20, rid="dup"))
            await trio.sleep(0.5)
            unary = await w.ask(generate(rid="dup", stream=False))
            assert (unary.status, unary.json()) == (400, {"error": {"message": "Duplicate request ID detected: dup"}})
            sse = await w.ask(generate(rid="dup"))
            assert sse.status == 200
            assert sse.values()[0]["error"]["message"] == "Duplicate request ID detected: dup"
            assert sse.events()[-1] == b"[DONE]"
        assert judged(await w.ask(generate(rid="dup")), generate(rid="dup"), ORACLE) == []


async def test_keep_alive_connection_serves_request_after_request(autojump_clock):
    """Also after an error answer."""
    async with world() as w:
        connection = await w.network.connect("proxy", 30000)
        for stream in (True, False, True):
            response = await ask(connection, "/generate", generate(stream=stream))
            assert judged(response, generate(stream=stream), ORACLE) == []
            bad = await ask(connection, "/generate", generate(stream=False, sampling={"temperature": -1}))
            assert bad.status == 400
