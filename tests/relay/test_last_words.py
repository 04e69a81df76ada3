"""An answer ends once: what was said is never said again, and what cannot be given whole is seen to be broken."""

from __future__ import annotations

import json

import pytest
import trio

from dyn_testkit.client import ask
from dyn_testkit.faults import AT_HEAD, CLOSE, STALL, FaultPlan
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world
from tests.relay.odd import Scripted, scripted

BIG = 200_000
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BOTH = pytest.mark.parametrize("stream", [True, False], ids=["sse", "unary"])


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def event(rid: str, ids: list[int], finish: object = None, **more: object) -> bytes:
    meta = {"id": rid, "finish_reason": finish, "prompt_tokens": 3, "completion_tokens": len(ids), **more}
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


def whole(rid: str, **more: object) -> bytes:
    """A stream of one token, in one event."""
    last = event(rid, [9], {"type": "length", "length": 1}, **more)
    return HEAD + chunked(last, b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def opened(w, body):
    """A client's connection with its request on the way."""
    connection = await w.network.connect("proxy", 30000)
    data = json.dumps(body).encode()
    await connection.send(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return connection


async def rest(connection) -> bytes:
    got = b""
    while data := await connection.receive():
        got += data
    return got


@BOTH
async def test_a_timeout_while_the_client_takes_the_answer_adds_nothing(autojump_clock, stream):
    async with world(plans=[], buffer=4096, request_timeout_secs=5) as w:
        await scripted(w, whole("r", pad="x" * BIG))
        connection = await opened(w, generate(1, stream=stream, rid="r"))
        await trio.sleep(60)
        got = await rest(connection)
        assert got.count(b"HTTP/1.1 ") == 1
        assert len(got) < BIG
        assert b"request_timeout" not in got


async def test_an_abort_while_the_client_takes_the_end_adds_nothing(autojump_clock):
    """The stream has ended, its client is slow, somebody aborts its rid: it is whole, and the next answer follows."""
    async with world(plans=[None], buffer=4096) as w:
        await scripted(w, whole("r", pad="x" * BIG))
        w.app.fleet.remove(w.app.fleet.workers[0].id)
        connection = await opened(w, generate(1, rid="r"))
        await trio.sleep(2)
        assert (await w.ask({"rid": "r"}, "/abort_request")).status == 200
        await trio.sleep(60)
        got = b""
        while not got.endswith(b"\r\n0\r\n\r\n"):
            got += await connection.receive()
        assert (got.count(b"[DONE]"), got.count(b"\r\n0\r\n\r\n")) == (1, 1)
        assert (await ask(connection, "/liveness")).status == 200


class Deaf(Scripted):
    """Answers once it has read a head, and reads no more."""

    async def _serve(self, connection):
        head = await connection.receive(4096)
        if b"/generate" in head or b"/v1/x" in head:
            await connection.send(self.answer)
            await trio.sleep_forever()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        connection.close()


@pytest.mark.parametrize("path", ["/generate", "/v1/x"])
async def test_an_answer_that_comes_before_the_request_is_out(autojump_clock, path):
    async with world(plans=[], buffer=4096, stall_timeout_secs=50) as w:
        worker = Deaf(b"HTTP/1.1 413 Too Large\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}", 0.0)
        await w.nursery.start(worker.run, w.network, "odd")
        w.app.fleet.add("http://odd:30000")
        await w.ready()
        begin = trio.current_time()
        response = await w.ask(generate(1, stream=False, pad="x" * BIG), path)
        assert (response.status, response.body) == (413, b"{}")
        assert trio.current_time() - begin < 1


async def test_a_stale_connection_may_have_been_read(autojump_clock):
    """The worker had read the request: under its old name it would be refused as a duplicate."""
    plan = FaultPlan.in_order([None, (AT_HEAD, CLOSE)])
    async with world(plans=[plan]) as w:
        for rid in ("one", "two"):
            assert judged(await w.ask(generate(rid=rid)), generate(rid=rid), ORACLE) == []
        plan.verify()
        first, second, third = (recorded.json()["rid"] for recorded in w.workers[0].generates)
        assert (first, second) == ("one", "two")
        assert third not in ("one", "two")
        await w.workers[0].reaches(aborts=1)
        assert w.workers[0].aborts[0]["rid"] == "two"
        assert w.app.fleet.workers[0].failures == 0


@pytest.mark.parametrize(("method", "dials"), [("POST", 3), ("GET", 0)])
async def test_what_must_not_be_done_twice_gets_a_connection_of_its_own(autojump_clock, method, dials):
    """On a stale one nobody could tell whether it was done."""
    async with world(plans=[None], health_check_interval_secs=3600) as w:
        await w.ask(generate())
        before = w.workers[0].dialled
        for _ in range(3):
            await w.ask(method=method, path="/model_info", body=b"{}" if method == "POST" else None)
        assert w.workers[0].dialled - before == dials


async def test_the_head_is_the_one_of_the_worker_that_answers(autojump_clock):
    """A dead attempt's head, of which nothing was given, is not the client's."""
    async with world(plans=[None], policy="round_robin") as w:
        head = HEAD.replace(b"200 OK", b"207 Odd").replace(b"\r\n\r\n", b"\r\nset-cookie: a\r\n\r\n")
        odd = await scripted(w, head)
        for _ in range(2):
            response = await w.ask(generate())
            assert judged(response, generate(), ORACLE) == []
            assert response.header("set-cookie") is None
        assert odd.heads


@pytest.mark.parametrize("answer", [b"200 OK\r\ncontent-length: 2\r\n\r\n{}", b"204 No Content\r\n\r\n"])
async def test_a_stream_that_has_begun_with_comments_takes_nothing_else(autojump_clock, answer):
    async with world(plans=[], sse_keep_alive_interval_secs=1) as w:
        await scripted(w, b"HTTP/1.1 " + answer, delay=5)
        response = await w.ask({"text": "x", "stream": True})
        assert not response.complete
        assert response.values()[-1]["error"]["code"] == 502


@BOTH
async def test_what_comes_after_the_finish_is_not_part_of_the_answer(autojump_clock, stream):
    finish = event("r", [9], {"type": "length", "length": 1})
    answer = HEAD + chunked(finish, event("r", [9, 8]), event("r", [9]), b"data: [DONE]\n\n") + b"0\r\n\r\n"
    async with world(plans=[]) as w:
        await scripted(w, answer)
        response = await w.ask(generate(1, stream=stream, rid="r"))
        assert response.complete
        got = response.values() if stream else [response.json()]
        assert [(one["output_ids"], one["meta_info"]["finish_reason"]["type"]) for one in got] == [([9], "length")]


@BOTH
async def test_somebody_elses_answer_is_no_answer(autojump_clock, stream):
    async with world(plans=[None], policy="round_robin") as w:
        odd = await scripted(w, whole("somebody"))
        for _ in range(2):
            body = generate(stream=stream)
            assert judged(await w.ask(body), body, ORACLE) == []
        assert odd.heads


async def test_a_body_without_a_told_end_stays_one(autojump_clock):
    """Nobody can tell whether it was cut: so it is not made to look whole."""
    async with world(plans=[]) as w:
        await scripted(w, b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhalf of")
        response = await w.ask(path="/v1/x", body=None)
        assert response.body == b"half of"
        assert response.header("transfer-encoding") is None
        assert response.header("connection") == "close"


async def test_our_paths_in_disguise(autojump_clock):
    async with world(plans=[None]) as w:
        assert (await w.ask(generate(), "/%67enerate")).status == 400
        assert w.workers[0].generates == []


async def test_an_aborted_request_is_not_sent_again(autojump_clock):
    """The abort comes while the worker has the request, then the connection turns out to have been stale."""
    plan = FaultPlan.in_order([None, (AT_HEAD, STALL)])
    async with world(plans=[plan]) as w:
        await w.ask(generate())
        answers = []

        async def client():
            answers.append(await w.ask(generate(200, rid="r")))

        async with trio.open_nursery() as clients:
            clients.start_soon(client)
            await plan.fired()
            await w.ask({"rid": "r"}, "/abort_request")
            w.network.reset("client", "w1")
        assert answers[0].values()[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(w.workers[0].generates) == 2
