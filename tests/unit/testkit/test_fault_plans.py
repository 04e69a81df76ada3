"""Every fault happens where it is wanted, is seen on the wire, recorded, and awaitable."""

from __future__ import annotations

import re
from typing import Any

import pytest
import trio
import trio.testing

from dyn_relay.net import Connection, ConnectionBroken
from dyn_relay.sockets import open_network
from dyn_testkit import faults
from dyn_testkit.client import Response, ask, fetch
from dyn_testkit.faults import (
    AFTER_DONE,
    AFTER_FINISH,
    AFTER_LAST_TOKEN,
    AT_HEAD,
    BEFORE_ACCEPT,
    BEFORE_LAST_CHUNK,
    CLOSE,
    KILL_WORKER,
    RESET,
    STALL,
    Fault,
    FaultNeverHappened,
    FaultPlan,
    Kind,
    Spot,
    What,
    Where,
    at_token,
    inside_chunk_size,
    inside_json,
    parse_fault,
)
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker, WorkerIsDead, WorkerOptions

COUNT = 4
ENDS = {RESET: "reset", CLOSE: "eof", KILL_WORKER: "eof"}

#: Place -> (whole events the client has, what the rest of the wire looks like).
STREAM_PLACES: dict[Where, tuple[int, bytes]] = {
    AT_HEAD: (0, rb""),
    at_token(0): (0, rb".*\r\n\r\n"),
    at_token(1): (1, rb".*\n\n\r\n"),
    at_token(-1): (COUNT - 1, rb".*\n\n\r\n"),
    at_token(COUNT): (COUNT, rb'.*"finish_reason":\{"type":"length".*\n\n\r\n'),
    inside_chunk_size(1): (0, rb".*\r\n\r\n[0-9a-f]"),
    inside_chunk_size(3): (2, rb".*\n\n\r\n[0-9a-f]"),
    inside_json(1, 0): (0, rb".*\r\n\r\n[0-9a-f]+\r\ndata: "),
    inside_json(2, 17): (1, rb'.*\r\ndata: \{"output_ids":\[\d+'),
    inside_json(2, 10**6): (1, rb'.*"dp_rank":null\}'),
    AFTER_LAST_TOKEN: (COUNT, rb'.*"completion_tokens":4[^\n]*\n\n\r\n'),
    AFTER_FINISH: (COUNT, rb'.*"finish_reason":\{"type":"length"[^\n]*\n\n\r\n'),
    BEFORE_LAST_CHUNK: (COUNT + 1, rb".*data: \[DONE\]\n\n\r\n"),
    AFTER_DONE: (COUNT + 1, rb".*data: \[DONE\]\n\n\r\n0\r\n\r\n"),
}


def body(stream: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": [7, 8],
        "sampling_params": {"max_new_tokens": COUNT, "temperature": 0},
        "stream": stream,
    } | more


async def one(plan: FaultPlan, request: dict[str, Any], **setup: Any) -> tuple[Response, MockWorker]:
    """One request, with a connection left open afterwards to see what becomes of it."""
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, WorkerOptions(**setup), plan) as worker:
        response = await fetch(network, worker.url, "/generate", request, headers={"connection": "keep-alive"})
    return response, worker


@pytest.mark.parametrize("what", list(ENDS), ids=lambda what: what.kind.value)
@pytest.mark.parametrize(
    "where", list(STREAM_PLACES), ids=lambda where: f"{where.spot.value}-{where.token}-{where.byte}"
)
async def test_a_stream_is_cut_at_its_place(where: Where, what: What) -> None:
    plan = FaultPlan.of(Fault(where, what))
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, faults=plan) as worker:
        connection = await network.connect("worker", 1)
        response = await ask(connection, "/generate", body())
        events, rest = STREAM_PLACES[where]
        assert response.complete == (where is AFTER_DONE)
        assert re.fullmatch(b"(?s)" + rest, response.wire)
        assert len(response.events()) == events
        assert response.broken == ("" if where is AFTER_DONE else ENDS[what])
        await connection.wait_closed()
        assert worker.alive == (what is not KILL_WORKER)
        assert worker.disconnects == 0
    plan.verify()
    assert [firing.seen.index for firing in plan.firings] == [0]


@pytest.mark.parametrize(
    "where", list(STREAM_PLACES), ids=lambda where: f"{where.spot.value}-{where.token}-{where.byte}"
)
async def test_a_unary_answer_is_cut_at_its_place(where: Where) -> None:
    plan = FaultPlan.of(Fault(where, CLOSE))
    response, _ = await one(plan, body(stream=False))
    plan.verify()
    if where.spot in (Spot.AFTER_FINISH, Spot.BEFORE_LAST_CHUNK, Spot.AFTER_DONE):
        assert response.complete
    elif where.spot is Spot.INSIDE_JSON:
        assert response.status == 200
        assert not response.complete
        assert len(response.body) < int(response.header("content-length") or 0)
    elif where.spot is Spot.INSIDE_CHUNK_SIZE:
        assert response.status == 0
        assert response.wire.startswith(b"HTTP/1.1 200 OK\r\n")
    else:
        assert response.wire == b""


@pytest.mark.parametrize("what", list(ENDS), ids=lambda what: what.kind.value)
async def test_before_accept_counts_connections(what: What) -> None:
    plan = FaultPlan.of(Fault(BEFORE_ACCEPT, what, faults.nth(0)))
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, faults=plan) as worker:
        cut = await fetch(network, worker.url, "/health")
        assert (cut.wire, cut.broken) == (b"", ENDS[what])
        await worker.restart()
        assert (await fetch(network, worker.url, "/health")).status == 200
        assert len(worker.requests) == 1
    plan.verify()


async def test_real_connections_show_the_difference_between_reset_and_close() -> None:
    plan = FaultPlan.in_order([(at_token(2), RESET), (at_token(2), CLOSE)])
    async with open_network() as network, MockWorker.serve(network, faults=plan) as worker:
        connections: list[Connection] = [await network.connect(worker.host, worker.port) for _ in range(2)]
        reset, closed = [await ask(connection, "/generate", body()) for connection in connections]
        assert (reset.broken, closed.broken) == ("reset", "eof")
        assert len(closed.events()) == 2
        for connection in connections:
            connection.close()
    plan.verify()


@pytest.mark.parametrize(
    ("code", "content_type", "message"),
    [
        (500, "text/plain; charset=utf-8", b"Internal Server Error"),
        (502, "application/json", b'"code":502'),
        (503, "application/json", b'"type":"503"'),
    ],
)
async def test_status(code: int, content_type: str, message: bytes) -> None:
    plan = FaultPlan.of(Fault(AT_HEAD, faults.status(code)))
    response, _ = await one(plan, body())
    assert response.complete
    assert (response.status, response.header("content-type")) == (code, content_type)
    assert message in response.body
    plan.verify()


async def test_empty_200_and_comments_are_complete_answers() -> None:
    """A2: a 200 that says nothing."""
    for what, stream, parts in (
        (faults.EMPTY_200, True, []),
        (faults.EMPTY_200, False, []),
        (faults.COMMENTS_ONLY, True, [b": nothing yet\n\n"] * 3),
    ):
        plan = FaultPlan.of(Fault(AT_HEAD, what))
        response, _ = await one(plan, body(stream))
        assert (response.status, response.complete, response.parts) == (200, True, parts)
        assert response.events() == []
        plan.verify()


@pytest.mark.parametrize("code", [400, 500, 503, None])
@pytest.mark.parametrize("token", [0, 2])
async def test_abort_event(token: int, code: int | None) -> None:
    plan = FaultPlan.of(Fault(at_token(token), faults.abort_event(code)))
    response, _ = await one(plan, body())
    assert response.complete
    last = response.values()[-1]
    finish = {"type": "abort", "message": "Injected abort", "status_code": code, "err_type": None}
    assert last["meta_info"]["finish_reason"] == finish
    assert last["meta_info"]["completion_tokens"] == len(last["output_ids"]) == token
    assert response.events()[-1] == b"[DONE]"
    unary, _ = await one(FaultPlan.of(Fault(at_token(token), faults.abort_event(code))), body(stream=False))
    assert unary.status == (code or 200)
    if code is None:
        assert len(unary.json()["output_ids"]) == token


@pytest.mark.parametrize("where", [AT_HEAD, at_token(2), inside_json(2, 30), inside_chunk_size(2), BEFORE_LAST_CHUNK])
async def test_garbage_then_silence(autojump_clock: trio.testing.MockClock, where: Where) -> None:
    plan = FaultPlan.of(Fault(where, faults.GARBAGE))
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, faults=plan):
        connection = await network.connect("worker", 1)
        response = Response()
        with trio.move_on_after(100) as scope:
            response = await ask(connection, "/generate", body())
        garbled_framing = where.spot in (Spot.AT_HEAD, Spot.INSIDE_CHUNK_SIZE, Spot.BEFORE_LAST_CHUNK)
        assert scope.cancelled_caught != garbled_framing
        assert not response.complete
        if garbled_framing:
            assert response.broken not in ("", "eof", "reset")
        plan.verify()


async def test_a_stall_is_silent_until_released(autojump_clock: trio.testing.MockClock) -> None:
    fault = Fault(at_token(2), STALL)
    plan = FaultPlan.of(fault)
    network = SimNetwork()
    answers: list[Response] = []

    async def generate() -> None:
        answers.append(await fetch(network, worker.url, "/generate", body()))

    async with MockWorker.serve(network, "worker", 1, faults=plan) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await plan.fired(fault)
            await trio.sleep(1000)
            assert not answers
            assert worker.live == 1
            assert (await fetch(network, worker.url, "/health")).status == 200
            plan.release()
        assert answers[0].complete
        assert len(answers[0].values()) == COUNT


async def test_a_delay_is_over_by_itself(autojump_clock: trio.testing.MockClock) -> None:
    plan = FaultPlan.of(Fault(at_token(2), faults.delay(2500), faults.nth(0)))
    async with MockWorker.serve(SimNetwork(), "worker", 1, faults=plan) as worker:
        began = trio.current_time()
        assert (await worker.ask(body())).complete
        assert trio.current_time() - began == pytest.approx(2.5)
    plan.verify()


async def test_a_stalled_client_may_leave(autojump_clock: trio.testing.MockClock) -> None:
    plan = FaultPlan.of(Fault(at_token(1), STALL))
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, faults=plan) as worker:
        with trio.move_on_after(5):
            await fetch(network, worker.url, "/generate", body())
        await worker.reaches(disconnects=1)
        assert worker.live == 0


async def test_kill_takes_all_connections_and_the_port(autojump_clock: trio.testing.MockClock) -> None:
    plan = FaultPlan.of(Fault(at_token(2), KILL_WORKER, faults.rid_begins("victim")))
    network = SimNetwork()
    answers: list[Response] = []

    async def generate(rid: str) -> None:
        answers.append(await fetch(network, worker.url, "/generate", body(rid=rid)))

    async with MockWorker.serve(network, "worker", 1, WorkerOptions(tick=1.0), plan) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate, "bystander")
            nursery.start_soon(generate, "victim-1")
            await plan.fired()
        assert [answer.broken for answer in answers] == ["eof", "eof"]
        assert not worker.alive
        await worker.restart()
        assert (await fetch(network, worker.url, "/generate", body(rid="bystander"))).complete


async def test_a_killed_worker_refuses_from_that_moment_on() -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1) as worker:
        assert network.listening == {("worker", 1)}
        worker.kill()
        with pytest.raises(WorkerIsDead, match=r"worker:1 is dead .* `await worker.restart"):
            worker.kill()
        assert not network.listening
        assert worker.deaths == 1


@pytest.mark.parametrize("setup", [{"tokens_per_tick": 4}, {"stream_interval": 4}])
@pytest.mark.parametrize("where", [at_token(3), inside_json(4, 20)])
async def test_coalesced_tokens_are_split_where_a_fault_needs_it(setup: dict[str, int], where: Where) -> None:
    plan = FaultPlan.of(Fault(where, CLOSE))
    response, _ = await one(plan, body(sampling_params={"max_new_tokens": 9, "temperature": 0}), **setup)
    plan.verify()
    whole = [value["meta_info"]["completion_tokens"] for value in response.values()]
    assert whole[-1:] == ([3] if where.spot is Spot.AT_TOKEN else [1] if "stream_interval" in setup else [])


async def test_first_two_then_work() -> None:
    """The wish of Toxiproxy's users; and a plan in order of requests."""
    plan = FaultPlan.of(Fault(at_token(1), CLOSE, faults.first(2)))
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, faults=plan) as worker:
        complete = [(await fetch(network, worker.url, "/generate", body())).complete for _ in range(4)]
    assert complete == [False, False, True, True]
    assert plan.count() == 2
    plan = FaultPlan.in_order([None, (AT_HEAD, RESET), None])
    async with MockWorker.serve(network, "worker", 1, faults=plan) as worker:
        complete = [(await fetch(network, worker.url, "/generate", body())).complete for _ in range(4)]
    assert complete == [True, False, True, True]


async def test_faults_by_body() -> None:
    plan = FaultPlan.of(Fault(AT_HEAD, CLOSE, lambda seen: b'"marked"' in seen.body))
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, faults=plan) as worker:
        assert (await fetch(network, worker.url, "/generate", body())).complete
        assert not (await fetch(network, worker.url, "/generate", body(marked=1))).complete


@pytest.mark.parametrize("stream", [True, False])
async def test_no_fault_is_a_true_no_op(autojump_clock: trio.testing.MockClock, stream: bool) -> None:
    """Byte for byte, and in the same reads: no plan, an empty one, and one whose faults are for others."""
    wires = []
    for plan in (None, FaultPlan(), FaultPlan.in_order([None]), FaultPlan.of(Fault(at_token(2), RESET, faults.nth(9)))):
        network = SimNetwork(1)
        async with MockWorker.serve(network, "worker", 1, WorkerOptions(tick=0.5), plan) as worker:
            start = trio.current_time()
            response = await fetch(network, worker.url, "/generate", body(stream, rid="r"))
            assert response.complete
            # The wall clock goes on from one worker to the next; it shows in one field and in the head.
            masked = re.sub(rb'"response_sent_to_client_ts":[^}]*|date: [^\r]*', b"", response.wire)
            masked = re.sub(rb"\r\n[0-9a-f]+\r\n|content-length: \d+", b"", masked)
            wires.append((masked, len(response.parts), trio.current_time() - start))
    assert len(set(wires)) == 1


async def test_a_fault_that_never_happened_is_an_error() -> None:
    late, other = Fault(at_token(COUNT + 1), CLOSE, faults.nth(0)), Fault(AT_HEAD, CLOSE, faults.nth(1))
    plan = FaultPlan.of(late, other)
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, faults=plan) as worker:
        for _ in range(2):
            await fetch(network, worker.url, "/generate", body())
    assert (plan.count(late), plan.count(other)) == (0, 1)
    with pytest.raises(FaultNeverHappened, match=r"^close@token:5:0$"):
        plan.verify()


async def test_header_faults_only_if_allowed() -> None:
    network = SimNetwork()
    headers = {"x-mock-fault": "close@2"}
    for allowed in (True, False):
        async with MockWorker.serve(network, "worker", 1, WorkerOptions(allow_header_faults=allowed)) as worker:
            response = await fetch(network, worker.url, "/generate", body(), headers=headers)
            assert response.complete != allowed
            assert len(response.events()) == (2 if allowed else COUNT + 1)
            assert worker.faults.count() == allowed


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill@12", Fault(at_token(12), KILL_WORKER)),
        ("reset@head", Fault(AT_HEAD, RESET)),
        ("503@head", Fault(AT_HEAD, faults.status(503))),
        ("abort500@3", Fault(at_token(3), faults.abort_event(500))),
        ("abort@0", Fault(at_token(0), faults.abort_event(None))),
        ("stall@last_token", Fault(AFTER_LAST_TOKEN, STALL)),
        ("close@finish", Fault(AFTER_FINISH, CLOSE)),
        ("garbage@last_chunk", Fault(BEFORE_LAST_CHUNK, faults.GARBAGE)),
        ("empty_200@head", Fault(AT_HEAD, faults.EMPTY_200)),
        ("close@done", Fault(AFTER_DONE, CLOSE)),
    ],
)
def test_short_spelling(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize("text", ["kill", "wibble@3", "kill@x", "503@4", "empty_200@finish", "abort500@head"])
def test_impossible_faults_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_fault(text)


def test_only_whole_tokens_are_counted_from_the_end() -> None:
    with pytest.raises(ValueError, match="reset cannot happen at json"):
        Fault(inside_json(-1, 3), RESET)


def test_every_kind_and_place_is_tested_here() -> None:
    tested = {*ENDS, STALL, faults.GARBAGE, faults.EMPTY_200, faults.COMMENTS_ONLY, faults.delay(1)}
    of_http = set(Kind) - faults.GRPC_ONLY  # see tests/grpc_engine for the others
    assert {what.kind for what in tested} | {Kind.STATUS, Kind.ABORT_EVENT} == of_http
    of_pairs = {Spot.AT_BOOTSTRAP, Spot.IN_TRANSFER, Spot.AFTER_TRANSFER}  # see test_pair_faults.py
    assert {where.spot for where in STREAM_PLACES} | {Spot.BEFORE_ACCEPT} | of_pairs == set(Spot)


async def test_the_wire_after_a_reset_is_an_error_for_whoever_writes() -> None:
    plan = FaultPlan.of(Fault(AT_HEAD, RESET))
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1, faults=plan):
        connection = await network.connect("worker", 1)
        assert (await ask(connection, "/generate", body())).broken == "reset"
        with pytest.raises(ConnectionBroken):
            await connection.send(b"more")


async def test_errors_of_the_block_and_of_listening_are_not_wrapped() -> None:
    network = SimNetwork()
    async with MockWorker.serve(network, "worker", 1):
        with pytest.raises(OSError, match="in use"):
            async with MockWorker.serve(network, "worker", 1):
                pass
    with pytest.raises(ZeroDivisionError):
        async with MockWorker.serve(network, "worker", 1):
            raise ZeroDivisionError
