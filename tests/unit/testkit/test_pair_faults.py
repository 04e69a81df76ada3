"""Faults on purpose at the places that only the legs of a pair have, and what the other leg makes of them."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing
from mock_worker_kit import ORACLE, body
from pair_kit import failure, real, simulated, value

from dyn_testkit import faults
from dyn_testkit.client import Response
from dyn_testkit.faults import AFTER_TRANSFER, AT_BOOTSTRAP, IN_TRANSFER, Fault, FaultPlan, What, Where, parse_fault
from dyn_testkit.fleet import Pair
from dyn_testkit.simnet import SimNetwork
from dyn_testkit.worker import MockWorker

ROLES = ("prefill", "decode")
PLACES = (AT_BOOTSTRAP, IN_TRANSFER, AFTER_TRANSFER)
KINDS = (faults.KILL_WORKER, faults.CLOSE, faults.RESET, faults.STALL, faults.GARBAGE, faults.abort_event(503))
TIMED_OUT = {"prefill": "timed out after 300.0s in KVPoll.Bootstrapping", "decode": "in KVPoll.WaitingForInput"}


def plans(role: str, where: Where, what: What) -> tuple[FaultPlan, FaultPlan]:
    """The second request has this fault: by the first the workers know each other."""
    plan = FaultPlan.of(Fault(where, what, faults.nth(1)))
    return (plan, FaultPlan()) if role == "prefill" else (FaultPlan(), plan)


def fate(role: str, where: Where, what: What) -> str:
    """How the other leg ends: a piece of its message, or "" if it is whole."""
    if where == AFTER_TRANSFER:
        return ""
    if role == "prefill":
        return "Lost connection" if what == faults.KILL_WORKER else TIMED_OUT["decode"]
    if where == AT_BOOTSTRAP:
        return TIMED_OUT["prefill"]
    silent = what in (faults.KILL_WORKER, faults.STALL, faults.GARBAGE)
    return "Decode instance could be dead" if silent else "unknown reason from another rank"


async def other_leg(pair: Pair, plan: FaultPlan, role: str, stream: bool) -> tuple[Response, Response | None]:
    """Ask; the answer of the leg without the fault, and the other one if there is one."""
    answers: dict[str, Response] = {}
    asked = pair.body(body(6, stream=stream))
    ended = {name: trio.Event() for name in ROLES}

    async def ask(name: str) -> None:
        answers[name] = await getattr(pair, name).ask(asked)
        ended[name].set()

    async with trio.open_nursery() as nursery:
        for name in ROLES:
            nursery.start_soon(ask, name)
        with trio.fail_after(1000):
            await plan.fired()
            await ended["decode" if role == "prefill" else "prefill"].wait()
        with trio.move_on_after(1):
            await ended[role].wait()
        nursery.cancel_scope.cancel()
    return answers["decode" if role == "prefill" else "prefill"], answers.get(role)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", KINDS, ids=lambda what: what.kind.value)
@pytest.mark.parametrize("where", PLACES, ids=lambda where: where.spot.value)
@pytest.mark.parametrize("role", ROLES)
async def test_each_fault_at_each_place(
    autojump_clock: trio.testing.MockClock, role: str, where: Where, what: What, stream: bool
) -> None:
    both = plans(role, where, what)
    plan = both[ROLES.index(role)]
    async with simulated(both) as pair:
        await pair.ask(body(2))
        other, own = await other_leg(pair, plan, role, stream)
        plan.verify()
        wanted = fate(role, where, what)
        if wanted:
            assert wanted in failure(other)[1]
        else:
            ids = ORACLE.answer(body(6))["output_ids"]
            assert value(other)["output_ids"] == (ids if role == "prefill" else ids[:1])
        if what in (faults.STALL, faults.GARBAGE):
            assert own is None
        elif what == faults.abort_event(503):
            assert own is not None
            assert failure(own) == (503, "Injected abort")
        else:
            assert own is not None
            assert not own.complete
            assert own.values() == [] if stream else own.wire == b""
        for worker in (pair.prefill, pair.decode):
            assert worker.alive or (worker is getattr(pair, role) and what == faults.KILL_WORKER)
            if not worker.alive:
                await worker.restart()
            with trio.fail_after(1):
                await worker.scheduler.idle()
            assert worker.scheduler.running == 0
        _, decode = await pair.ask(body(6))
        assert value(decode)["output_ids"] == ORACLE.answer(body(6))["output_ids"]


@pytest.mark.parametrize("where", PLACES, ids=lambda where: where.spot.value)
@pytest.mark.parametrize("role", ROLES)
async def test_a_stall_that_ends(autojump_clock: trio.testing.MockClock, role: str, where: Where) -> None:
    both = plans(role, where, faults.STALL)
    plan = both[ROLES.index(role)]
    async with simulated(both) as pair:
        await pair.ask(body(2))
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def release() -> None:
                with trio.fail_after(1000):
                    await plan.fired()
                await trio.sleep(100)
                plan.release()

            nursery.start_soon(release)
            prefill, decode = await pair.ask(body(6))
        assert 100 < trio.current_time() - began < 120
        ids = ORACLE.answer(body(6))["output_ids"]
        assert (value(prefill)["output_ids"], value(decode)["output_ids"]) == (ids[:1], ids)


@pytest.mark.parametrize("where", PLACES, ids=lambda where: where.spot.value)
async def test_prefill_dies_over_real_sockets(where: Where) -> None:
    both = plans("prefill", where, faults.KILL_WORKER)
    async with real(both, heartbeat=0.05) as pair:
        await pair.ask(body(2))
        prefill, decode = await pair.ask(body(6))
        assert not prefill.complete
        wanted = fate("prefill", where, faults.KILL_WORKER)
        assert wanted in failure(decode)[1] if wanted else decode.status == 200
        assert pair.decode.live == 0
    both[0].verify()


@pytest.mark.parametrize("where", PLACES, ids=lambda where: where.spot.value)
async def test_decode_is_cut_over_real_sockets(where: Where) -> None:
    plan = FaultPlan.of(Fault(where, faults.CLOSE))
    patience = {"bootstrap_timeout": 0.2} if where == AT_BOOTSTRAP else {}
    async with real((None, plan), **patience) as pair:
        prefill, decode = await pair.ask(body(6))
        assert not decode.complete
        wanted = fate("decode", where, faults.CLOSE).replace("300.0s", "0.2s")
        assert wanted in failure(prefill)[1] if wanted else prefill.status == 200
        assert pair.prefill.live == 0
    plan.verify()


@pytest.mark.parametrize("token", [1, 3, -2, math.inf])
async def test_the_places_of_tokens_are_there_as_ever(autojump_clock: trio.testing.MockClock, token: float) -> None:
    """Of prefill's only token, and of decode's; inf: between the last one and its finish."""
    where = faults.AFTER_LAST_TOKEN if token == math.inf else faults.at_token(int(token))
    for role in ROLES:
        plan = FaultPlan.of(Fault(where, faults.CLOSE))
        async with simulated((plan, None) if role == "prefill" else (None, plan)) as pair:
            answers = await pair.ask(body(6, stream=True))
        got = answers[ROLES.index(role)]
        if role == "prefill" and token in (3, -2):
            assert got.complete
            assert plan.missing
            continue
        plan.verify()
        assert not got.complete
        count = {"prefill": {1: 1, math.inf: 1}, "decode": {1: 1, 3: 3, -2: 4, math.inf: 6}}[role][token]
        assert len(got.values()[-1]["output_ids"]) == count


@pytest.mark.parametrize(
    ("text", "where"),
    [("kill@bootstrap", AT_BOOTSTRAP), ("kill@transfer", IN_TRANSFER), ("kill@transferred", AFTER_TRANSFER)],
)
def test_short_spelling(text: str, where: Where) -> None:
    assert parse_fault(text) == Fault(where, faults.KILL_WORKER)


@pytest.mark.parametrize("where", PLACES)
def test_no_status_once_the_head_may_be_out(where: Where) -> None:
    with pytest.raises(ValueError, match="cannot happen"):
        Fault(where, faults.status(503))


async def test_one_worker_alone_never_comes_to_these_places() -> None:
    plan = FaultPlan.of(*(Fault(where, faults.CLOSE) for where in PLACES))
    async with MockWorker.serve(SimNetwork(), "worker", 1, faults=plan) as worker:
        assert (await worker.ask(body(3, bootstrap_host="there", bootstrap_room=1))).complete
    assert plan.missing == list(plan.faults)
    assert worker.rooms == []
