"""Clients that are slow, requests that are aborted at odd moments, limits that end a request, and what is told then."""

from __future__ import annotations

import json

import pytest
import trio

from dyn_testkit import faults
from dyn_testkit.faults import KILL_WORKER, STALL, FaultPlan, at_token, every
from dyn_testkit.relay import until
from dyn_testkit.worker import WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world
from tests.relay.odd import scripted

BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


async def send(w, body):
    connection = await w.network.connect("proxy", 30000)
    data = json.dumps(body).encode()
    await connection.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return connection


async def test_a_client_that_reads_slowly_is_no_stall(autojump_clock):
    """Backpressure is not the worker's silence: nothing is migrated, however long the client takes."""
    async with world(buffer=2048, stall_timeout_secs=10, health_check_interval_secs=3600) as w:
        connection = await send(w, generate(100))
        await trio.sleep(500)
        assert [worker.in_flight for worker in w.app.fleet.workers] in ([1, 0], [0, 1])
        received = b""
        while b"[DONE]" not in received:
            received += await connection.receive()
        await w.quiet()
        assert w.metric('dyn_relay_attempts_total{outcome="done"}') == 1
        assert w.metric('dyn_relay_attempts_total{outcome="stall"}') == 0
        connection.close()


async def test_tokens_that_come_while_health_is_asked_count(autojump_clock):
    """The worker is asked because it was silent; while /health hangs, its tokens flow, and no attempt is lost."""
    plan = FaultPlan.in_order([(at_token(3), STALL)])
    async with world(plans=[plan, None], policy="round_robin", stall_timeout_secs=30) as w:
        w.workers[0].health_status = None  # it hangs, as stock's does while the engine is busy
        answers = []

        async def client():
            answers.append(await w.ask(generate()))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await plan.fired()
            await trio.sleep(32)  # the question is under way
            plan.release()
        assert judged(answers[0], generate(), ORACLE) == []
        assert w.workers[1].generates == []


async def test_request_timeout_ends_a_client_that_does_not_read(autojump_clock):
    async with world(buffer=512, request_timeout_secs=5, plans=[None]) as w:
        connection = await send(w, generate(1000, rid="R"))
        await trio.sleep(10)
        assert len(w.app.live) == 0
        await w.quiet()
        assert w.metric('dyn_relay_requests_total{outcome="failed"}') == 1
        connection.close()


@BOTH
async def test_an_abort_ends_a_request_on_a_silent_worker(autojump_clock, stream):
    """The worker is told, does nothing, and the client is not made to wait for it."""
    plan = FaultPlan.in_order([(at_token(3), STALL)])
    async with world(plans=[plan], stall_timeout_secs=0) as w:
        answers = []

        async def client():
            answers.append(await w.ask(generate(stream=stream, rid="R", sampling={"stream_interval": 1})))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await plan.fired()
            await w.ask({"rid": "R"}, "/abort_request")
        value = answers[0].values()[-1] if stream else answers[0].json()
        assert value["meta_info"]["finish_reason"]["type"] == "abort"
        assert value["meta_info"]["completion_tokens"] == 3


async def test_an_abort_of_a_suspect_that_waits(autojump_clock):
    """It is never dispatched."""
    plan = FaultPlan.of(faults.Fault(at_token(0), KILL_WORKER, lambda seen: seen.rid == "first"))
    hold = FaultPlan.of(faults.Fault(at_token(0), STALL, every))
    async with world(plans=[plan, hold], policy="round_robin", options=WorkerOptions(tick=1.0)) as w:
        answers = {}

        async def client(rid, prompt):
            answers[rid] = await w.ask(generate(4, rid=rid, input_ids=prompt))

        async with trio.open_nursery() as clients:
            clients.start_soon(client, "first", [5])
            await until(lambda: w.workers[1].generates)
            clients.start_soon(client, "second", [5])  # the same to an engine, so as suspect as the first
            await trio.sleep(1)
            await w.ask({"rid": "second"}, "/abort_request")
            await until(lambda: "second" in answers)
            hold.release()
        assert answers["second"].values()[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert [recorded.json()["rid"] for recorded in w.workers[0].generates] == ["first"]
        assert len(w.workers[1].generates) == 1


async def test_engine_words_survive_keep_alive_comments(autojump_clock):
    """The head is out for a comment's sake, then the engine says 400: the client gets its message and code."""
    words = b'{"error":"unknown field `wibble`"}'
    answer = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(words)
    async with world(plans=[], sse_keep_alive_interval_secs=5) as w:
        await scripted(w, answer + words, delay=20)
        response = await w.ask(generate(sampling={"wibble": 1}))
        assert b": keep-alive" in response.body
        assert not response.complete
        error = response.values()[-1]["error"]
        assert error["code"] == 400
        assert "wibble" in error["message"]


async def test_names_of_attempts_are_forgotten(autojump_clock):
    plans = [FaultPlan.in_order([(at_token(2), KILL_WORKER)]), None, None]
    async with world(plans=plans, policy="round_robin") as w:
        w.workers[1].kill()
        for _ in range(3):
            assert judged(await w.ask(generate()), generate(), ORACLE) == []
        await w.quiet()
        assert w.app.live.names == 0


async def test_disguised_paths_do_not_pass(autojump_clock):
    """Keys are checked for the path that the most obliging worker would see."""
    async with world(
        api_key="user", admin_api_key="admin", worker_api_key="w", options=WorkerOptions(api_key="w")
    ) as w:
        user = {"authorization": "Bearer user"}
        for path in ("/flush_cache", "/%66lush_cache", "//flush_cache", "/x/../flush_cache", "/pause_generation"):
            assert (await w.ask({}, path, headers=user)).status == 401, path
        for path in ("/health/../generate", "/health/../workers", "/metrics/x"):
            assert (await w.ask({}, path)).status == 401, path
        admin = {"authorization": "Bearer admin"}
        assert (await w.ask({"rid": "x"}, "//abort_request", headers=user)).status == 401
        assert (await w.ask({"rid": "x"}, "//abort_request", headers=admin)).status == 400
        assert (await w.ask({}, "/v1/models", headers=user, method="TRACE")).status == 405
        assert [worker.generates for worker in w.workers] == [[], []]


async def test_logs_and_rows_hold_no_prompt(autojump_clock, capsys):
    """An engine's error may quote the prompt: the client gets its words, the trace, the log and /workers do not."""
    words = b'{"error":{"message":"cannot tokenize: SECRET"}}'
    answer = b"HTTP/1.1 500 Oops\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(words)

    async with world(plans=[]) as w:
        await scripted(w, answer + words)
        response = await w.ask(generate(stream=False))
        assert b"SECRET" in response.body
        await w.quiet()
        assert b"SECRET" not in (await w.ask(None, "/workers")).body
    assert "SECRET" not in json.dumps(w.rows)
    captured = capsys.readouterr()
    assert "request end" in captured.out + captured.err
    assert "SECRET" not in captured.out + captured.err


async def test_a_request_without_a_name_of_ours_has_none_in_the_row(autojump_clock):
    """Not migratable, and not named by its client: only its worker knows a name, and no abort order can use another."""

    penalty = {"frequency_penalty": 0.5}
    async with world(plans=[None]) as w:
        await w.ask(generate(sampling=penalty))
        await w.ask(generate(sampling=penalty, rid="mine"))
        await w.ask({"rid": "bad", "input_ids": [-1]})
        await w.ask(generate(rid="good"))
        await w.quiet()
    assert [(row["rid"], row["reason"]) for row in w.rows] == [
        ("", "frequency_penalty"),
        ("mine", "frequency_penalty"),
        ("bad", "input_ids"),
        ("good", ""),
    ]


async def test_forwarded_credentials_go_instead_of_the_workers(autojump_clock):
    async with world(plans=[None], forward_authorization=True, worker_api_key="worker") as w:
        await w.ask(generate(), headers={"authorization": "Bearer client"})
        await w.ask(generate())
        await w.ask(generate(), headers={"authorization": "Bearer client", "connection": "authorization"})
        keys = [dict(recorded.request.headers)[b"authorization"] for recorded in w.workers[0].generates]
        assert keys == [b"Bearer client", b"Bearer worker", b"Bearer worker"]
