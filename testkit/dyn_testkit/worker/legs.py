"""The two legs of a prefill/decode pair, as SGLang 0.5.23 runs them.

Both workers get the same request. The prefill leg waits until the decode leg has come to its bootstrap server
(`BOOTSTRAP`), computes the prompt and one token, hands over what it has (`TRANSFER`), and answers with that token. The
decode leg finds out where to go (`BOOTSTRAP`), waits for what it is to get (`TRANSFER`), and answers with all tokens.
A decode leg that ends while it waits tells the prefill leg, which then ends, too (`AbortNotification`). Else nobody
tells a leg that the other one has ended: what is left alone waits for its timeout, or for the heartbeat to fail.

Texts of errors and numbers: `disaggregation/{prefill,decode}.py` and `common/conn.py`, and recorded answers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import trio

from dyn_relay.net import ConnectFailed, Connection, Network
from dyn_testkit import engine
from dyn_testkit.client import Ongoing, Response, begin, fetch
from dyn_testkit.faults import Spot
from dyn_testkit.worker.bootstrap import DROP, RANKS, TAKE, TOOK, BootstrapServer, Visitor
from dyn_testkit.worker.contract import Aborted, Poisoned
from dyn_testkit.worker.inject import Injector
from dyn_testkit.worker.jobs import Job
from dyn_testkit.worker.options import WorkerOptions
from dyn_testkit.worker.render import Live
from dyn_testkit.worker.scheduler import Emit, Scheduler
from dyn_testkit.worker.wire import json_reply, reply_bytes

#: Attempts to learn of a prefill worker, and seconds between them.
_ATTEMPTS, _BETWEEN = 15, 1.0
#: Seconds that a question to a bootstrap server may take, and failed heartbeats in a row that are a death.
_PATIENCE, _FAILURES = 5.0, 2
_BY_REQUEST = "Aborted by AbortReq."
#: What a prefill leg says that its decode leg has told to end: it knows no reason.
_BY_THE_OTHER = "Failed due to an unknown reason from another rank"


class Phase(enum.Enum):
    """How far a leg has come."""

    BOOTSTRAP = "bootstrap"  #: its room is taken, it looks for the other one
    TRANSFER = "transfer"  #: prefill: hands over what it has computed; decode: waits for that
    TRANSFERRED = "transferred"  #: it is done with the other one


@dataclass(slots=True)
class Rooms:
    """The rooms of one process."""

    #: Told of each phase that a room comes to.
    reach: Callable[[int, Phase], None]
    live: set[int] = field(default_factory=set)

    @contextmanager
    def take(self, job: Job) -> Iterator[int]:
        """Hold the job's room. Raises `Aborted` if it has none; `Poisoned` if it is live, which kills the scheduler.

        Samples of one prompt share a room (and never meet their twins).
        """
        room = job.bootstrap_room
        if room is None:
            words = "Invalid request: Disaggregated request received without bootstrap room id."
            raise Aborted(f"{words} req.rid={job.rid!r}", 400)
        if room in self.live and job.copies == 1:
            raise Poisoned(f"bootstrap_room {room} is live")
        if room not in self.live:
            self.reach(room, Phase.BOOTSTRAP)
        self.live.add(room)
        try:
            yield room
        finally:
            self.live.discard(room)


def _failed(what: str, where: str, job: Job, reason: str) -> Aborted:
    room = job.bootstrap_room
    request = f"rank=0 {where}.rid={job.rid!r} {where}.bootstrap_room={room}"
    error = f"KVTransferError(bootstrap_room={room}): {reason}"
    return Aborted(f"{what} failed for request {request} with exception {error}", 500)


def _timed_out(job: Job, seconds: float, phase: str) -> str:
    return f"Request {job.bootstrap_room} timed out after {seconds:.1f}s in KVPoll.{phase}"


async def first(*waits: Callable[[], Awaitable[Any]]) -> tuple[int, Any]:
    """Run all until one returns, and drop the others: which it was, and what it returned. None of them may raise."""
    ended: list[tuple[int, Any]] = []

    async def run(index: int, wait: Callable[[], Awaitable[Any]]) -> None:
        ended.append((index, await wait()))
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index, wait in enumerate(waits):
            nursery.start_soon(run, index, wait)
    return ended[0]


@dataclass(slots=True)
class PrefillLeg:
    """The first half of a request: its prompt and one token."""

    options: WorkerOptions
    rooms: Rooms
    server: BootstrapServer

    async def __call__(self, scheduler: Scheduler, live: Live, inject: Injector, emit: Emit) -> None:
        """Run it. Raises what `Scheduler.run` does, and `Dropped`."""
        with self.rooms.take(live.job) as room:
            await inject.at(Spot.AT_BOOTSTRAP)
            visitor = await self._bootstrap(scheduler, live, room)
            try:
                async with scheduler.slot(live):
                    scheduler.prefill(live)
                    await scheduler.forward(live)
                    self._compute(scheduler, live)
                self.rooms.reach(room, Phase.TRANSFER)
                await self._transfer(scheduler, live, inject, visitor)
            finally:
                visitor.connection.close()
            self.rooms.reach(room, Phase.TRANSFERRED)
            await inject.at(Spot.AFTER_TRANSFER)
            await scheduler.conclude(live, inject, emit, {"type": "length", "length": 0})

    async def _bootstrap(self, scheduler: Scheduler, live: Live, room: int) -> Visitor:
        job, patience = live.job, self.options.bootstrap_timeout
        ended, visitor = await first(
            partial(self.server.visitor, job.dp_rank or 0, room),
            partial(scheduler.aborted, live),
            partial(trio.sleep, patience),
        )
        if ended == 0:
            assert isinstance(visitor, Visitor)
            return visitor
        reason = _BY_REQUEST if ended == 1 else _timed_out(job, patience, "Bootstrapping")
        raise _failed("Prefill bootstrap", "req", job, reason)

    def _compute(self, scheduler: Scheduler, live: Live) -> None:
        job, options = live.job, self.options
        one = replace(job.sampling, max_new_tokens=1)
        step = next(engine.generate(options.model, job.prompt, one, job.adapter, options.tokenizer))
        live.add(options.model, step, scheduler.weight_version)

    async def _transfer(self, scheduler: Scheduler, live: Live, inject: Injector, visitor: Visitor) -> None:
        """Hand over the history, and the first token's logprob if it is known here: the decode leg knows no better."""
        job = live.job
        kv = {
            "ids": [*job.prompt, *live.ids],
            "logprob": live.token_logprobs[0][0] if live.token_logprobs else 0.0,
            "cached": live.cached,
        }
        reply = json_reply(kv)
        head = reply_bytes(reply, self.server.wall(), keep=True, with_body=False)
        await visitor.give(head + reply.body[:1])
        await inject.at(Spot.IN_TRANSFER)

        async def give() -> None:
            for _ in range(self.options.transfer_ticks):
                await scheduler.forward(live)
            await visitor.give(reply.body[1:])
            await trio.sleep(self.options.waiting_timeout)

        await first(give, visitor.gone, partial(scheduler.aborted, live))
        if visitor.served:
            return
        reason = f"Decode instance could be dead, remote mooncake session {visitor.connection.peer} is not alive"
        if live.abort is not None:
            reason = _BY_REQUEST
        elif visitor.dropped:
            reason = _BY_THE_OTHER
        raise _failed("Prefill transfer", "req", job, reason)


@dataclass(slots=True)
class _Parcel:
    """What a decode leg waits for, on its way."""

    connection: Connection | None = None
    ongoing: Ongoing | None = None

    async def begins(self, network: Network, host: str, port: int, wanted: dict[str, int]) -> None:
        """Ask for it; return when some of it is here. What does not come is waited for in vain."""
        try:
            self.connection = await network.connect(host, port)
        except ConnectFailed:
            await trio.sleep_forever()
        assert self.connection is not None
        self.ongoing = await begin(self.connection, TAKE, wanted)
        if not await self.ongoing.more():
            await trio.sleep_forever()

    async def ends(self) -> dict[str, Any]:
        """Return it when all of it is here, and say so."""
        assert self.connection is not None
        assert self.ongoing is not None
        response = await self.ongoing.rest()
        if not response.complete:
            await trio.sleep_forever()
        await begin(self.connection, TOOK, {})
        kv: dict[str, Any] = response.json()
        return kv

    async def close(self, *, tell: bool) -> None:
        """Want it no more, and `tell` so."""
        if self.connection is None:
            return
        if tell:
            with trio.CancelScope(deadline=trio.current_time() + _PATIENCE, shield=True):
                await begin(self.connection, DROP, {})
        self.connection.close()


@dataclass(slots=True)
class _Heartbeat:
    """Looks again and again whether a prefill worker is there."""

    alive: Callable[[], Awaitable[bool]]
    interval: float
    due: float
    failures: int = 0

    async def stops(self) -> None:
        """Return once it has failed often enough in a row."""
        while self.failures < _FAILURES:
            await trio.sleep_until(self.due)
            self.due = trio.current_time() + self.interval
            self.failures = 0 if await self.alive() else self.failures + 1


@dataclass(slots=True)
class DecodeLeg:
    """The second half of a request: all tokens, the first of them from the prefill leg."""

    options: WorkerOptions
    rooms: Rooms
    network: Network
    #: The process lives.
    alive: Callable[[], bool]
    #: DP ranks of the prefill workers that it knows, by bootstrap address.
    prefills: dict[tuple[str, int], int] = field(default_factory=dict)

    async def __call__(self, scheduler: Scheduler, live: Live, inject: Injector, emit: Emit) -> None:
        """Run it. Raises what `Scheduler.run` does, and `Dropped`."""
        job = live.job
        address = (str(job.bootstrap_host), job.bootstrap_port or self.options.bootstrap_port)
        with self.rooms.take(job) as room:
            await inject.at(Spot.AT_BOOTSTRAP)
            rank = await self._handshake(scheduler, live, address, room)
            self.rooms.reach(room, Phase.TRANSFER)
            kv = await self._receive(scheduler, live, inject, address, {"rank": rank, "room": room})
            self.rooms.reach(room, Phase.TRANSFERRED)
            await inject.at(Spot.AFTER_TRANSFER)
            async with scheduler.slot(live):
                live.cached, live.told_logprob = kv["cached"], kv["logprob"]
                ids, model = kv["ids"], self.options.model
                model = replace(model, recites=(*ids, *model.recites[len(ids) :]))
                await scheduler.decode(live, inject, emit, model, ids[:-1])

    async def _handshake(self, scheduler: Scheduler, live: Live, address: tuple[str, int], room: int) -> int:
        """The rank that has the prompt."""
        job = live.job
        await first(partial(self._learn, address), partial(scheduler.aborted, live))
        size = self.prefills.get(address)
        if size is None or live.abort is not None:
            raise _failed("Decode handshake", "decode_req.req", job, _BY_REQUEST)
        rank = room % size if job.prefill_rank is None else job.prefill_rank
        if not 0 <= rank < size:
            ranks = f"prefill_dp_rank: {rank} prefill_cp_rank: 0 target_tp_rank: 0 and target_pp_rank 0"
            raise _failed("Decode handshake", "decode_req.req", job, f"Could not fetch bootstrap info for: {ranks}")
        return rank

    async def _learn(self, address: tuple[str, int]) -> None:
        for attempt in range(_ATTEMPTS):
            if address in self.prefills:
                return
            await trio.sleep(_BETWEEN if attempt else 0)
            response = await self._get(address, "/route?" + "&".join(f"{name}=-1" for name in RANKS))
            if response.status == 200 and response.complete:
                self.prefills[address] = response.json()["dp_size"]

    async def _receive(
        self, scheduler: Scheduler, live: Live, inject: Injector, address: tuple[str, int], wanted: dict[str, int]
    ) -> dict[str, Any]:
        job, patience, interval = live.job, self.options.waiting_timeout, self.options.heartbeat or math.inf
        began = trio.current_time()
        heartbeat = _Heartbeat(partial(self._answers, address), interval, began + interval)
        parcel, taken = _Parcel(), False

        async def until(wait: Callable[[], Awaitable[Any]]) -> Any:
            ended, value = await first(
                wait,
                partial(scheduler.aborted, live),
                partial(trio.sleep_until, began + patience),
                heartbeat.stops,
            )
            if ended == 0:
                return value
            if ended == 3:
                self.prefills.pop(address, None)  # to be learned of anew
            lost = f"Lost connection with prefill instance (bootstrap_addr: {address[0]}:{address[1]})"
            reason = (_BY_REQUEST, _timed_out(job, patience, "WaitingForInput"), lost)[ended - 1]
            raise _failed("Decode transfer", "decode_req.req", job, reason)

        try:
            meets = job.copies == 1 and -(1 << 63) <= wanted["room"] < 1 << 63
            await until(partial(parcel.begins, self.network, *address, wanted) if meets else trio.sleep_forever)
            await inject.at(Spot.IN_TRANSFER)
            kv = await until(parcel.ends)
            taken = True
            if not wanted["room"]:
                await until(trio.sleep_forever)  # 0 is what stands where no room was written yet
        finally:
            await parcel.close(tell=not taken and self.alive())
        assert isinstance(kv, dict)
        return kv

    async def _answers(self, address: tuple[str, int]) -> bool:
        return (await self._get(address, "/health")).status == 200

    async def _get(self, address: tuple[str, int], path: str) -> Response:
        """An answer of a bootstrap server; an empty one if there is none."""
        host, port = address
        with trio.move_on_after(_PATIENCE):
            try:
                return await fetch(self.network, f"http://{host}:{port}", path)
            except ConnectFailed:
                pass
        return Response()
