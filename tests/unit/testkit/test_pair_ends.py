"""How the legs of a pair end before their time: timeouts, aborts, clients that leave, workers that die."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
import trio.testing
from mock_worker_kit import MODEL, ORACLE, body
from pair_kit import failure, real, simulated, value

from dyn_testkit.client import Response
from dyn_testkit.fleet import Pair
from dyn_testkit.worker import MockWorker, Phase

ROOM = 77


@dataclass
class Running:
    """A pair with one request on its way, each leg with a rid and a client of its own."""

    pair: Pair
    answers: dict[str, Response] = field(default_factory=dict)
    clients: dict[str, trio.CancelScope] = field(default_factory=dict)

    def worker(self, role: str) -> MockWorker:
        found: MockWorker = getattr(self.pair, role)
        return found

    async def leg(self, role: str, asked: dict[str, Any], task_status: trio.TaskStatus[None]) -> None:
        with trio.CancelScope() as self.clients[role]:
            task_status.started()
            self.answers[role] = await self.worker(role).ask(asked | {"rid": role})


@asynccontextmanager
async def running(pair: Pair, *roles: str, stream: bool = False) -> AsyncIterator[Running]:
    """Send these legs of a request; its answers are there at the end of the block."""
    request = Running(pair)
    asked = pair.body(body(8, bootstrap_room=ROOM, stream=stream))
    async with trio.open_nursery() as nursery:
        for role in roles:
            await nursery.start(request.leg, role, asked)
        yield request


def free(pair: Pair) -> bool:
    """Nothing holds a slot, or waits for one."""
    schedulers = (pair.prefill.scheduler, pair.decode.scheduler)
    return not any(scheduler.live or scheduler.running or scheduler.waiting for scheduler in schedulers)


async def works(pair: Pair) -> bool:
    """Another request is answered whole."""
    _, decode = await pair.ask(body(8))
    return bool(value(decode)["output_ids"] == ORACLE.answer(body(8))["output_ids"])


#: Where a leg is when something happens to it: the legs that there are, whose it is, and the phase that it has reached.
ALONE = [(("prefill",), "prefill", Phase.BOOTSTRAP), (("decode",), "decode", Phase.TRANSFER)]
BOTH = ("prefill", "decode")
TOGETHER = [(BOTH, "prefill", Phase.TRANSFER), (BOTH, "decode", Phase.TRANSFER)]
NAMES = {Phase.BOOTSTRAP: "Prefill bootstrap", Phase.TRANSFER: "{} transfer"}


def begins(role: str, phase: Phase) -> str:
    where = "req" if role == "prefill" else "decode_req.req"
    what = NAMES[phase].format(role.capitalize())
    return f"{what} failed for request rank=0 {where}.rid='{role}' {where}.bootstrap_room={ROOM} with exception "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("roles", "role", "phase"), ALONE)
async def test_a_leg_alone_waits_for_its_timeout(
    autojump_clock: trio.testing.MockClock, roles: tuple[str, ...], role: str, phase: Phase, stream: bool
) -> None:
    """I3"""
    async with simulated() as pair:
        async with running(pair, *roles, stream=stream) as request:
            pass
        assert trio.current_time() == 300
        status, message = failure(request.answers[role])
        state = {"prefill": "Bootstrapping", "decode": "WaitingForInput"}[role]
        reason = f"KVTransferError(bootstrap_room={ROOM}): Request {ROOM} timed out after 300.0s in KVPoll.{state}"
        assert (status, message) == (500, begins(role, phase) + reason)
        assert request.answers[role].status == (200 if stream else 500)
        assert free(pair)
        assert await works(pair)


@pytest.mark.parametrize("leave", [False, True], ids=["abort", "leave"])
@pytest.mark.parametrize(("roles", "role", "phase"), ALONE + TOGETHER)
async def test_an_aborted_leg_is_gone_at_once(
    autojump_clock: trio.testing.MockClock, roles: tuple[str, ...], role: str, phase: Phase, leave: bool
) -> None:
    """I6: by request, or because its client has left. Only decode tells the other leg, which cannot say why."""
    async with simulated(transfer_ticks=5) as pair:
        async with running(pair, *roles) as request:
            worker = request.worker(role)
            await worker.reaches_phase(ROOM, phase)
            if roles is BOTH:
                await pair.prefill.reaches_phase(ROOM, Phase.TRANSFER)
            if leave:
                request.clients[role].cancel()
            else:
                await worker.ask({"rid": role}, "/abort_request")
            with trio.fail_after(0.001):
                await worker.scheduler.idle()
        if not leave:
            reason = f"KVTransferError(bootstrap_room={ROOM}): Aborted by AbortReq."
            assert failure(request.answers[role]) == (500, begins(role, phase) + reason)
        if roles is BOTH:
            other = "decode" if role == "prefill" else "prefill"
            status, message = failure(request.answers[other])
            assert status == 500
            wanted = "timed out after 300.0s in KVPoll.WaitingForInput"
            assert (wanted if role == "prefill" else "Failed due to an unknown reason from another rank") in message
        assert free(pair)
        assert await works(pair)


async def test_an_aborted_leg_leaves_nothing_to_the_next_one(autojump_clock: trio.testing.MockClock) -> None:
    """The decode leg of a room is not given what another prefill leg computes there."""
    async with simulated(transfer_ticks=5) as pair:
        async with running(pair, *BOTH) as request:
            await pair.prefill.reaches_phase(ROOM, Phase.TRANSFER)
            await pair.prefill.ask({"rid": "prefill"}, "/abort_request")
            await pair.prefill.scheduler.idle()
            again = await pair.prefill.ask(pair.body(body(8, bootstrap_room=ROOM)))
        assert "timed out after 300.0s in KVPoll.Bootstrapping" in failure(again)[1]
        assert "timed out after 300.0s in KVPoll.WaitingForInput" in failure(request.answers["decode"])[1]


@pytest.mark.parametrize("leave", [False, True], ids=["abort", "leave"])
async def test_prefill_does_not_notice_what_happens_after_the_transfer(
    autojump_clock: trio.testing.MockClock, leave: bool
) -> None:
    async with simulated() as pair:
        async with running(pair, *BOTH) as request:
            await pair.decode.reaches_phase(ROOM, Phase.TRANSFERRED)
            await trio.sleep(2.5)
            if leave:
                request.clients["decode"].cancel()
                await pair.decode.scheduler.idle()
            else:
                await pair.decode.ask({"rid": "decode"}, "/abort_request")
        assert value(request.answers["prefill"])["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        if not leave:
            decode = value(request.answers["decode"])
            assert decode["meta_info"]["finish_reason"]["message"] == "Aborted"
            assert decode["output_ids"] == ORACLE.answer(body(8))["output_ids"][:3]
        assert free(pair)


async def test_decode_is_aborted_while_it_looks_for_prefill(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated() as pair:
        pair.prefill.kill()
        async with running(pair, "decode") as request:
            await pair.decode.reaches_phase(ROOM, Phase.BOOTSTRAP)
            await trio.sleep(3)
            await pair.decode.ask({"rid": "decode"}, "/abort_request")
        assert trio.current_time() == 3
        assert failure(request.answers["decode"])[1].startswith("Decode handshake failed for request rank=0")
        assert free(pair)


async def test_a_prefill_worker_that_was_never_there(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated() as pair:
        pair.prefill.kill()
        async with running(pair, "decode") as request:
            pass
        assert trio.current_time() == 14  # 15 attempts, one a second
        assert failure(request.answers["decode"])[1].startswith("Decode handshake failed for request rank=0")
        await pair.prefill.restart()
        assert await works(pair)


async def test_a_prefill_worker_that_comes_while_decode_looks_for_it(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated() as pair:
        pair.prefill.kill()
        async with running(pair, "decode") as request:
            await trio.sleep(4.5)
            await pair.prefill.restart()
            prefill = await pair.prefill.ask(pair.body(body(8, bootstrap_room=ROOM)))
        assert prefill.status == request.answers["decode"].status == 200


@pytest.mark.parametrize("known", [False, True])
async def test_the_heartbeat_finds_a_dead_prefill_worker(autojump_clock: trio.testing.MockClock, known: bool) -> None:
    """Two failures, five seconds apart; and then it has to be learned of anew."""
    async with simulated(transfer_ticks=100) as pair:
        if known:
            await works(pair)
        began = trio.current_time()
        async with running(pair, *BOTH) as request:
            await pair.prefill.reaches_phase(ROOM, Phase.TRANSFER)
            await trio.sleep(6)
            pair.prefill.kill()
        assert trio.current_time() - began == 15
        address = f"{pair.prefill.host}:{pair.prefill.bootstrap_port}"
        status, message = failure(request.answers["decode"])
        assert status == 500
        assert message.endswith(f"Lost connection with prefill instance (bootstrap_addr: {address})")
        assert not request.answers["prefill"].complete
        async with running(pair, "decode") as request:
            pass
        assert failure(request.answers["decode"])[1].startswith("Decode handshake failed")
        await pair.prefill.restart()
        assert await works(pair)


async def test_a_prefill_worker_that_is_back_soon_is_not_missed(autojump_clock: trio.testing.MockClock) -> None:
    """The new process knows nothing of the room: the leg waits in vain."""
    async with simulated(transfer_ticks=100) as pair:
        async with running(pair, *BOTH) as request:
            await pair.prefill.reaches_phase(ROOM, Phase.TRANSFER)
            pair.prefill.kill()
            await pair.prefill.restart()
        assert trio.current_time() == 300
        assert "timed out after 300.0s in KVPoll.WaitingForInput" in failure(request.answers["decode"])[1]


async def test_a_partition_of_the_two(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated(transfer_ticks=3) as pair:
        network: Any = pair.prefill.network
        async with running(pair, *BOTH) as request:
            await pair.prefill.reaches_phase(ROOM, Phase.TRANSFER)
            network.partition("prefill", "decode")
        assert "Lost connection" in failure(request.answers["decode"])[1]
        assert "Decode instance could be dead" in failure(request.answers["prefill"])[1]
        network.heal("prefill", "decode")
        assert free(pair)
        assert await works(pair)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_prefill_worker_that_dies_after_the_transfer(
    autojump_clock: trio.testing.MockClock, reset: bool
) -> None:
    async with simulated() as pair:
        async with running(pair, *BOTH) as request:
            await pair.decode.reaches_phase(ROOM, Phase.TRANSFERRED)
            pair.prefill.kill(reset=reset)
        assert value(request.answers["decode"])["output_ids"] == ORACLE.answer(body(8))["output_ids"]


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_the_legs_may_come_far_apart(autojump_clock: trio.testing.MockClock, first: str) -> None:
    second = "decode" if first == "prefill" else "prefill"
    async with simulated() as pair:
        async with running(pair, first) as one:
            await trio.sleep(250)
            async with running(pair, second) as two:
                pass
        answers = one.answers | two.answers
        assert value(answers["decode"])["output_ids"] == ORACLE.answer(body(8))["output_ids"]


@pytest.mark.parametrize("where", ["memory", "sockets"])
async def test_a_live_room_kills_both(where: str) -> None:
    """I1"""
    kind = simulated if where == "memory" else real
    async with kind(tick=0.0, model=MODEL) as pair:
        pair.prefill.scheduler.pause("in_place")
        pair.decode.scheduler.pause("in_place")
        answers: list[Response] = []

        async def ask() -> None:
            answers.extend(await pair.ask(body(8, bootstrap_room=ROOM)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await pair.prefill.reaches_phase(ROOM, Phase.BOOTSTRAP)
            await pair.decode.reaches_phase(ROOM, Phase.BOOTSTRAP)
            nursery.start_soon(ask)
            with trio.fail_after(30):
                await pair.prefill.dead()
                await pair.decode.dead()
        assert [answer.complete for answer in answers] == [False] * 4
        assert (pair.prefill.deaths, pair.decode.deaths) == (1, 1)
        assert pair.prefill.rooms == pair.decode.rooms == [ROOM]
        await pair.prefill.restart()
        await pair.decode.restart()
        for _ in range(2):  # it may be taken again once it is free
            answers = list(await pair.ask(body(8, bootstrap_room=ROOM)))
            assert value(answers[1])["output_ids"] == ORACLE.answer(body(8))["output_ids"]


async def test_timeouts_over_real_sockets() -> None:
    options = {"bootstrap_timeout": 0.05, "waiting_timeout": 0.05}
    async with real(**options) as pair:
        for role, state in (("prefill", "Bootstrapping"), ("decode", "WaitingForInput")):
            async with running(pair, role) as request:
                pass
            assert failure(request.answers[role])[1].endswith(f"timed out after 0.1s in KVPoll.{state}")
        assert free(pair)


async def test_a_death_over_real_sockets() -> None:
    async with real(heartbeat=0.05, tick=0.001, transfer_ticks=10**6) as pair:
        async with running(pair, *BOTH) as request:
            await pair.prefill.reaches_phase(ROOM, Phase.TRANSFER)
            pair.prefill.kill()
        assert "Lost connection with prefill instance" in failure(request.answers["decode"])[1]
        assert free(pair)


async def test_a_leg_that_waits_holds_no_slot(autojump_clock: trio.testing.MockClock) -> None:
    async with simulated(max_running_requests=1) as pair:
        async with running(pair, "prefill") as request:
            await pair.prefill.reaches_phase(ROOM, Phase.BOOTSTRAP)
            assert await works(pair)
            request.clients["prefill"].cancel()
            await pair.prefill.scheduler.idle()
        assert free(pair)
