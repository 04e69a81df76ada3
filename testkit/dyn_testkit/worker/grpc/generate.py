"""`Generate` and `TextGenerate`: streams and unary answers over gRPC."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

import trio

from dyn_relay.grpc import sglang_pb2 as pb
from dyn_relay.grpc.status import Code
from dyn_testkit.faults import Fault, Seen, Spot, parse_fault
from dyn_testkit.grpc import Call, Status, frame
from dyn_testkit.worker.contract import Aborted, Invalid, Poisoned, Unhandled
from dyn_testkit.worker.grpc.channels import Channel
from dyn_testkit.worker.grpc.inject import WHOLE, GrpcInjector
from dyn_testkit.worker.grpc.messages import body_of, spell
from dyn_testkit.worker.inject import AnswerCut
from dyn_testkit.worker.wire import Request

if TYPE_CHECKING:
    from dyn_testkit.worker.core import MockWorker

#: How the names of SGLang's own health checks begin.
_HEALTH_CHECK = "HEALTH_CHECK"
Asked = pb.GenerateRequest | pb.TextGenerateRequest


def plant(worker: MockWorker, fault: Fault | None, seen: Seen, call: Call) -> GrpcInjector:
    """The fault of a call."""
    return GrpcInjector(fault=fault, seen=seen, plan=worker.faults, kill_worker=worker.die, call=call)


async def generate(worker: MockWorker, index: int, call: Call, request: Asked) -> None:
    """Answer a call on the worker's so many-th connection. Raises `Status`, `CallGone`."""
    rid = request.rid if request.HasField("rid") else str(UUID(hex=worker.new_rid()))
    if rid.startswith(_HEALTH_CHECK):
        await _say_how_it_is(worker, call)
        return
    body = body_of(request, rid)
    data = json.dumps(body).encode()
    headers = tuple((name.encode(), value.encode()) for name, value in call.metadata)
    worker.record(Request("POST", "/generate", headers, data), index)
    seen = Seen(len(worker.generates) - 1, rid, data, grpc=True)
    deaths = worker.deaths
    inject = plant(worker, _fault(worker, call, seen), seen, call)
    text = isinstance(request, pb.GenerateRequest) and request.return_text
    try:
        with worker.channels.open(rid, worker.options.grpc_response_timeout) as channel:
            await _Answer(worker, call, channel, inject, body, type(request), text).run()
    except AnswerCut:
        pass
    except Poisoned:
        await trio.sleep(worker.options.death_delay)
        worker.die()
        await trio.lowlevel.checkpoint()
    finally:
        if call.left and worker.deaths == deaths:
            worker.record_disconnect()


async def _say_how_it_is(worker: MockWorker, call: Call) -> None:
    """A token, if tokens are made; as with `/health`, nobody counts it. Raises `Status`, `CallGone`."""
    if worker.health_status is None or worker.scheduler.running:
        await trio.sleep_forever()  # a busy scheduler drops it (0.5.23): what it is at shows that it works
    while worker.scheduler.paused:
        await worker.scheduler.wait_changed()
    await trio.sleep(worker.options.health_delay)
    if worker.health_status != 200:
        raise Status(Code.INTERNAL, "503: not well")
    await call.head()
    await call.send(
        pb.GenerateResponse(output_ids=[0], meta_info={"finish_reason": '{"type": "length"}'}, finished=True)
    )
    await call.finish(Code.OK)


def _fault(worker: MockWorker, call: Call, seen: Seen) -> Fault | None:
    asked = call.header("x-mock-fault")
    if asked is None or not worker.options.allow_header_faults:
        return worker.faults.for_request(seen)
    try:
        return parse_fault(asked)
    except ValueError as exc:
        raise Status(Code.INVALID_ARGUMENT, f"x-mock-fault: {exc}") from exc


@dataclass(slots=True)
class _Answer:
    """The answer to one call, on its way out."""

    worker: MockWorker
    call: Call
    channel: Channel
    inject: GrpcInjector
    body: dict[str, Any]
    kind: type[Asked]
    #: Messages with ids have the text, too.
    text: bool
    #: Of several samples: those that have finished.
    _finished: set[int | str] = field(default_factory=set)
    _lock: trio.Lock = field(default_factory=trio.Lock)

    async def run(self) -> None:
        """Send it. Raises `Status`, `AnswerCut`, `CallGone`, `Poisoned`."""
        await self.inject.at(Spot.AT_HEAD)
        await self.call.head()
        with self.channel.limited():
            try:
                await (self._stream() if self.body["stream"] else self._unary())
            except (Invalid, Unhandled) as exc:
                raise Status(Code.INTERNAL, str(exc)) from exc
        await self.inject.at(Spot.AFTER_FINISH)
        await self.inject.at(Spot.BEFORE_LAST_CHUNK)
        await self.call.finish(Code.OK)
        await self.inject.at(Spot.AFTER_DONE)

    async def _stream(self) -> None:
        copies = max(1, self.body["sampling_params"].get("n", 1))

        async def send(value: dict[str, Any], sent: int, total: int) -> None:
            meta = value["meta_info"]
            if meta["finish_reason"] is not None:
                self._finished.add(value.get("index", meta["id"]))
            await self._send(value, len(self._finished) >= copies, sent, total)

        await self.worker.manager.stream(self.body, self.inject, send)

    async def _unary(self) -> None:
        try:
            values, _ = await self.worker.manager.unary(self.body, self.inject)
        except Aborted as exc:
            # A bad request is a ValueError there, all else an HTTPException, whose text begins with its status.
            bad = exc.status_code == 400
            raise Status(Code.INTERNAL, exc.message if bad else f"{exc.status_code}: {exc.message}") from exc
        for value in values:
            await self._send(value, value is values[-1], 0, WHOLE)

    async def _send(self, value: dict[str, Any], finished: bool, sent: int, total: int) -> None:
        meta = value["meta_info"]
        if "e2e_latency" in meta:
            # Two clocks: the engine takes from its own one what the gRPC side has read from the wall's.
            meta["e2e_latency"] -= self.worker.options.epoch
        kind = pb.GenerateResponse if self.kind is pb.GenerateRequest else pb.TextGenerateResponse
        framed = frame(spell(value, kind, finished=finished, text=self.text))
        async with self._lock:
            framed = await self.inject.cut(Spot.INSIDE_CHUNK_SIZE, sent, total, framed)
            framed = await self.inject.cut(Spot.INSIDE_JSON, sent, total, framed)
            self.channel.held()
            with trio.move_on_after(self.worker.options.grpc_backpressure_timeout) as patience:
                await self.call.send_raw(framed)
            if patience.cancelled_caught:
                why = f"gRPC response channel full for {self.body['rid']}: client not consuming"
                self.channel.end(Status(Code.RESOURCE_EXHAUSTED, why))
            self.channel.moved()
