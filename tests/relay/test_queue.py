"""`--max-concurrent-requests`: who waits, who is turned away, with what, and who never waits."""

from __future__ import annotations

import pytest
import trio

from dyn_testkit.client import begin
from dyn_testkit.faults import STALL, Fault, FaultPlan, at_token, every
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world
from tests.relay.several import judged as judged_whole
from tests.relay.several import several

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


def held() -> FaultPlan:
    """Every answer stops at its third token, until `release`."""
    return FaultPlan.of(Fault(at_token(2), STALL, every))


class Clients:
    """Requests under way, and their answers by rid."""

    def __init__(self, w):
        self.w = w
        self.answers = {}

    async def _ask(self, rid, body, path):
        self.answers[rid] = await self.w.ask(body, path)

    async def start(self, *rids, stream=True, path="/generate", **extra):
        """In this order, each once the one before is known to the proxy."""
        for rid in rids:
            self.w.nursery.start_soon(self._ask, rid, generate(rid=rid, stream=stream, **extra), path)
            if path == "/generate":
                await until(lambda rid=rid: rid in self.w.app.live)

    async def all(self, *rids):
        await until(lambda: all(rid in self.answers for rid in rids))


@BOTH
async def test_first_come_first_served(autojump_clock, stream):
    plan = held()
    async with world(plans=[plan], max_concurrent_requests=2, stall_timeout_secs=0) as w:
        clients = Clients(w)
        rids = [f"r{number}" for number in range(8)]
        await clients.start(*rids, stream=stream)
        await plan.fired(times=2)
        await trio.sleep(5)
        assert [seen.json()["rid"] for seen in w.workers[0].generates] == rids[:2]
        assert w.metric("dyn_relay_queue_depth") == 6
        assert w.app.fleet.workers[0].in_flight == 2  # who waits holds no lease
        plan.release()
        await clients.all(*rids)
        served = [seen.json()["rid"] for seen in w.workers[0].generates]
        # Two at a time end together, so two at a time begin.
        assert [set(served[at : at + 2]) for at in range(0, 8, 2)] == [set(rids[at : at + 2]) for at in range(0, 8, 2)]
        for rid in rids:
            body = generate(rid=rid, stream=stream)
            assert judged(clients.answers[rid], body, ORACLE) == []
        await w.quiet()
        assert w.metric("dyn_relay_queue_depth") == 0
        assert w.metric("dyn_relay_queue_wait_seconds_count") == 8
        assert [row["queued"] >= 5 for row in sorted(w.rows, key=lambda row: row["rid"])] == [False] * 2 + [True] * 6


@BOTH
async def test_a_full_queue_is_429(autojump_clock, stream):
    plan = held()
    async with world(plans=[plan], max_concurrent_requests=1, queue_size=2, stall_timeout_secs=0) as w:
        clients = Clients(w)
        await clients.start("a", "b", "c")
        await trio.sleep(7.5)
        response = await w.ask(generate(rid="d", stream=stream))
        assert response.status == 429
        assert response.header("retry-after") == "8"  # as long as `b` has waited
        assert response.header("content-type") == "application/json"
        error = response.json()
        assert (error["code"], error["reason"], error["delivered"], error["started"]) == (429, "queue_full", 0, False)
        assert w.metric('dyn_relay_queue_refusals_total{reason="queue_full"}') == 1
        assert w.metric("dyn_relay_queue_depth") == 2
        plan.release()
        await clients.all("a", "b", "c")
        assert len(w.workers[0].generates) == 3
        await w.quiet()
        assert [(row["status"], row["error"]) for row in w.rows if row["rid"] == "d"] == [(429, "queue_full")]


@BOTH
async def test_waiting_for_too_long_is_503(autojump_clock, stream):
    plan = held()
    async with world(plans=[plan], max_concurrent_requests=1, queue_timeout_secs=20, stall_timeout_secs=0) as w:
        clients = Clients(w)
        await clients.start("a")
        asked = trio.current_time()
        response = await w.ask(generate(rid="b", stream=stream))
        assert trio.current_time() - asked == pytest.approx(20, abs=0.1)
        assert (response.status, response.json()["reason"]) == (503, "queue_timeout")
        assert response.json()["started"] is False
        assert response.header("retry-after") == "20"
        plan.release()
        await clients.all("a")
        assert len(w.workers[0].generates) == 1


async def test_no_queue_at_all(autojump_clock):
    """--queue-size 0."""
    plan = held()
    async with world(plans=[plan], max_concurrent_requests=1, queue_size=0, stall_timeout_secs=0) as w:
        clients = Clients(w)
        await clients.start("a")
        response = await w.ask(generate(rid="b"))
        assert (response.status, response.header("retry-after")) == (429, "1")
        plan.release()
        await clients.all("a")
        assert (await w.ask(generate(rid="c"))).status == 200


async def test_a_client_that_leaves_is_out_of_the_queue_at_once(autojump_clock):
    """C12: its place is another's, and no worker ever hears of it."""
    plan = held()
    async with world(plans=[plan], max_concurrent_requests=1, queue_size=1, stall_timeout_secs=0) as w:
        clients = Clients(w)
        await clients.start("a")
        connection = await w.network.connect("proxy", 30000)
        await begin(connection, "/generate", generate(rid="b"))
        await until(lambda: w.metric("dyn_relay_queue_depth") == 1)
        connection.close()
        await trio.sleep(0.01)
        assert w.metric("dyn_relay_queue_depth") == 0
        assert "b" not in w.app.live
        await clients.start("c")
        plan.release()
        await clients.all("a", "c")
        await w.quiet()
        assert [seen.json()["rid"] for seen in w.workers[0].generates] == ["a", "c"]
        rows = {row["rid"]: (row["outcome"], row["status"], len(row["attempts"])) for row in w.rows}
        assert rows["b"] == ("client_gone", 499, 0)


@BOTH
async def test_an_abort_finds_a_request_in_the_queue(autojump_clock, stream):
    plan = held()
    async with world(plans=[plan], max_concurrent_requests=1, stall_timeout_secs=0) as w:
        clients = Clients(w)
        await clients.start("a", "b", stream=stream)
        await w.ask({"rid": "b"}, "/abort_request")
        await clients.all("b")
        answer = clients.answers["b"]
        value = answer.values()[-1] if stream else answer.json()
        assert value["meta_info"]["finish_reason"]["type"] == "abort"
        plan.release()
        await clients.all("a")
        assert [seen.json()["rid"] for seen in w.workers[0].generates] == ["a"]


async def test_comments_keep_a_waiting_stream_alive(autojump_clock):
    """O1: in the queue, too; a refusal after one is an event, since the head is out."""
    plan = held()
    options = {"sse_keep_alive_interval_secs": 15, "queue_timeout_secs": 50, "stall_timeout_secs": 0}
    async with world(plans=[plan], max_concurrent_requests=1, **options) as w:
        clients = Clients(w)
        await clients.start("a")
        response = await w.ask(generate(rid="b"))
        assert response.body.count(b": keep-alive\n\n") == 3
        error = response.values()[-1]["error"]
        assert (error["code"], error["reason"]) == (503, "queue_timeout")
        assert not response.complete
        plan.release()
        await clients.all("a")


async def test_control_probes_and_infos_never_wait(autojump_clock):
    plan = held()
    async with world(plans=[plan], max_concurrent_requests=1, queue_size=0, stall_timeout_secs=0) as w:
        clients = Clients(w)
        await clients.start("a")
        for path in ("/health", "/metrics", "/workers", "/v1/models", "/get_model_info", "/server_info"):
            assert (await w.ask(None, path)).status == 200, path
        assert (await w.ask({}, "/flush_cache")).status in (200, 400)  # the worker's own word: it is busy
        assert (await w.ask({"rid": "nobody"}, "/abort_request")).status == 200
        assert (await w.ask(generate(), "/v1/completions")).status == 429
        assert (await w.ask(generate(), "/v1/chat/completions/")).status == 429
        assert (await w.ask(generate(), "/v1//completions")).status == 400  # no way around
        plan.release()
        await clients.all("a")


async def test_what_no_worker_would_see_does_not_wait(autojump_clock):
    """A request that is refused in the engine's words, and a rid that is live already."""
    plan = held()
    async with world(plans=[plan], max_concurrent_requests=1, queue_size=0, stall_timeout_secs=0) as w:
        clients = Clients(w)
        await clients.start("a")
        assert (await w.ask({"input_ids": [-1]})).status == 400
        assert (await w.ask(generate(rid="a", stream=False))).status == 400
        plan.release()
        await clients.all("a")


@BOTH
async def test_a_split_batch_counts_once(autojump_clock, stream):
    """Its answers go to their workers together, and the next request only when the last of them has ended."""
    options = {"max_concurrent_requests": 1, "split_batches": True, "wall": trio.current_time}
    async with world(options=WorkerOptions(tick=0.1), **options) as w:
        clients = Clients(w)
        body = several(4, rid="job", stream=stream)
        whole = {}

        async def batch():
            whole["answer"] = await w.ask(body)

        w.nursery.start_soon(batch)
        await until(lambda: "job_0" in w.app.live)
        await clients.start("late")
        await until(lambda: sum(len(worker.generates) for worker in w.workers) == 4)
        assert w.metric("dyn_relay_queue_depth") == 1
        await clients.all("late")
        assert judged_whole(whole["answer"], body, ORACLE) == []
        assert w.metric("dyn_relay_queue_wait_seconds_count") == 2
        await w.quiet()
        ends = [row["time"] + row["duration"] for row in w.rows if row["bundle"]]
        [late] = [row for row in w.rows if row["rid"] == "late"]
        assert late["time"] + late["attempts"][0]["started"] >= max(ends) - 1e-6


async def test_a_split_batch_that_is_turned_away(autojump_clock):
    """One answer for the whole."""
    plan = held()
    options = {"max_concurrent_requests": 1, "queue_size": 0, "split_batches": True, "stall_timeout_secs": 0}
    async with world(plans=[plan], **options) as w:
        clients = Clients(w)
        await clients.start("a")
        response = await w.ask(several(3, rid="job", stream=False))
        assert (response.status, response.json()["reason"]) == (429, "queue_full")
        assert response.header("retry-after") == "1"
        assert w.metric('dyn_relay_queue_refusals_total{reason="queue_full"}') == 1
        plan.release()
        await clients.all("a")
        assert len(w.workers[0].generates) == 1


async def test_who_waits_when_the_proxy_drains_is_served(autojump_clock):
    plan = held()
    async with world(plans=[plan], max_concurrent_requests=1, stall_timeout_secs=0) as w:
        clients = Clients(w)
        await clients.start("a", "b")
        w.app.draining.set()
        await trio.sleep(1)
        plan.release()
        await clients.all("a", "b")
        for rid in ("a", "b"):
            assert judged(clients.answers[rid], generate(rid=rid), ORACLE) == []


async def test_a_place_is_free_again_however_its_request_ends(autojump_clock):
    """A worker that dies, a refusal of the engine's, a timeout, a client that leaves in mid-stream."""
    async with world(plans=[None], max_concurrent_requests=1, queue_size=0, request_timeout_secs=30) as w:
        stall = Fault(at_token(2), STALL, every)
        assert (await w.ask(generate(sampling={"wibble": 1}, stream=False))).status == 400
        w.workers[0].faults.add(stall)
        assert (await w.ask(generate(stream=False))).status == 504
        connection = await w.network.connect("proxy", 30000)
        await begin(connection, "/generate", generate(rid="gone"))
        await until(lambda: "gone" in w.app.live)
        connection.close()
        await until(lambda: "gone" not in w.app.live)
        w.workers[0].faults.revoke(stall)
        assert (await w.ask(generate())).status == 200
