"""Deaths behind a sidecar, and of sidecars: to the proxy they are what deaths of workers are."""

from __future__ import annotations

import pytest
import trio

from dyn_relay.net import RECEIVE_SIZE
from dyn_testkit.between import ConnectionBetween, NetworkBetween
from dyn_testkit.faults import (
    AFTER_DONE,
    AFTER_FINISH,
    AFTER_LAST_TOKEN,
    AT_HEAD,
    BEFORE_LAST_CHUNK,
    CLOSE,
    GARBAGE,
    KILL_WORKER,
    RESET,
    STALL,
    Fault,
    FaultPlan,
    abort_event,
    at_token,
    first,
    inside_chunk_size,
    inside_json,
    status,
)
from dyn_testkit.relay import until
from dyn_testkit.sidecar import open_sidecar
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker, WorkerOptions
from tests.relay.bodies import ORACLE, generate
from tests.relay.harness import judged, world
from tests.sidecar.harness import sided

SLOW = WorkerOptions(tick=1.0)
RID = "a" * 32


def told(relay):
    """What a trace row says of its attempts, but for names and times."""
    [row] = relay.rows
    attempts = [(one["cause"], one["tokens"]) for one in row["attempts"]]
    return row["outcome"], row["migratable"], row["completion_tokens"], attempts


WHAT = {"reset": RESET, "close": CLOSE, "kill": KILL_WORKER}
WHERE = {
    "at the head": AT_HEAD,
    "after the head": at_token(0),
    "at token 1": at_token(1),
    "at token 4": at_token(4),
    "inside JSON": inside_json(3, 20),
    "inside a chunk's size": inside_chunk_size(3),
    "after the last token": AFTER_LAST_TOKEN,
    "after the finish": AFTER_FINISH,
    "before the last chunk": BEFORE_LAST_CHUNK,
    "after all": AFTER_DONE,
}
WORDS = {
    "500": (AT_HEAD, status(500)),
    "503": (AT_HEAD, status(503)),
    "400": (AT_HEAD, status(400)),
    "an abort": (at_token(3), abort_event(503)),
    "somebody's abort": (at_token(3), abort_event(None)),
    "garbage at the head": (AT_HEAD, GARBAGE),
    "garbage after a token": (at_token(2), GARBAGE),
}
FAULTS = {f"{what}, {where}": (at, it) for where, at in WHERE.items() for what, it in WHAT.items()} | WORDS


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_a_fault_behind_a_sidecar_is_what_it_is_without(autojump_clock, fault, stream):
    """The client's bytes, the verdict, and the cause and the tokens of each attempt."""
    seen = []
    for beside in (False, True):
        plans = [FaultPlan.of(Fault(*fault, first(1))), FaultPlan.of(Fault(*fault, first(1))), None]
        body = generate(8, stream=stream, rid=RID)
        if beside:
            async with sided(3, plans=plans, policy="round_robin") as w:
                got, relay = await w.relay.ask(body), w.relay
                await relay.quiet()
        else:
            async with world(plans=plans, policy="round_robin") as relay:
                got = await relay.ask(body)
                await relay.quiet()
        assert plans[0].count() == 1
        seen.append((got.status, got.complete, judged(got, body, ORACLE), told(relay)))
    direct, bridged = seen
    if fault == (AT_HEAD, GARBAGE):  # a sidecar says 502 to it
        *others, (*same, attempts) = direct
        direct = (*others, (*same, [("failed" if cause == "garbage" else cause, count) for cause, count in attempts]))
    assert bridged == direct


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
async def test_an_engine_s_death_is_a_cut_within_a_second(autojump_clock, reset):
    async with sided(2, options=SLOW) as w, trio.open_nursery() as nursery:
        body, answers = generate(20), []

        async def ask():
            answers.append(await w.relay.ask(body))

        nursery.start_soon(ask)
        await until(lambda: any(worker.live for worker in w.workers))
        await trio.sleep(5)
        one, two = sorted(w.workers, key=lambda worker: -worker.live)
        one.kill(reset=reset)
        began = trio.current_time()
        await until(lambda: two.generates)
        assert trio.current_time() - began < 1
        await until(lambda: answers)
        assert judged(answers[0], body, ORACLE) == []
        await w.relay.quiet()
        assert [attempt["cause"] for attempt in w.relay.rows[0]["attempts"]] == ["cut", None]


class Undead(NetworkBetween):
    """An engine's: of the connection over which a generation came nobody hears the end."""

    async def accepted(self, connection):
        return _Undead(connection)


class _Undead(ConnectionBetween):
    async def receive(self, max_bytes=RECEIVE_SIZE):
        data = await super().receive(max_bytes)
        if data.startswith(b"POST /generate "):
            self.close = self.abort = lambda: None
        return data


async def test_a_stream_whose_own_connection_survives_its_engine_is_cut_within_a_second(autojump_clock):
    network, answers = SimNetwork(1), []
    async with (
        MockWorker.serve(Undead(network), "w1", 30000, SLOW) as worker,
        open_sidecar(network, worker.url, (), "side:31000") as host,
        trio.open_nursery() as nursery,
    ):
        await host.sidecar.open.wait()

        async def ask():
            answers.append((await host.ask(generate(20)), trio.current_time()))

        nursery.start_soon(ask)
        await until(lambda: worker.live)
        await trio.sleep(5)
        worker.kill()
        began = trio.current_time()
        await until(lambda: answers)
        [(got, at)] = answers
        assert 0.3 < at - began < 1, "what its connections still hold is delivered, and no more is waited for"
        assert (got.status, got.complete) == (200, False)


async def test_a_sidecar_s_death_is_a_cut_and_its_engine_lives(autojump_clock):
    async with sided(2, options=SLOW) as w, trio.open_nursery() as nursery:
        body, answers = generate(20), []

        async def ask():
            answers.append(await w.relay.ask(body))

        nursery.start_soon(ask)
        await until(lambda: any(worker.live for worker in w.workers))
        await trio.sleep(5)
        first_ = next(number for number, worker in enumerate(w.workers) if worker.live)
        w.sidecars[first_].kill()
        began = trio.current_time()
        await until(lambda: w.workers[1 - first_].generates)
        assert trio.current_time() - began < 1
        await until(lambda: not w.workers[first_].live)
        assert trio.current_time() - began < 2, "its engine does not go on for nobody"
        await until(lambda: answers)
        assert judged(answers[0], body, ORACLE) == []
        await w.relay.quiet()
        assert w.workers[first_].alive


async def test_an_engine_s_death_while_it_is_idle_costs_no_request(autojump_clock):
    """The port is closed by then: a dial is refused, nothing was sent, so also what may not be moved goes elsewhere."""
    async with sided(2, policy="round_robin") as w:
        w.workers[0].kill()
        await trio.sleep(0.3)
        for _ in range(4):
            got = await w.relay.ask(generate(3, session_params={"id": "s"}))
            assert (got.status, got.header("x-dyn-relay-migratable")) == (200, "no; reason=session_params")
        assert len(w.workers[1].generates) == 4


async def test_silence_behind_a_sidecar_is_silence(autojump_clock):
    """The stream stalls; the proxy gives the worker up by its own clock, and not before."""
    plan = FaultPlan.of(Fault(at_token(3), STALL, first(1)))
    async with sided(2, plans=[plan, plan], stall_timeout_secs=30) as w:
        body, answers = generate(8), []

        async def ask():
            answers.append(await w.relay.ask(body))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await plan.fired()
            stalled = next(worker for worker in w.workers if worker.generates)
            stalled.freeze()
            await trio.sleep(25)
            assert sum(len(worker.generates) for worker in w.workers) == 1
        assert judged(answers[0], body, ORACLE) == []
        await w.relay.quiet()
        assert w.relay.rows[0]["attempts"][0]["cause"] == "stall"


async def test_a_client_that_leaves_frees_the_engine_within_a_second(autojump_clock):
    async with sided(1, options=SLOW) as w:
        connection = await w.network.connect("proxy0", 30000)
        data = b'{"input_ids":[5,6],"sampling_params":{"max_new_tokens":99,"ignore_eos":true},"stream":true}'
        head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        await connection.send(head % len(data) + data)
        await until(lambda: w.workers[0].live)
        await trio.sleep(3)
        connection.close()
        began = trio.current_time()
        await until(lambda: not w.workers[0].live)
        assert trio.current_time() - began < 1.5
        await until(lambda: not w.sidecars[0].sidecar.reservations.held)


async def test_an_abort_reaches_the_engine(autojump_clock):
    async with sided(1, options=SLOW) as w:
        answers = []

        async def ask():
            answers.append(await w.relay.ask(generate(50, rid=RID)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: w.workers[0].live)
            await trio.sleep(3)
            assert (await w.relay.ask({"rid": RID}, "/abort_request")).status == 200
        assert answers[0].values()[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert w.workers[0].aborts


async def test_a_request_that_kills_its_engine_is_found_out(autojump_clock):
    """Poison: the proxy must see through the sidecar that the engine is dead, not that somebody answers for it."""
    kill = Fault(AT_HEAD, KILL_WORKER, lambda seen: b"[666" in seen.body)
    async with sided(3, plans=[FaultPlan.of(kill) for _ in range(3)]) as w:
        got = await w.relay.ask(generate(4) | {"input_ids": [666, 667]})
        assert got.status >= 500 or not got.complete or b"poison" in got.body
        assert sum(not worker.alive for worker in w.workers) == 2, "one, and the one more that is risked"
