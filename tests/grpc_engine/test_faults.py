"""Every fault of a worker's plan on gRPC: as its own frames show it, and as grpcio sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import trio
from trio.testing import MockClock

from dyn_relay.grpc import methods
from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.sockets import open_network
from dyn_testkit import faults
from dyn_testkit.faults import Fault, FaultNeverHappened, FaultPlan, Kind, What, Where, nth, parse_fault
from dyn_testkit.grpc.client import ask, open_client
from dyn_testkit.worker import MockWorker, WorkerOptions
from tests.grpc_engine.engine_kit import MODEL, engine, generate, wanted

TOKENS = 8
OK, CANCELLED, UNKNOWN, EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 0, 1, 2, 8, 12, 13, 14
#: Dies with its worker, or with its connection.
GONE = (UNAVAILABLE,)


@dataclass(frozen=True)
class Case:
    """A fault; how the call ends, its status, its whole messages; grpcio's status."""

    where: Where
    what: What
    ended: str
    status: int | None
    messages: int
    grpcio: int

    @property
    def name(self) -> str:
        return str(Fault(self.where, self.what))


def case(where: Where, what: What, ended: str, status: int | None, messages: int, grpcio: int, **more: Any) -> Case:
    return Case(where, what, ended, status, messages, grpcio, **more)


HEAD, DONE = faults.AT_HEAD, TOKENS
CASES = [
    # Connections.
    *(
        case(where, what, ended, None, messages, UNAVAILABLE)
        for where, messages in (
            (HEAD, 0),
            (faults.at_token(0), 0),
            (faults.at_token(1), 1),
            (faults.at_token(-1), 7),
            (faults.inside_chunk_size(3), 2),
            (faults.inside_json(3, 10), 2),
            (faults.inside_json(3, 10**6), 2),
            (faults.AFTER_LAST_TOKEN, 8),
            (faults.AFTER_FINISH, 8),
            (faults.BEFORE_LAST_CHUNK, 8),
        )
        for what, ended in ((faults.RESET, "reset"), (faults.CLOSE, "eof"), (faults.KILL_WORKER, "eof"))
    ),
    case(faults.AFTER_DONE, faults.RESET, "end", 0, 8, OK),
    case(faults.AFTER_DONE, faults.KILL_WORKER, "end", 0, 8, OK),
    # Statuses.
    case(HEAD, faults.grpc_status(14), "end", 14, 0, UNAVAILABLE),
    case(faults.at_token(3), faults.grpc_status(13), "end", 13, 3, INTERNAL),
    case(faults.at_token(3), faults.grpc_status(8), "end", 8, 3, EXHAUSTED),
    case(faults.AFTER_FINISH, faults.grpc_status(14), "end", 14, 8, UNAVAILABLE),
    case(faults.inside_json(3, 4), faults.grpc_status(14), "end", 14, 2, UNAVAILABLE),
    case(HEAD, faults.status(503), "end", None, 0, UNAVAILABLE),
    case(HEAD, faults.status(500), "end", None, 0, UNKNOWN),
    case(HEAD, faults.status(401), "end", None, 0, 16),
    case(HEAD, faults.EMPTY_200, "end", 0, 0, OK),
    case(HEAD, faults.COMMENTS_ONLY, "end", 0, 0, OK),
    # RST_STREAM, by HTTP/2 code.
    case(HEAD, faults.rst_stream(7), "rst_stream 7", None, 0, UNAVAILABLE),
    case(faults.at_token(0), faults.rst_stream(2), "rst_stream 2", None, 0, INTERNAL),
    case(faults.at_token(4), faults.rst_stream(8), "rst_stream 8", None, 4, CANCELLED),
    case(faults.at_token(4), faults.rst_stream(11), "rst_stream 11", None, 4, EXHAUSTED),
    case(faults.AFTER_FINISH, faults.rst_stream(0), "rst_stream 0", None, 8, INTERNAL),
    # GOAWAY.
    case(faults.at_token(2), faults.goaway(11), "eof", None, 2, UNAVAILABLE),
    case(faults.at_token(2), faults.goaway(0), "eof", None, 2, UNAVAILABLE),
    case(faults.at_token(2), faults.DRAIN, "end", 0, 8, OK),
    case(HEAD, faults.UNPROCESSED, "eof", None, 0, UNAVAILABLE),
    # Frames that are none.
    case(faults.at_token(2), faults.BAD_LENGTH, "end", 0, 2, EXHAUSTED),
    case(faults.at_token(2), faults.TRUNCATED, "end", 0, 2, OK),
    case(faults.at_token(2), faults.COMPRESSED, "end", 0, 3, INTERNAL),
    case(faults.at_token(2), faults.NOT_PROTOBUF, "end", 0, 3, INTERNAL),
    case(faults.at_token(2), faults.NO_TRAILERS, "end", None, 2, UNKNOWN),
    case(HEAD, faults.NO_TRAILERS, "end", None, 0, UNKNOWN),
    # The scheduler's.
    case(faults.at_token(3), faults.abort_event(503), "end", 0, 4, OK),
    case(faults.at_token(0), faults.abort_event(None), "end", 0, 1, OK),
    # Time.
    case(faults.at_token(3), faults.delay(50), "end", 0, 8, OK),
    case(HEAD, faults.delay(50), "end", 0, 8, OK),
]
NAMED = pytest.mark.parametrize("case", CASES, ids=lambda one: one.name)


def request(**more: Any) -> pb.GenerateRequest:
    return wanted(TOKENS, **more)


@NAMED
async def test_its_frames(case: Case, autojump_clock: MockClock) -> None:
    plan = FaultPlan.in_order([(case.where, case.what)])
    async with engine(plan) as worker:
        answer = await generate(worker, request())
        plan.verify()
        assert (answer.ended, answer.status) == (case.ended, case.status)
        assert len(answer.frames) == case.messages
        assert any(flag for flag, _ in answer.frames) == (case.what is faults.COMPRESSED)
        assert worker.deaths == (case.what is faults.KILL_WORKER)
        if worker.deaths:
            await worker.restart()
        again = await generate(worker, request())
        assert (again.status, len(again.messages)) == (OK, TOKENS)
        if case.what.kind not in ODD:
            assert ids(answer)[:TOKENS] == ids(again)[: case.messages]
        assert worker.disconnects == 0


#: Among its messages is one that is none, or one that no undisturbed answer has.
ODD = {Kind.COMPRESSED, Kind.NOT_PROTOBUF, Kind.ABORT_EVENT}


def ids(answer: Any) -> list[list[int]]:
    return [list(message.output_ids) for message in answer.messages]


def over_grpcio(port: int, message: pb.GenerateRequest, method: Any = methods.GENERATE) -> tuple[int, int, str]:
    """grpcio's status and number of messages, and its words."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_retries", 0)]) as channel:
        call = channel.unary_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )(message, timeout=30)
        seen = 0
        try:
            for _ in call:
                seen += 1
        except grpc.RpcError:
            pass
        return call.code().value[0], seen, call.details()


@NAMED
async def test_as_grpcio_sees_it(case: Case) -> None:
    plan = FaultPlan.in_order([(case.where, case.what)])
    options = WorkerOptions(model=MODEL, grpc_port=0)
    async with open_network() as network, MockWorker.serve(network, options=options, faults=plan) as worker:
        code, seen, words = await trio.to_thread.run_sync(over_grpcio, worker.grpc_port, request())
        plan.verify()
    # What grpcio has not handed over yet when a call fails, it drops.
    assert code == case.grpcio, words
    assert seen == case.messages if code == OK else seen <= case.messages


async def test_a_stall_lasts_until_it_is_released(autojump_clock: MockClock) -> None:
    stalled = Fault(faults.at_token(3), faults.STALL, nth(0))
    plan = FaultPlan.of(stalled)
    async with engine(plan) as worker, open_client(worker.network, worker.grpc_url) as client:
        call = await client.call(methods.GENERATE, request())
        await plan.fired(stalled)
        await trio.sleep(100)
        assert (len(call.frames), call.ended) == (3, "")
        plan.release()
        await call.done()
        assert (call.status, len(call.messages)) == (OK, TOKENS)


async def test_a_goaway_takes_only_its_own_connection(autojump_clock: MockClock) -> None:
    """The others on it go too, or on, as its kind says; who is on another connection notices nothing."""
    for what, beside, later in ((faults.goaway(11), "eof", "eof"), (faults.UNPROCESSED, "end", "eof")):
        plan = FaultPlan.of(Fault(faults.at_token(3), what, nth(1)))
        async with engine(plan, tick=1.0) as worker:
            async with (
                open_client(worker.network, worker.grpc_url) as client,
                open_client(worker.network, worker.grpc_url) as other,
            ):
                calls = [await client.call(methods.GENERATE, request()) for _ in range(3)]
                alone = await other.call(methods.GENERATE, request())
                for call in (*calls, alone):
                    await call.done()
            assert [call.ended for call in (*calls, alone)] == [beside, "eof", later, "end"]
            assert client.goaways == [(calls[2].stream if beside == "eof" else calls[0].stream, what.code or 0)]
            assert len(calls[0].messages) == (TOKENS if beside == "end" else 3)
            assert worker.disconnects == 0


async def test_a_drain_spares_calls_and_refuses_later_ones(autojump_clock: MockClock) -> None:
    plan = FaultPlan.of(Fault(faults.at_token(3), faults.DRAIN, nth(0)))
    async with engine(plan, tick=1.0) as worker, open_client(worker.network, worker.grpc_url) as client:
        calls = [await client.call(methods.GENERATE, request()) for _ in range(2)]
        await plan.fired()
        late = await client.call(methods.GENERATE, request())
        for call in (*calls, late):
            await call.done()
        assert [call.status for call in calls] == [OK, OK]
        assert (late.ended, late.headers, client.goaways) == ("eof", {}, [(calls[1].stream, 0)])
        assert len(worker.generates) == 2


@pytest.mark.parametrize(
    ("where", "broken"),
    [
        (HEAD, lambda client, call: client.nonsense.endswith(b"\0\0?")),
        (faults.inside_chunk_size(2), lambda client, call: call.data[-5:] == b"\xff" * 5 and len(call.frames) == 1),
        (faults.inside_json(2, 6), lambda client, call: len(call.frames) == 2 and not parses(call)),
        (faults.at_token(2), lambda client, call: len(call.frames) == 3 and not parses(call)),
    ],
)
async def test_garbage_then_silence(
    where: Where, broken: Callable[[Any, Any], bool], autojump_clock: MockClock
) -> None:
    plan = FaultPlan.of(Fault(where, faults.GARBAGE))
    async with engine(plan) as worker, open_client(worker.network, worker.grpc_url) as client:
        call = await client.call(methods.GENERATE, request())
        await plan.fired()
        await trio.sleep(100)
        assert broken(client, call)
        assert call.ended == ("nonsense" if where is HEAD else "")


def parses(call: Any) -> bool:
    try:
        return bool(call.messages)
    except Exception:
        return False


@pytest.mark.parametrize(
    ("what", "ended"), [(faults.RESET, "reset"), (faults.CLOSE, "eof"), (faults.KILL_WORKER, "eof")]
)
async def test_a_connection_that_is_never_read(what: What, ended: str, autojump_clock: MockClock) -> None:
    plan = FaultPlan.of(Fault(faults.BEFORE_ACCEPT, what, nth(0)))
    async with engine(plan) as worker:
        answer = await generate(worker, request())
        assert (answer.ended, answer.headers, worker.generates) == (ended, {}, [])
    plan.verify()


async def test_faults_of_grpc_are_not_for_http(autojump_clock: MockClock) -> None:
    plan = FaultPlan.of(Fault(faults.at_token(2), faults.rst_stream(2)))
    async with engine(plan) as worker:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}, "stream": True}
        assert (await worker.ask(body)).complete
        with pytest.raises(FaultNeverHappened):
            plan.verify()
        assert (await generate(worker, request())).ended == "rst_stream 2"
        plan.verify()


async def test_a_unary_answer_is_cut_in_its_message(autojump_clock: MockClock) -> None:
    for where, sent in ((faults.inside_chunk_size(1), 2), (faults.inside_json(1, 7), 12)):
        plan = FaultPlan.in_order([(where, faults.RESET)])
        async with engine(plan) as worker:
            answer = await generate(worker, request(stream=False))
        plan.verify()
        assert (answer.ended, len(answer.data)) == ("reset", sent)


async def test_an_abort_of_a_unary_call_tells_its_status(autojump_clock: MockClock) -> None:
    plan = FaultPlan.in_order([(faults.at_token(3), faults.abort_event(500))])
    async with engine(plan) as worker:
        answer = await generate(worker, request(stream=False))
    assert (answer.status, answer.message) == (INTERNAL, "500: Injected abort")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("grpc14@3", Fault(faults.at_token(3), faults.grpc_status(14))),
        ("rst_stream7@head", Fault(HEAD, faults.rst_stream(7))),
        ("goaway11@5", Fault(faults.at_token(5), faults.goaway(11))),
        ("goaway@5", Fault(faults.at_token(5), faults.GOAWAY)),
        ("delay250@2", Fault(faults.at_token(2), faults.delay(250))),
        ("drain@1", Fault(faults.at_token(1), faults.DRAIN)),
        ("unprocessed@head", Fault(HEAD, faults.UNPROCESSED)),
        ("no_trailers@finish", Fault(faults.AFTER_FINISH, faults.NO_TRAILERS)),
    ],
)
async def test_the_short_spelling(text: str, fault: Fault, autojump_clock: MockClock) -> None:
    assert parse_fault(text).what == fault.what
    assert parse_fault(text).where == fault.where
    async with engine(allow_header_faults=True) as worker:
        await generate(worker, request(), [("x-mock-fault", text)])
        assert [firing.fault.what for firing in worker.faults.firings] == [fault.what]
    async with engine() as worker:
        assert (await generate(worker, request(), [("x-mock-fault", text)])).status == OK


@pytest.mark.parametrize("text", ["grpc@3", "rst_stream@3", "delay@1", "truncated7@2", "goaway"])
async def test_a_spelling_that_is_none(text: str, autojump_clock: MockClock) -> None:
    with pytest.raises(ValueError, match=r"fault"):
        parse_fault(text)
    async with engine(allow_header_faults=True) as worker:
        answer = await generate(worker, request(), [("x-mock-fault", text)])
    assert (answer.status, answer.message.partition(":")[0]) == (3, "x-mock-fault")


async def test_the_selector_sees_the_body(autojump_clock: MockClock) -> None:
    plan = FaultPlan.of(
        Fault(HEAD, faults.grpc_status(14), lambda seen: seen.grpc and json.loads(seen.body)["rid"] == seen.rid == "b")
    )
    async with engine(plan) as worker:
        statuses = [(await generate(worker, request(rid=rid))).status for rid in "abc"]
        beside = await ask(worker.network, worker.grpc_url, methods.HEALTH_CHECK, pb.HealthCheckRequest())
    assert statuses == [OK, UNAVAILABLE, OK]
    assert beside.status == OK
